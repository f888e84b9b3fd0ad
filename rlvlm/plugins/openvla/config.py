"""Settings of an OpenVLA-OFT checkpoint; imports nothing heavy."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlvlm.core.checks import PositiveFloat, PositiveInt, check_bounds
from rlvlm.core.leads import FilePath

ImagePath = Literal["cropped", "whole"]
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
