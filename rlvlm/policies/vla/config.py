"""Settings of a VLA as policy; imports nothing heavy so that the command line starts at once."""

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

from rlvlm.core.checks import Needs, NonNegativeInt, PositiveFloat, PositiveInt, check_bounds
from rlvlm.core.guests import PolicyCheckpoint, guest_of, with_guests, with_sections
from rlvlm.core.leads import CodeRef, FilePath, ModelName, OwnSetting
from rlvlm.core.references import is_reference
from rlvlm.policies.own import check_head
from rlvlm.policies.vla.flow.config import FlowConfig

HEADS = ("tokens", "flow")
"""Heads of the pocket VLA."""


@functools.cache
def checkpoints() -> Mapping[str, PolicyCheckpoint]:
    """Returns the kinds of pretrained policies by head; all come from guests."""
    return with_guests("checkpoints", {})


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


@dataclass(frozen=True, kw_only=True, slots=True)
class NoCheckpoint:
    """What a VLA without a checkpoint has in place of loading settings."""

    section: ClassVar[str] = "policy"
    learns: str = "all"
    adapter: FilePath = ""
    device: str = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
@with_sections("policy")
class VLAConfig:
    """Settings of the VLA that acts."""

    model: ModelName = ""
    """Folder or hub name of a checkpoint that a guest loads: an OpenVLA-OFT with a token head or, with `head` flow, a
    SmolVLA, a pi0 or a pi0.5 in LeRobot's layout; empty: the pocket VLA, trained by the run."""
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
    guidance: Annotated[PositiveFloat, Needs("conditioned")] = 1.0
    """Weight of the word that `conditioned` adds to the prompt, whenever the policy plays: above 1 exaggerates what it
    changes, at twice the computation (classifier-free guidance, Ho & Salimans 2022, arXiv:2207.12598); 1 is no
    guidance."""
    cache_mib: PositiveInt = 256
    """Memory for the images of an update in each process that samples or learns, MiB, >= 1; images that do not fit are
    drawn again."""
    pocket: PocketVLAConfig = field(default_factory=PocketVLAConfig)
    flow: Annotated[FlowConfig, Needs("head", "flow")] = field(default_factory=FlowConfig)

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
        """Loading settings of a checkpoint's weights: the section of the guest that has those of this head."""
        return getattr(self, self.checkpoint.section) if self.head in checkpoints() else NoCheckpoint()

    @property
    def checkpoint(self) -> PolicyCheckpoint:
        """Kind of the checkpoint that `model` names."""
        return checkpoints()[self.head]

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
