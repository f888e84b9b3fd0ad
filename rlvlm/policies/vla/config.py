"""Settings of a VLA as policy; imports nothing heavy so that the command line starts at once."""

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from rlvlm.core.checks import NonNegativeInt, PositiveFloat, PositiveInt, check_bounds
from rlvlm.core.guests import PolicyCheckpoint, guest_of, with_guests, with_sections
from rlvlm.core.leads import CodeRef, FilePath, ModelName, OwnSetting
from rlvlm.core.references import is_reference
from rlvlm.policies.own import check_head
from rlvlm.policies.vla.flow.config import FlowConfig

ImagePath = Literal["cropped", "whole"]
HEADS = ("tokens", "flow")
"""Heads of the pocket VLA."""
CHECKPOINTS: Mapping[str, PolicyCheckpoint] = {
    "tokens": PolicyCheckpoint(
        section="openvla",
        build="rlvlm.policies.vla.openvla.loading:load_openvla",
        check="rlvlm.policies.vla.openvla.loading:fitted",
        outline="rlvlm.policies.vla.openvla.loading:outline",
    )
}
"""Pretrained policies of the core, by head; `checkpoints` has the guests' too."""


@functools.cache
def checkpoints() -> Mapping[str, PolicyCheckpoint]:
    """Returns the kinds of pretrained policies by head, those of guests included."""
    return with_guests("checkpoints", CHECKPOINTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class PocketVLAConfig:
    """Sizes of the pocket VLA; the defaults make 0.6 million parameters."""

    image_px: PositiveInt = 32
    """Side of its square images, pixels, even."""
    channels: tuple[PositiveInt, PositiveInt] = (16, 24)
    """Channels of its two convolutions; the first halves the image."""
    dilated: NonNegativeInt = 0
    """Number of dilated convolutions in between, each added to its input, with dilation 2, 4, 8, ...: features then
    depend on more than the nine pixels that two convolutions see."""
    predicts_offsets: bool = False
    """Whether it also learns to predict the offsets from the hand to the things of the task (an auxiliary task,
    Jaderberg et al. 2016, arXiv:1611.05397). The simulator gives them with the demonstrations; the policy acts on
    images alone."""
    has_values: bool = False
    """Whether it has a value head, for estimators with a critic."""
    hidden: PositiveInt = 256
    """Width of the trunk."""
    token_width: PositiveInt = 32
    """Width of an action token before the table of bins."""
    vocabulary: PositiveInt = 1_024
    """Rows of the word table; words and pairs of words are hashed into it."""
    word_width: PositiveInt = 32
    """Width of the word table."""

    def __post_init__(self) -> None:
        check_bounds(self, "policy.pocket")
        if self.image_px % 2:
            raise ValueError(f"policy.pocket.image_px must be even, got {self.image_px}")


LINEAR_LAYERS = r".*\.(qkv|proj|fc1|fc2|fc3|q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
"""Linear layers of image encoders, projector and language model, except the one that computes the logits of words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenVLAConfig:
    """Inputs of an OpenVLA-OFT checkpoint, and which of its weights are trained."""

    section: ClassVar[str] = "policy.openvla"
    """Prefix of these fields on the command line, for messages."""

    unnorm_key: str = ""
    """Data set in the checkpoint's dataset_statistics.json whose quantiles scale the actions, e.g. libero_10_no_noops;
    may be empty if the file has only one."""
    cameras: PositiveInt = 1
    """Number of the env's cameras, from the first on, that it was trained with, >= 1."""
    image_px: PositiveInt = 256
    """Side of the square images that the env draws, pixels; they are then resized for the image encoders."""
    images: ImagePath = "cropped"
    """Preparation of images. cropped: JPEG, Lanczos, the middle 90 % of the area, as OpenVLA-OFT and SimpleVLA-RL
    evaluate; whole: bicubic and uncropped, as RLinf trains."""
    has_stop: bool = True
    """Whether a stop token follows the chunk, as OpenVLA-OFT was trained; RLinf leaves it out."""
    learns: Literal["lora", "all"] = "lora"
    """Trained weights. lora: an adapter; all: every weight, in float32."""
    adapter: FilePath = ""
    """Folder of a LoRA adapter to continue from, in PEFT's format; empty: a fresh one."""
    lora_rank: PositiveInt = 32
    """Inner size of a fresh adapter, >= 1."""
    lora_alpha: PositiveFloat = 16.0
    """Scale of a fresh adapter's output, which is multiplied by lora_alpha / lora_rank."""
    lora_targets: str = LINEAR_LAYERS
    """Regular expression on the full names of the layers that get a fresh adapter."""
    at_once: PositiveInt = 64
    """Maximum observations per forward pass without gradients, >= 1: rollouts and evaluations have many at once, more
    than fit on a smaller GPU. For updates see `algo.microbatch_turns`."""
    recompute: bool | None = None
    """Whether to use gradient checkpointing, which computes every block of the language model and the image encoders a
    second time in the update to save memory. None: from 500 million parameters on."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the weights besides an adapter. auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        check_bounds(self, self.section)
        if self.learns == "all" and self.adapter:
            raise ValueError(f"{self.section}.adapter has no effect where learns is all; merge it into the weights")
        if self.learns == "all" and self.dtype == "bfloat16":
            raise ValueError(
                f"{self.section}.dtype bfloat16 is too coarse for weights that learn; use lora or leave out dtype"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
@with_sections("policy")
class VLAConfig:
    """Settings of the VLA that acts."""

    model: ModelName = ""
    """Folder or hub name of an OpenVLA-OFT checkpoint with a token head or, with `head` flow, of a SmolVLA, a pi0 or a
    pi0.5 in LeRobot's layout; empty: the pocket VLA, trained by the run."""
    revision: str = ""
    """Commit of a hub model; empty takes the newest."""
    head: CodeRef = "tokens"
    """Kind of policy. tokens: a VLA with action tokens; flow: one that denoises chunks (flow matching), which is the
    pocket VLA with another head if no model is named; or a VLA of your own as `module:NAME`, a class or function that
    is called with the env and `settings`."""
    settings: dict[str, OwnSetting] = field(default_factory=dict)
    """Settings of a VLA of your own, names and values alternating, e.g. `--policy.settings width 64`."""
    conditioned: bool = False
    """Whether the prompt asks for an answer better than expected, as needed after training with `sft.weighting
    condition`; see `policies.advantage_prompt`."""
    cache_mib: PositiveInt = 256
    """Memory for the images of an update in each process that samples or learns, MiB, >= 1; images that do not fit are
    drawn again."""
    pocket: PocketVLAConfig = field(default_factory=PocketVLAConfig)
    openvla: OpenVLAConfig = field(default_factory=OpenVLAConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)

    def __post_init__(self) -> None:
        check_bounds(self, "policy")
        sections = {head: getattr(self, kind.section) for head, kind in checkpoints().items()}
        changed = [section.section for section in sections.values() if section != type(section)()]
        if not self.model and (self.revision or changed):
            raise ValueError(
                f"{' and '.join(['policy.revision'] * bool(self.revision) + changed)} has no effect without "
                "policy.model; name a checkpoint"
            )
        for head, section in sections.items():
            if head != self.head and section.section in changed:
                raise ValueError(f"{section.section} has no effect with policy.head {self.head}; leave one of them out")
        check_head(self, HEADS)
        if self.model and self.head not in sections and not self.is_own:
            missing = guest_of("checkpoints", self.head)
            raise ValueError(f"policy.head {self.head} has no checkpoints that policy.model could name{missing}")
        if self.flow != FlowConfig() and self.head != "flow":
            raise ValueError(f"policy.flow has no effect with policy.head {self.head}; add --policy.head flow")
        if self.model and self.flow.kernel == "learned":
            raise ValueError(
                "policy.flow.kernel learned is not for a policy.model: a checkpoint of LeRobot has no head for learned "
                "noise; use sde or cps"
            )

    @property
    def is_own(self) -> bool:
        """Whether the VLA is the user's own."""
        return self.head not in HEADS and is_reference(self.head, "policy.head")

    @property
    def loading(self) -> Any:
        """Loading settings of a checkpoint's weights: an `OpenVLAConfig`, or a guest's."""
        return getattr(self, self.checkpoint.section)

    @property
    def checkpoint(self) -> PolicyCheckpoint:
        """Kind of the checkpoint that `model` names."""
        return checkpoints().get(self.head, CHECKPOINTS["tokens"])

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained, rather than a checkpoint's own weights."""
        return self.loading.learns.startswith("lora")

    @property
    def smaller(self) -> str:
        """Setting that reduces a checkpoint's memory; empty if there is none."""
        return "" if self.has_adapter else f"--{self.loading.section}.learns lora"

    def built_by(self) -> dict[str, Any]:
        """Returns the settings, by name, with which a rebuilt policy has the same weights."""
        if self.is_own:
            return {"policy.head": self.head, "policy.settings": self.settings}
        named = {"policy.head": self.head, "policy.conditioned": self.conditioned} | {
            f"policy.pocket.{name}": one for name, one in asdict(self.pocket).items()
        }
        if self.head == "flow":  # denoising settings change no weight, but learned noise has a head
            named["policy.flow.kernel"] = "learned" if self.flow.kernel == "learned" else "sde or cps"
        return named
