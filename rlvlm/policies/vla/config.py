"""Which VLA acts, and how; imports nothing heavy so that the command line starts at once."""

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from rlvlm.core.checks import check_least
from rlvlm.core.plugins import is_reference
from rlvlm.policies.own import check_head
from rlvlm.policies.vla.flow.config import FlowConfig
from rlvlm.policies.vla.lerobot.config import LeRobotConfig

ImagePath = Literal["cropped", "whole"]
HEADS = ("tokens", "flow")
"""Heads that the pocket VLA may answer by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PocketVLAConfig:
    """The pocket VLA's widths; the defaults make 0.6 million parameters."""

    image_px: int = 32
    """Side of the square images it looks at, even."""
    channels: tuple[int, int] = (16, 24)
    """Channels of its two convolutions; the first halves the image."""
    dilated: int = 0
    """Convolutions between these two, each added to what came in, that look 2, 4, 8, ... places around: what a thing
    is shows farther off than the nine pixels that two convolutions see."""
    predicts_offsets: bool = False
    """Whether it learns, beside its actions, to predict the offsets from the hand to the things of the task (an
    auxiliary task, Jaderberg et al. 2016, arXiv:1611.05397). The simulator gives them with the demonstrations; it acts
    on images alone."""
    has_values: bool = False
    """Whether it has a value head, for estimators with a critic."""
    hidden: int = 256
    """Width of the trunk."""
    token_width: int = 32
    """Width of an action token before it meets the table of bins."""
    vocabulary: int = 1_024
    """Rows of the table of words; words and pairs of words are hashed into it."""
    word_width: int = 32
    """Width of the table of words."""

    def __post_init__(self) -> None:
        sizes = (self.image_px, *self.channels, self.hidden, self.token_width, self.vocabulary, self.word_width)
        if min(sizes) < 1 or self.image_px % 2 or self.dilated < 0:
            got = f"image_px {self.image_px}, dilated {self.dilated} and smallest size {min(sizes)}"
            raise ValueError(f"policy.pocket: all sizes must be >= 1, image_px even and dilated >= 0, got {got}")


LINEAR_LAYERS = r".*\.(qkv|proj|fc1|fc2|fc3|q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
"""The linear layers of image encoders, projector and language model; not the one that gives words their logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenVLAConfig:
    """How an OpenVLA-OFT checkpoint is shown the env, and what of it learns."""

    section: ClassVar[str] = "policy.openvla"
    """Where these fields stand on the command line, for messages."""

    unnorm_key: str = ""
    """Data set in the checkpoint's dataset_statistics.json whose quantiles scale the actions, e.g.
    libero_10_no_noops; may be empty where the file has only one."""
    cameras: int = 1
    """How many of the env's cameras it was trained with, the first ones, >= 1."""
    image_px: int = 256
    """Side of the square images that the env draws; they are then made as large as the image encoders want."""
    images: ImagePath = "cropped"
    """cropped: JPEG, Lanczos, the middle 90 % of the area, as OpenVLA-OFT and SimpleVLA-RL evaluate; whole: bicubic and
    nothing cut off, as RLinf trains."""
    has_stop: bool = True
    """Whether a stop token follows the chunk, as OpenVLA-OFT was trained; RLinf leaves it out."""
    learns: Literal["lora", "all"] = "lora"
    """lora: an adapter beside the weights; all: every weight, in float32."""
    adapter: str = ""
    """Folder of a LoRA adapter to go on from, in PEFT's format; empty: a fresh one."""
    lora_rank: int = 32
    """Inner size of a fresh adapter, >= 1."""
    lora_alpha: float = 16.0
    """A fresh adapter's part is scaled by lora_alpha / lora_rank."""
    lora_targets: str = LINEAR_LAYERS
    """Regular expression on the full names of the layers that a fresh adapter is put beside."""
    at_once: int = 64
    """Observations that go through it at once where nothing is learned, >= 1: rollouts and evaluations hold all of
    theirs, and a smaller GPU less. Updates have `algo.microbatch_turns`."""
    recompute: bool | None = None
    """Gradient checkpointing: compute every block of the language model and the image encoders a second time in the
    update and keep less in memory. None: from 500 million parameters on."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the weights beside an adapter. auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        if min(self.cameras, self.image_px, self.lora_rank, self.at_once) < 1 or not self.lora_alpha > 0:
            raise ValueError(f"need cameras, image_px, lora_rank and at_once >= 1 and lora_alpha > 0, got {self}")
        if self.learns == "all" and self.adapter:
            raise ValueError(f"{self.section}.adapter has no effect where learns is all; merge it into the weights")
        if self.learns == "all" and self.dtype == "bfloat16":
            raise ValueError(
                f"{self.section}.dtype bfloat16 is too coarse for weights that learn; use lora or leave out dtype"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class VLAConfig:
    """Which VLA acts."""

    model: str = ""
    """Folder or hub name of an OpenVLA-OFT checkpoint with a token head or, with `head` flow, of a SmolVLA, a pi0 or a
    pi0.5 in LeRobot's layout; empty: the pocket VLA, made by the run."""
    revision: str = ""
    """Commit of a hub model; empty takes the newest."""
    head: str = "tokens"
    """Kind of policy. tokens: a VLA that answers in action tokens; flow: one that denoises chunks (flow matching),
    which is the pocket VLA with another head where no model is named; or a VLA of your own as `module:NAME`, a class or
    function that is called with the env and `settings`."""
    settings: dict[str, str] = field(default_factory=dict)
    """Settings of a VLA of your own: names and values by turns, e.g. `--policy.settings width 64`."""
    conditioned: bool = False
    """Whether the policy is asked for what is better than expected, as one that has learned with `sft.weighting
    condition` has to be; see `policies.advantage_prompt`."""
    cache_mib: int = 256
    """Room for the images of an update, in MiB of memory of each process that acts or learns, >= 1; images that do not
    fit are drawn again."""
    pocket: PocketVLAConfig = field(default_factory=PocketVLAConfig)
    openvla: OpenVLAConfig = field(default_factory=OpenVLAConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    lerobot: LeRobotConfig = field(default_factory=LeRobotConfig)

    def __post_init__(self) -> None:
        check_least(self, "policy", 1, "cache_mib")
        others = self.openvla, self.lerobot
        if not self.model and (self.revision or others != (OpenVLAConfig(), LeRobotConfig())):
            raise ValueError(
                "policy.revision, policy.openvla and policy.lerobot have no effect without policy.model; name a "
                "checkpoint"
            )
        idle = self.openvla if self.head == "flow" else self.lerobot
        if idle != type(idle)():
            raise ValueError(f"{idle.section} has no effect with policy.head {self.head}; leave one of them out")
        check_head(self, HEADS)
        if self.flow != FlowConfig() and self.head != "flow":
            raise ValueError(f"policy.flow has no effect with policy.head {self.head}; add --policy.head flow")
        if self.model and self.flow.kernel == "learned":
            raise ValueError(
                "policy.flow.kernel learned is not for a policy.model: a checkpoint of LeRobot has no head for learned "
                "noise; use sde or cps"
            )

    @property
    def is_own(self) -> bool:
        """Whether a VLA of the user's own acts."""
        return is_reference(self.head)

    @property
    def loading(self) -> OpenVLAConfig | LeRobotConfig:
        """How a checkpoint's weights are held and computed."""
        return self.lerobot if self.head == "flow" else self.openvla

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter learns, and not a checkpoint's own weights."""
        return self.loading.learns.startswith("lora")

    @property
    def smaller(self) -> str:
        """The setting with which a checkpoint takes less memory; empty where there is none."""
        return "" if self.has_adapter else f"--{self.loading.section}.learns lora"

    def built_by(self) -> dict[str, Any]:
        """Settings by which a policy that is made anew has the weights that it has, by name."""
        if self.is_own:
            return {"policy.head": self.head, "policy.settings": self.settings}
        named = {"policy.head": self.head, "policy.conditioned": self.conditioned} | {
            f"policy.pocket.{name}": one for name, one in asdict(self.pocket).items()
        }
        if self.head == "flow":  # how chunks are denoised changes no weight, but learned noise has a head
            named["policy.flow.kernel"] = "learned" if self.flow.kernel == "learned" else "sde or cps"
        return named
