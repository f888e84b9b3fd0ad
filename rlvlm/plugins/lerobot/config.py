"""Settings of a checkpoint in LeRobot's layout; imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rlvlm.core.checks import PositiveFloat, PositiveInt, check_bounds
from rlvlm.core.grippers import GripperUnits
from rlvlm.core.leads import FilePath, ModelName

BLANK = "blank"
"""Name of a camera that is not there."""
_LAYERS = r"(.*\.)?(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
_TIME = r".*\.(action_)?time_mlp_(in|out)"
LORA_TARGETS = {
    "lora": rf"{_LAYERS}|.*\.(out_proj|fc1|fc2|modality_projection\.proj|multi_modal_projector\.linear)|{_TIME}",
    "lora_expert": rf".*\.(lm_expert|gemma_expert)\.{_LAYERS}|{_TIME}",
}
"""By `learns`: regular expressions on the full names of the layers that get an adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeRobotConfig:
    """Settings of a checkpoint in LeRobot's layout (SmolVLA, pi0, pi0.5): its inputs, and its trained weights."""

    section: ClassVar[str] = "policy.lerobot"
    """Prefix of these fields on the command line, for messages."""

    cameras: tuple[str, ...] = ()
    """Names of the env's cameras, one for each image feature of the checkpoint, in the order of its config.json; blank
    for one that the env lacks, which is masked as in LeRobot. Empty: the env's first ones."""
    body: ModelName = ""
    """Folder or hub name of the underlying VLM, for tokenizer.json and SmolVLA's config.json; empty: the one named in
    the checkpoint, which contains its weights."""
    image_px: PositiveInt = 256
    """Side of the square images that the env draws, pixels, >= 1; they are then resized for the image encoder."""
    faults: tuple[Literal["shifted_patches", "dark_borders", "padded_state"], ...] = ()
    """Faults of LeRobot 0.4 to reproduce, for checkpoints trained with them. shifted_patches: SmolVLA's image patches
    have positions one too small in rows and columns, as transformers 4.55 to 4.57 computed in float32 (transformers
    issue 41190); dark_borders: images of pi0 and pi0.5 are padded with -3, where black is -1; padded_state: pi0.5's
    prompts contain the state padded with 0."""
    gripper: GripperUnits | None = None
    """Units of the gripper in the checkpoint's actions; envs use 1 for open and 0 for closed. minus_one_opens: -1 opens
    and 1 closes, as in LeRobot's data of LIBERO. None: the env's, where by the checkpoint's statistics they can be."""
    learns: Literal["expert", "lora_expert", "lora", "all"] = "expert"
    """Trained weights. expert: all of the action expert and of the layers for state, action and time, as LeRobot
    fine-tunes; lora_expert: an adapter on the expert; lora: one on body and expert; all: every weight, in float32."""
    has_values: bool = False
    """Whether to add a value head, for estimators with a critic; LeRobot's layout has no place for it."""
    adapter: FilePath = ""
    """Folder of a LoRA adapter to continue from, in PEFT's format; empty: a fresh one."""
    lora_rank: PositiveInt = 32
    """Inner size of a fresh adapter, >= 1."""
    lora_alpha: PositiveFloat = 16.0
    """Scale of a fresh adapter's output, which is multiplied by lora_alpha / lora_rank."""
    at_once: PositiveInt = 32
    """Maximum observations per forward pass of the body without gradients, >= 1."""
    recompute: bool | None = None
    """Whether to use gradient checkpointing, which computes every block a second time in the update to save memory.
    None: from 500 million parameters on."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of the body's weights. auto: bfloat16 on a GPU, float32 on a CPU. The expert is always float32, because
    log-probs are computed from its output."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    @staticmethod
    def current(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns settings of an earlier 0.2's SmolVLA, from a run's files or a checkpoint's card, in today's form."""
        found = dict(settings)
        if found.pop("patches", "exact") == "shifted":
            found["faults"] = ["shifted_patches"]
        return found

    def __post_init__(self) -> None:
        check_bounds(self, self.section)
        if self.adapter and self.learns not in LORA_TARGETS:
            raise ValueError(
                f"{self.section}.adapter has no effect where learns is {self.learns}; use lora or lora_expert, or "
                "merge it into the weights"
            )
        if self.learns == "all" and self.dtype == "bfloat16":
            raise ValueError(
                f"{self.section}.dtype bfloat16 is too coarse for weights that learn; use expert or lora, or leave "
                "out dtype"
            )
