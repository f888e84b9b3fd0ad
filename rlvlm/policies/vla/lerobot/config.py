"""Settings of a checkpoint in LeRobot's layout; imports nothing heavy."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlvlm.core.checks import check_least, check_positive

_LAYERS = r"(.*\.)?(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
_TIME = r".*\.(action_)?time_mlp_(in|out)"
LORA_TARGETS = {
    "lora": rf"{_LAYERS}|.*\.(out_proj|fc1|fc2|modality_projection\.proj|multi_modal_projector\.linear)|{_TIME}",
    "lora_expert": rf".*\.(lm_expert|gemma_expert)\.{_LAYERS}|{_TIME}",
}
"""Regular expressions on the full names of the layers that an adapter is put beside, by `learns`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeRobotConfig:
    """Settings of a checkpoint in LeRobot's layout (SmolVLA, pi0, pi0.5): its inputs, and its weights that learn."""

    section: ClassVar[str] = "policy.lerobot"
    """Where these fields stand on the command line, for messages."""

    cameras: tuple[str, ...] = ()
    """Names of the env's cameras, one for each image feature of the checkpoint, in the order of its config.json; empty:
    the env's first ones."""
    body: str = ""
    """Folder or hub name with the tokenizer.json of the VLM below it, and the config.json of SmolVLA's; empty: the one
    that the checkpoint names. Its weights are in the checkpoint."""
    image_px: int = 256
    """Side of the square images that the env draws, >= 1; they are then made as large as the image encoder wants."""
    faults: tuple[Literal["shifted_patches", "dark_borders", "padded_state"], ...] = ()
    """Faults of LeRobot 0.4 to repeat, for what was trained or is to be run with them. shifted_patches: SmolVLA's
    patches of images have positions one too small in rows and columns, as transformers 4.55 to 4.57 computed in float32
    (transformers issue 41190); dark_borders: what fills up the images of pi0 and pi0.5 is -3, where black is -1;
    padded_state: pi0.5's prompts write the state filled up with 0 to its padded size."""
    learns: Literal["expert", "lora_expert", "lora", "all"] = "expert"
    """expert: every weight of the action expert and of the layers for state, action and time, as LeRobot fine-tunes;
    lora_expert: an adapter beside the expert alone; lora: one beside body and expert; all: every weight, in float32."""
    has_values: bool = False
    """Whether it gets a value head, for estimators with a critic; LeRobot's layout has no place for it."""
    adapter: str = ""
    """Folder of a LoRA adapter to go on from, in PEFT's format; empty: a fresh one."""
    lora_rank: int = 32
    """Inner size of a fresh adapter, >= 1."""
    lora_alpha: float = 16.0
    """A fresh adapter's part is scaled by lora_alpha / lora_rank."""
    at_once: int = 32
    """Observations whose images and words go through the body at once where nothing is learned, >= 1."""
    recompute: bool | None = None
    """Gradient checkpointing: compute every block a second time in the update and keep less in memory. None: from 500
    million parameters on."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of the body's weights. auto: bfloat16 on a GPU, float32 on a CPU. The expert is always float32: a
    log-prob is made of its output."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        check_least(self, self.section, 1, "image_px", "lora_rank", "at_once")
        check_positive(self, self.section, "lora_alpha")
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
