"""Settings that only some backends know, nested in `JudgeConfig`; imports nothing heavy."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiConfig:
    """A judge behind somebody's HTTP API: backends openai and gemini."""

    base_url: str = ""
    """Root of an OpenAI-compatible server, e.g. `http://127.0.0.1:8000/v1`; empty takes the provider's own."""
    key_file: str = ""
    """File that holds the key, readable by its owner alone (mode 0600)."""
    key_env: str = ""
    """Name of the environment variable that holds the key, where there is no key_file; empty takes the provider's
    usual name, and with a base_url none: a provider's key is not sent to other servers."""
    concurrency: int = 16
    """Questions under way at once, >= 1."""
    timeout_s: float = 60.0
    """Longest wait for one request's answer, in seconds."""
    deadline_s: float = 100.0
    """Longest time for one question, tries and pauses included, in seconds."""
    retries: int = 4
    """Tries after the first, >= 0."""
    max_requests: int = 0
    """Requests that may be sent, tries included; 0 sets no limit."""
    max_cost_usd: float = 0.0
    """What may be spent, by the prices below; 0 sets no limit."""
    usd_per_million_input: float = 0.0
    """Price of a million input tokens."""
    usd_per_million_output: float = 0.0
    """Price of a million output tokens."""
    ledger: str = ""
    """File in which requests and spending are counted, so that both caps hold across replicas and restarts; empty
    counts within one process."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"judge.api.concurrency must be >= 1, got {self.concurrency}")
        for name in ("timeout_s", "deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"judge.api.{name} must be > 0, got {getattr(self, name)}")
        for name in ("retries", "max_requests", "max_cost_usd", "usd_per_million_input", "usd_per_million_output"):
            if getattr(self, name) < 0:
                raise ValueError(f"judge.api.{name} must be >= 0, got {getattr(self, name)}")
        if self.max_cost_usd and not (self.usd_per_million_input or self.usd_per_million_output):
            raise ValueError("judge.api.max_cost_usd needs prices: set judge.api.usd_per_million_input and _output")
        _check_url(self.base_url)
        # What follows may be a key in the wrong place, so no message repeats it.
        if self.key_env and not (self.key_env.isidentifier() and self.key_env.isascii()):
            raise ValueError("judge.api.key_env is the name of an environment variable, never the key itself")
        if self.key_file.startswith(("sk-", "AIza")):
            raise ValueError("judge.api.key_file is the path of a file, never the key itself")


def _check_url(url: str) -> None:
    """Raises ValueError where `url` is not the plain root of a server; never repeats it, for it may hold a password."""
    parts = urlsplit(url)
    if url and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError("judge.api.base_url must look like https://host/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("judge.api.base_url must hold no user, password or query; name a file with judge.api.key_file")


@dataclass(frozen=True, kw_only=True, slots=True)
class SimilarityConfig:
    """How likeness of picture and goal becomes a score: backends clip and blip2."""

    baseline: str = ""
    """What the scene looks like without the goal, e.g. `a drawer`. With it only change along the line from this text
    to the goal counts, as far as `alpha` says; empty compares picture and goal alone."""
    alpha: float = 0.5
    """Weight of that line, in [0, 1]: 0 is plain likeness, 1 the line alone."""
    tie_band: float = 0.0
    """Scores that differ by no more than this are no preference, >= 0."""
    template: str = "{goal}"
    """Sentence put to the text encoder, with one slot, e.g. `a picture of {goal}`; a state reads better than a task."""
    head: Literal["match", "contrast"] = "match"
    """How blip2 compares. match: probability of a match; contrast: cosine of picture and text, as the paper's
    baseline."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"judge.similarity.alpha must be in [0, 1], got {self.alpha}")
        if not 0 <= self.tie_band <= 1:
            raise ValueError(f"judge.similarity.tie_band must be in [0, 1], got {self.tie_band}")
        if self.template.count("{goal}") != 1 or self.template.replace("{goal}", "").count("{"):
            raise ValueError(f"judge.similarity.template needs one slot {{goal}}, got {self.template!r}")


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
    structured: bool = True
    """Hold the label turn of judge.prompt two_stage to the three labels, so that no label is unreadable."""
    eager: bool = False
    """Skip compilation: starts sooner, answers slower."""
    lora: str = ""
    """The earlier name of judge.adapter, still read."""
    max_lora_rank: int = 64
    """Largest rank of that adapter, >= 1."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "max_lora_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"judge.engine.{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.memory_share <= 1:
            raise ValueError(f"judge.engine.memory_share must be in (0, 1], got {self.memory_share}")
        if self.cache_gib <= 0 or self.max_tokens < 0:
            raise ValueError(
                f"need judge.engine.cache_gib > 0 and max_tokens >= 0, got {self.cache_gib} and {self.max_tokens}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedConfig:
    """Answers from disk alone: backend cached."""

    store: str = ""
    """Folder of the label store that is read."""
    judge: str = ""
    """Part of the name of the judge whose answers are wanted; may be empty where the store has only one."""
    prompt: str = ""
    """Part of the name of its prompt, likewise."""
