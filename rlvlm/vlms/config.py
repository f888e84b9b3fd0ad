"""Which chat VLM runs, and how; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass
from typing import ClassVar, Literal

MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.safetensors", "*.model")
"""What is fetched of a hub model: no pickles, no code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VLMConfig:
    """A model with its weights. A config that adds to it, such as a judge's, inherits these fields, so that none is
    listed twice and every engine takes it as it is.
    """

    section: ClassVar[str] = "vlm"
    """Where these fields stand on the command line, for messages: `--vlm.model`."""

    model: str = ""
    """Hub name or local folder of the weights."""
    revision: str = ""
    """Commit of a hub model; empty takes the newest."""
    adapter: str = ""
    """Folder of a LoRA adapter in PEFT's format; empty takes the model as it is."""
    quantization: Literal["none", "nf4"] = "none"
    """nf4: 4-bit weights through bitsandbytes."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """How attention is computed; auto leaves it to transformers."""
    min_pixels: int = 0
    """Lower bound of pixels per picture inside the processor; 0 takes the model's own."""
    max_pixels: int = 0
    """Upper bound likewise; 0 takes the model's own."""
    seed: int = 0
    """Of sampling, and of weights that are drawn."""

    def __post_init__(self) -> None:
        if self.min_pixels < 0 or self.max_pixels < 0 or (self.max_pixels and self.min_pixels > self.max_pixels):
            raise ValueError(
                f"need 0 <= {self.section}.min_pixels <= max_pixels, got {self.min_pixels}, {self.max_pixels}"
            )
