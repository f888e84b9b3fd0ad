"""Settings that only some backends know, nested in `JudgeConfig`; imports nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiConfig:
    """A judge behind somebody's HTTP API: backends openai and gemini."""

    base_url: str = ""
    """Root of an OpenAI-compatible server, e.g. `http://127.0.0.1:8000/v1`; empty takes the provider's own."""
    key_file: str = ""
    """File that holds the key, readable by its owner alone (mode 0600)."""
    key_env: str = ""
    """Name of the environment variable that holds the key, where there is no key_file; empty takes the provider's
    usual name."""
    concurrency: int = 8
    """Requests under way at once, >= 1."""
    timeout_s: float = 60.0
    """Longest wait for one answer, in seconds."""
    retries: int = 4
    """Tries after the first, >= 0."""
    max_requests: int = 0
    """Requests that one judge may send in its life, tries included; 0 sets no limit."""
    max_cost_usd: float = 0.0
    """What one judge may spend in its life, by the prices below; 0 sets no limit."""
    usd_per_million_input: float = 0.0
    """Price of a million input tokens."""
    usd_per_million_output: float = 0.0
    """Price of a million output tokens."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"judge.api.concurrency must be >= 1, got {self.concurrency}")
        if self.timeout_s <= 0:
            raise ValueError(f"judge.api.timeout_s must be > 0, got {self.timeout_s}")
        for name in ("retries", "max_requests", "max_cost_usd", "usd_per_million_input", "usd_per_million_output"):
            if getattr(self, name) < 0:
                raise ValueError(f"judge.api.{name} must be >= 0, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """An inference engine of its own: backend vllm."""

    python: str = ""
    """Interpreter of the environment that holds vLLM; empty takes `.envs/vllm/bin/python` under the working folder,
    where `make vllm` builds it. The judge's replica runs there."""
    tensor_parallel: int = 1
    """GPUs that one copy of the model is spread over, >= 1."""
    memory_share: float = 0.9
    """Share of a GPU's memory that the engine takes for weights and key-value cache, in (0, 1]."""
    cache_gib: float = 1.0
    """Key-value cache on a CPU, in GiB, > 0; a GPU's follows from memory_share."""
    max_tokens: int = 0
    """Longest chat and answer together, in tokens; 0 takes the model's own."""
    prefix_caching: bool = True
    """Keep the computed start of a chat for the next one that begins alike."""
    eager: bool = False
    """Skip compilation: starts sooner, answers slower."""
    lora: str = ""
    """Folder of a LoRA adapter in PEFT's format; empty takes the model as it is."""
    max_lora_rank: int = 64
    """Largest rank of that adapter, >= 1."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "max_lora_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"judge.engine.{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.memory_share <= 1:
            raise ValueError(f"judge.engine.memory_share must be in (0, 1], got {self.memory_share}")
        if self.cache_gib <= 0 or self.max_tokens < 0:
            raise ValueError("need judge.engine.cache_gib > 0 and max_tokens >= 0, "
                             f"got {self.cache_gib} and {self.max_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedConfig:
    """Answers from disk alone: backend cached."""

    store: str = ""
    """Folder of the label store that is read."""
