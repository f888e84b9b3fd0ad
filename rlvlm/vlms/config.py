"""Settings of a chat VLM; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from rlvlm.core.checks import Bound, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check_bounds
from rlvlm.core.leads import Address, FilePath, KeyVariable, ModelName

MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.safetensors", "*.model")
"""Patterns of the files fetched from a hub model: no pickles, no code."""

_VLLM_PYTHON = ".envs/vllm/bin/python"


@dataclass(frozen=True, kw_only=True, slots=True)
class VLMConfig:
    """A model and how to run it. Configs that add to it, such as a judge's, inherit these fields, so that none is
    listed twice and every engine accepts them.
    """

    section: ClassVar[str] = "vlm"
    """Prefix of these fields on the command line, for messages: `--vlm.model`."""

    model: ModelName = ""
    """Hub name or local folder of the model."""
    revision: str = ""
    """Commit of a hub model; empty takes the newest."""
    adapter: FilePath = ""
    """Folder of a LoRA adapter in PEFT's format; empty: no adapter."""
    quantization: Literal["none", "nf4"] = "none"
    """nf4: 4-bit weights through bitsandbytes."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Implementation of attention; auto leaves it to transformers."""
    min_pixels: NonNegativeInt = 0
    """Minimum pixels per image after the processor's resizing; 0 takes the model's own."""
    max_pixels: NonNegativeInt = 0
    """Maximum pixels per image after the processor's resizing; 0 takes the model's own."""
    seed: int = 0
    """Seed of sampling and of random weights."""

    def __post_init__(self) -> None:
        check_bounds(self, self.section)
        if self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(
                f"{self.section}.min_pixels must be <= max_pixels, got {self.min_pixels} and {self.max_pixels}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiConfig:
    """Settings of a model behind an HTTP API: engines openai and gemini."""

    section: ClassVar[str] = "judge.api"
    """Prefix of these fields on the command line, for messages; judges' by default."""

    base_url: Address = ""
    """Root URL of an OpenAI-compatible server, e.g. `http://127.0.0.1:8000/v1`; empty takes the provider's own."""
    key_file: FilePath = ""
    """File with the API key, readable only by its owner (mode 0600)."""
    key_env: KeyVariable = ""
    """Environment variable with the key, if there is no key_file; empty takes the provider's usual name, or none if
    base_url is set: a provider's key is not sent to other servers."""
    concurrency: PositiveInt = 16
    """Maximum number of concurrent questions, >= 1."""
    timeout_s: PositiveFloat = 60.0
    """Maximum wait for one request's answer, seconds."""
    deadline_s: PositiveFloat = 100.0
    """Maximum time for one question, including retries and pauses, seconds."""
    retries: NonNegativeInt = 4
    """Tries after the first, >= 0."""
    max_requests: NonNegativeInt = 0
    """Maximum number of requests, including retries; 0: no limit."""
    max_cost_usd: NonNegativeFloat = 0.0
    """Maximum cost, by the prices below, US dollars; 0: no limit."""
    usd_per_million_input: NonNegativeFloat = 0.0
    """Price of a million input tokens, US dollars."""
    usd_per_million_output: NonNegativeFloat = 0.0
    """Price of a million output tokens, US dollars."""
    ledger: FilePath = ""
    """File that counts requests and spending, so that both limits hold across replicas and restarts; empty counts
    within one process."""

    def __post_init__(self) -> None:
        check_bounds(self, self.section)
        if self.max_cost_usd and not (self.usd_per_million_input or self.usd_per_million_output):
            raise ValueError(
                f"{self.section}.max_cost_usd needs prices: set {self.section}.usd_per_million_input and _output"
            )
        # each of these values may be a misplaced key or password: no message repeats one
        try:
            parts = urlsplit(self.base_url)
            _ = parts.port
        except ValueError:  # an incomplete IPv6 address, or a port above 65535
            parts = urlsplit("")
        if self.base_url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"{self.section}.base_url must look like https://host/v1 or http://host:8000/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(f"{self.section}.base_url must hold no user, password or query; name a file with key_file")
        if self.key_env and not (self.key_env.isidentifier() and self.key_env.isascii()):
            raise ValueError(f"{self.section}.key_env is the name of an environment variable, never the key itself")
        if self.key_file.startswith(("sk-", "AIza")):
            raise ValueError(f"{self.section}.key_file is the path of a file, never the key itself")

    def with_paths(self, ledger: Path) -> Self:
        """Returns these settings with absolute file paths, so that a replica finds them from any working folder.

        Args:
            ledger: file that counts requests and spending, if none is set.
        """
        key_file = str(Path(self.key_file).expanduser().resolve()) if self.key_file else ""
        return replace(self, key_file=key_file, ledger=str(Path(self.ledger or ledger).expanduser().resolve()))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of an inference engine in an environment of its own: vllm."""

    section: ClassVar[str] = "judge.engine"
    """Prefix of these fields on the command line, for messages; judges' by default."""

    python: FilePath = ""
    """Python interpreter of the environment with vLLM, in which the model's replica runs; empty takes
    `.envs/vllm/bin/python` below the working folder, where `make vllm` builds it."""
    tensor_parallel: PositiveInt = 1
    """GPUs over which one copy of the model is spread, >= 1."""
    memory_share: Annotated[float, Bound("(0, 1]")] = 0.9
    """Share of a GPU's memory for weights and key-value cache, in (0, 1]."""
    cache_gib: PositiveFloat = 1.0
    """Size of the key-value cache on a CPU, GiB, > 0, rounded up; on a GPU it follows from memory_share."""
    max_tokens: NonNegativeInt = 0
    """Maximum length of chat and answer together, tokens; 0 takes the model's own."""
    prefix_caching: bool = True
    """Whether to keep the computed start of a chat for the next one that begins alike."""
    structured: bool = True
    """Whether to restrict a reply to its choices if it has any, such as the label turn of judge.prompt two_stage."""
    eager: bool = False
    """Whether to skip compilation: starts sooner, answers slower."""
    max_lora_rank: PositiveInt = 64
    """Maximum rank of judge.adapter, >= 1."""

    @property
    def interpreter(self) -> str:
        """Python interpreter of the environment that holds vLLM."""
        return self.python or _VLLM_PYTHON

    def __post_init__(self) -> None:
        check_bounds(self, self.section)
