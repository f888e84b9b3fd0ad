"""Configuration of a judge; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlvlm.judges.backends.config import ApiConfig, CachedConfig, EngineConfig, SimilarityConfig
from rlvlm.vlms.config import VLMConfig

RANDOM = "random"
"""Name of a model that nobody trained."""
_BY_LIKENESS = ("clip", "blip2")
WEIGHT_BACKENDS = ("transformers", "vllm", "clip", "blip2")
"""Backends whose model is a folder of weights or the hub's name of one."""
_NEED_MODEL = (*WEIGHT_BACKENDS, "openai", "gemini")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeConfig(VLMConfig):
    """Which model looks, and how it is asked."""

    section: ClassVar[str] = "judge"
    """Where its options stand on the command line."""

    backend: Literal["pocket", "transformers", "vllm", "openai", "gemini", "clip", "blip2", "cached"] = "pocket"
    """pocket: the small Qwen3-VL that ships with rlvlm; transformers: any Qwen-VL or LLaVA; vllm: the same, faster, in
    an environment of its own; openai, gemini: over HTTP; clip, blip2: similarity of picture and goal; cached: from
    disk."""
    model: str = ""
    """Hub name or local folder of the weights, or the API's name of the model; empty for the pocket judge's own.
    `random` gives clip and blip2 random weights: a control that knows nothing."""
    prompt: Literal["two_stage", "single_stage", "direct"] = "direct"
    """two_stage: describe, then label (the paper's); single_stage: both in one answer; direct: the label's
    probabilities from one forward pass, no text."""
    score: Literal["progress", "rating", "success", "video"] = "progress"
    """How one clip is scored. progress: percent, in one number; rating: 1 to 5; success: probability of yes from one
    forward pass; video: percent after written reasoning, from first picture, clip and current picture."""
    both_orders: bool = False
    """Ask each query in both orders, at twice the price; where the answers disagree there is no preference."""
    picture_px: int = 300
    """Side of the square pictures drawn for the judge, in pixels (300 in the paper)."""
    temperature: float = 0.0
    """0 is greedy; above it top-p 0.9 sampling."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    batch_size: int = 16
    """Queries per forward pass, >= 1."""
    store: str = ""
    """Folder of the label store that answers are kept in and looked up from; runs may share one. Empty keeps a run's
    answers in the run's own folder."""
    api: ApiConfig = field(default_factory=ApiConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    similarity: SimilarityConfig = field(default_factory=SimilarityConfig)
    cached: CachedConfig = field(default_factory=CachedConfig)

    def __post_init__(self) -> None:
        if self.backend in _NEED_MODEL and not self.model:
            raise ValueError(
                f"judge.backend {self.backend} needs judge.model: a hub name, a folder with the weights, "
                "or what the API calls the model"
            )
        if self.is_random and not self.reads_states:
            raise ValueError(
                f"judge.model {RANDOM} is for the backends {' and '.join(_BY_LIKENESS)}, got "
                f"{self.backend}; name a model"
            )
        if self.backend == "cached" and not self.cached.store:
            raise ValueError("judge.backend cached needs judge.cached.store: the folder of a label store")
        if self.temperature < 0:
            raise ValueError(f"judge.temperature must be >= 0, got {self.temperature}")
        for name in ("picture_px", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"judge.{name} must be >= 1, got {getattr(self, name)}")
        VLMConfig.__post_init__(self)  # not super(): a class with slots is made twice, and super() knows the first

    @property
    def reads_states(self) -> bool:
        """Whether it compares pictures with a sentence about a state, and is not told what to do."""
        return self.backend in _BY_LIKENESS

    @property
    def is_random(self) -> bool:
        """Whether its weights are random: nothing that it says means anything."""
        return self.model == RANDOM
