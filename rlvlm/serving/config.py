"""Where judges and policies run on Ray Serve; imports nothing heavy so that the command line starts at once."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_type_hints

from rlvlm.vlms.config import EngineConfig as VllmConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConfig:
    """Resources and limits of a judge's Serve deployment."""

    app: str = ""
    """Name of a running Serve app to use; empty starts one of our own and stops it at the end."""
    num_replicas: int = 1
    """Copies of the judge; the fewest of them where max_replicas lets Serve start more."""
    max_replicas: int = 0
    """Most copies while requests pile up; 0 keeps num_replicas."""
    target_ongoing_requests: float = 2.0
    """Requests per copy, at work or waiting, that Serve aims at by starting and stopping copies, > 0."""
    upscale_delay_s: float = 10.0
    """How long requests must pile up before another copy is started."""
    downscale_delay_s: float = 300.0
    """How long a copy must be too many before it is stopped: loading it again costs minutes."""
    num_cpus: float = 1.0
    """CPU cores per replica."""
    num_gpus: float = 0.0
    """Share of a GPU per replica; 0.5 lets two judges share a card, each limited to half of its memory."""
    timeout_s: float = 120.0
    """Longest wait for one request's answer, in seconds."""
    retries: int = 4
    """Tries after the first when a replica dies or is overloaded."""
    stall_s: float = 5.0
    """Silence after which a replica counts as stuck and is replaced, >= 1: its model, at work, uses no CPU (on a GPU:
    finishes no layer), or its event loop does not turn. A long batch is no silence."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"serve.num_replicas must be >= 1, got {self.num_replicas}")
        if self.num_cpus < 0 or self.num_gpus < 0:
            raise ValueError(f"serve.num_cpus and num_gpus must be >= 0, got {self.num_cpus} and {self.num_gpus}")
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"serve.num_gpus above 1 must be a whole number, got {self.num_gpus}")
        if self.max_replicas and self.max_replicas < self.num_replicas:
            raise ValueError(
                f"serve.max_replicas must be 0 or >= num_replicas, got {self.max_replicas} and {self.num_replicas}"
            )
        if self.target_ongoing_requests <= 0 or self.upscale_delay_s < 0 or self.downscale_delay_s < 0:
            raise ValueError(
                "need serve.target_ongoing_requests > 0 and delays >= 0, got "
                f"{self.target_ongoing_requests}, {self.upscale_delay_s} and {self.downscale_delay_s}"
            )
        if self.stall_s < 1:
            raise ValueError(f"serve.stall_s must be >= 1, got {self.stall_s}; a short pause is no fault")
        if self.timeout_s <= 0 or self.retries < 0:
            raise ValueError(f"need serve.timeout_s > 0 and retries >= 0, got {self.timeout_s} and {self.retries}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyVllmConfig(VllmConfig):
    """vLLM under a policy."""

    section: ClassVar[str] = "engine.vllm"
    """Where these fields stand on the command line."""

    def __post_init__(self) -> None:
        VllmConfig.__post_init__(self)  # not super(): a class with slots is made twice, and super() knows the first
        if self.lora or not self.structured or self.max_lora_rank != VllmConfig().max_lora_rank:
            raise ValueError(
                "engine.vllm.lora, structured and max_lora_rank are for judges; a policy has --policy.adapter and "
                "--policy.lora-rank"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Where a policy that is trained samples its replies."""

    backend: Literal["transformers", "vllm"] = "transformers"
    """What samples in a replica. transformers: the policy itself, in batches; vllm: its chat VLM on vLLM, in an
    environment of its own, to which replies come and from which they go one by one."""
    num_replicas: int = 0
    """Copies of the policy on Ray Serve that answer rollouts and evaluations; 0: the run's own process does."""
    num_cpus: float = 1.0
    """CPU cores per replica."""
    num_gpus: float = 0.0
    """Share of a GPU per replica; 0.5 lets it share a card with a judge."""
    timeout_s: float = 120.0
    """Longest wait for a batch of replies, in seconds."""
    retries: int = 4
    """Tries after the first when a replica dies."""
    stall_s: float = 5.0
    """Silence after which a replica counts as stuck and is replaced, >= 1; as `serve.stall_s`."""
    vllm: PolicyVllmConfig = field(default_factory=PolicyVllmConfig)

    def __post_init__(self) -> None:
        if self.num_replicas < 0:
            raise ValueError(f"engine.num_replicas must be >= 0, got {self.num_replicas}")
        rest = (self.num_cpus, self.num_gpus, self.timeout_s, self.retries, self.stall_s, self.backend)
        if not self.num_replicas and rest != (1.0, 0.0, 120.0, 4, 5.0, "transformers"):
            raise ValueError("the other settings of engine have no effect without engine.num_replicas")
        if self.backend != "vllm" and self.vllm != PolicyVllmConfig():
            raise ValueError("the settings of engine.vllm have no effect without engine.backend vllm")
        if self.num_replicas:
            try:
                self.placement  # noqa: B018 - checks the rest
            except ValueError as error:
                raise ValueError(str(error).replace("serve.", "engine.")) from None

    @property
    def placement(self) -> PlacementConfig:
        """The same as a deployment's."""
        return PlacementConfig(
            num_replicas=self.num_replicas, num_cpus=self.num_cpus, num_gpus=self.num_gpus, timeout_s=self.timeout_s,
            retries=self.retries, stall_s=self.stall_s,
        )  # fmt: skip


def refuse_unknown_keys(config: Any, value: Any, place: str) -> None:
    """Passes when every key of `value`, and of the mappings inside it, is a field of the config class.

    Raises:
        ValueError: one is not, or there is no mapping where one should be; names the place.
    """
    if isinstance(value, config) or value is None:
        return
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be a mapping of names to values, got {type(value).__name__}")
    hints = get_type_hints(config)
    known = {field.name for field in dataclasses.fields(config)}
    if unknown := sorted(map(str, value.keys() - known)):
        raise ValueError(f"{place} has unknown keys {unknown}; known are {sorted(known)}")
    for name, inner in value.items():
        if dataclasses.is_dataclass(hints[name]):
            refuse_unknown_keys(hints[name], inner, f"{place}.{name}")
