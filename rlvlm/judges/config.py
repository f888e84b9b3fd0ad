"""Configuration of a judge; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeConfig:
    """Which model looks, and how it is asked."""

    backend: Literal["pocket", "transformers"] = "pocket"
    """pocket: the small Qwen3-VL that ships with rlvlm; transformers: any Qwen2-VL, Qwen2.5-VL or Qwen3-VL."""
    model: str = ""
    """Hub name or local folder of the weights; empty for the pocket judge's own."""
    revision: str = ""
    """Commit of a hub model; empty takes the newest."""
    prompt: Literal["two_stage", "single_stage", "direct"] = "direct"
    """two_stage: describe, then label (the paper's); single_stage: both in one answer; direct: the label's
    probabilities from one forward pass, no text."""
    quantization: Literal["none", "nf4"] = "none"
    """nf4: 4-bit weights through bitsandbytes."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    picture_px: int = 300
    """Side of the square pictures drawn for the judge, in pixels (300 in the paper)."""
    min_pixels: int = 0
    """Lower bound of pixels per picture inside the processor; 0 takes the model's own."""
    max_pixels: int = 0
    """Upper bound likewise; 0 takes the model's own."""
    temperature: float = 0.0
    """0 is greedy; above it top-p 0.9 sampling."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    batch_size: int = 16
    """Queries per forward pass, >= 1."""
    seed: int = 0
    """Of the sampling, where temperature is above 0."""

    def __post_init__(self) -> None:
        if self.backend == "transformers" and not self.model:
            raise ValueError("judge.backend transformers needs judge.model: a hub name or a folder with the weights")
        if self.temperature < 0:
            raise ValueError(f"judge.temperature must be >= 0, got {self.temperature}")
        for name in ("picture_px", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"judge.{name} must be >= 1, got {getattr(self, name)}")
        if self.min_pixels < 0 or self.max_pixels < 0 or (self.max_pixels and self.min_pixels > self.max_pixels):
            raise ValueError(f"need 0 <= judge.min_pixels <= max_pixels, got {self.min_pixels}, {self.max_pixels}")
