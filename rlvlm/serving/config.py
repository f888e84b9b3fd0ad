"""Settings of judges and policies on Ray Serve, and of their HTTP server; imports nothing heavy."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from rlvlm.core.checks import (
    Bound,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    check_bounds,
)
from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.leads import FilePath
from rlvlm.judges.config import JudgeConfig
from rlvlm.policies.vlm.config import BUCKET_MIB
from rlvlm.vlms.config import EngineConfig as VllmConfig

MIB = 2**20
DEFAULT_PORT = 8123
"""Default port of the HTTP server, outside 10002 to 19999, which Ray's workers use."""
NUM_IMAGES = 16
MAX_IMAGES = 1_024
"""What `http.max_images` may be at most."""
PLACE_TIMEOUT_S = 600.0
"""Default maximum wait for a place on a cluster, seconds: a cloud's machine with a GPU takes minutes to start."""
JUDGE_ROLE, LEARNER_ROLE = "the judge", "learners"
JUDGE_SETTING = "--serve.num-replicas, --serve.num-gpus, or --serve.app for a judge that runs already"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """Processes with the same task, of a run or an app."""

    name: str
    count: int = 1
    cpus: float = 0.0
    """CPU cores of each process."""
    gpus: float = 0.0
    """GPUs of each process; below 1 it shares a GPU."""
    gpu_type: str = ""
    """Kind of these GPUs, as in a node's label `ray.io/accelerator-type`; empty: any."""
    setting: str
    """Setting that reduces their number or their resources."""
    gpu_setting: str = ""
    """Setting that gives each a GPU, for processes that compute with the policy."""
    is_own: bool = False
    """Whether it is the run's own process, which cannot be placed elsewhere."""
    is_served: bool = False
    """Whether Ray Serve places them, as opposed to RLlib."""
    learns: bool = False
    """Whether they hold the policy in training, with its gradients."""


def _check_replicas(config: "PlacementConfig | ServedEngineConfig", section: str) -> None:
    """Raises ValueError if a bound is broken, or the resources requested per replica are impossible."""
    check_bounds(config, section)
    # Ray assigns shares of one GPU or several whole ones, but nothing in between
    if config.num_gpus > 1 and config.num_gpus != int(config.num_gpus):
        raise ValueError(f"{section}.num_gpus above 1 must be a whole number, got {config.num_gpus}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConfig:
    """Resources and limits of a judge's Serve deployment."""

    app: str = ""
    """Name of a running Serve app to use; empty starts an app of this run and stops it at the end."""
    num_replicas: PositiveInt = 1
    """Number of copies of the judge; with max_replicas, their minimum."""
    max_replicas: int = 0
    """Maximum number of copies while requests pile up; 0: always num_replicas."""
    target_ongoing_requests: PositiveFloat = 2.0
    """Requests per copy, running or waiting, at which Serve aims by starting and stopping copies, > 0."""
    upscale_delay_s: NonNegativeFloat = 10.0
    """Time for which requests must pile up before another copy is started, seconds."""
    downscale_delay_s: NonNegativeFloat = 300.0
    """Time for which there must be too many copies before one is stopped, seconds: loading it again takes minutes."""
    num_cpus: NonNegativeFloat = 1.0
    """CPU cores per replica."""
    num_gpus: NonNegativeFloat = 0.0
    """Share of a GPU per replica; with 0.5 two judges share a GPU, each limited to half of its memory."""
    gpu_type: Annotated[str, Needs("num_gpus")] = ""
    """Kind of GPU in a cluster with several, as Ray labels its nodes (`ray.io/accelerator-type`), e.g. A100; empty:
    any."""
    timeout_s: PositiveFloat = 120.0
    """Maximum wait for one request's answer, seconds."""
    retries: NonNegativeInt = 4
    """Tries after the first if a replica fails or is overloaded."""
    stall_s: Annotated[float, Bound(">= 1")] = 5.0
    """Seconds without a sign of life after which a replica counts as stuck and is replaced, >= 1: its running model
    uses no CPU (on a GPU: finishes no layer), or its event loop is blocked. A long batch still shows signs of life."""

    def __post_init__(self) -> None:
        _check_replicas(self, "serve")
        if self.max_replicas and self.max_replicas < self.num_replicas:
            raise ValueError(
                f"serve.max_replicas must be 0 or >= num_replicas, got {self.max_replicas} and {self.num_replicas}"
            )

    def role(self, name: str, setting: str) -> Role:
        """Returns the replicas as processes of a run or an app; for messages, `setting` reduces them."""
        return Role(
            name=name, count=self.num_replicas, is_served=True, cpus=self.num_cpus, gpus=self.num_gpus,
            gpu_type=self.gpu_type, setting=setting,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyVllmConfig(VllmConfig):
    """Settings of vLLM for a policy."""

    section: ClassVar[str] = "engine.vllm"
    """Prefix of these fields on the command line."""

    def __post_init__(self) -> None:
        VllmConfig.__post_init__(self)  # not super(): a class with slots is created twice, and super() means the first
        if not self.structured or self.max_lora_rank != VllmConfig().max_lora_rank:
            raise ValueError(
                "engine.vllm.structured and max_lora_rank are for judges; a policy has --policy.adapter and "
                "--policy.lora-rank"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedEngineConfig:
    """Settings of the engine with which a policy in training samples its replies."""

    backend: Literal["transformers", "vllm"] = "transformers"
    """Engine in a replica. transformers: the policy itself, in batches; vllm: its chat VLM on vLLM, in an environment
    of its own, where replies start and finish one by one."""
    num_replicas: NonNegativeInt = 0
    """Number of copies of the policy on Ray Serve for rollouts and evaluations; 0: the run's own process samples."""
    num_cpus: NonNegativeFloat = 1.0
    """CPU cores per replica."""
    num_gpus: NonNegativeFloat = 0.0
    """Share of a GPU per replica; 0.5 lets it share a GPU with a judge."""
    gpu_type: Annotated[str, Needs("num_gpus")] = ""
    """Kind of GPU, as `serve.gpu_type`; empty: any."""
    timeout_s: PositiveFloat = 120.0
    """Maximum wait for a batch of replies, seconds."""
    retries: NonNegativeInt = 4
    """Tries after the first if a replica fails."""
    stall_s: Annotated[float, Bound(">= 1")] = 5.0
    """Seconds without a sign of life after which a replica counts as stuck and is replaced, >= 1; as
    `serve.stall_s`."""
    bucket_mib: PositiveInt = BUCKET_MIB
    """Size of the pieces in which weights are sent, MiB, > 0; no process holds more than two pieces beside its own
    weights. A larger tensor is a piece of its own."""
    colocated: bool = False
    """Whether to share the learners' GPUs: the replicas, at most one per learner, have none of their own, and sleep
    while the learners learn, with weights and caches off the GPU."""
    vllm: Annotated[PolicyVllmConfig, Needs("backend", "vllm")] = field(default_factory=PolicyVllmConfig)

    def __post_init__(self) -> None:
        _check_replicas(self, "engine")
        if self.colocated and self.num_gpus:
            raise ValueError(
                f"engine.num_gpus must be 0 with engine.colocated, which uses the learners' GPUs, got {self.num_gpus:g}"
            )
        # a setting without effect would seem to have one
        others = [setting for setting in fields(self) if setting.name not in ("num_replicas", "vllm")]
        if not self.num_replicas and any(getattr(self, setting.name) != setting.default for setting in others):
            raise ValueError("the other settings of engine have no effect without engine.num_replicas")

    @property
    def placement(self) -> PlacementConfig:
        """Returns these settings as those of a deployment."""
        return PlacementConfig(
            num_replicas=self.num_replicas, num_cpus=self.num_cpus, num_gpus=self.num_gpus, gpu_type=self.gpu_type,
            timeout_s=self.timeout_s, retries=self.retries, stall_s=self.stall_s,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ActConfig:
    """Settings of asking a trained policy."""

    app: str
    """Name of its Serve app, by which callers refer to it too."""
    action_names: tuple[str, ...]
    """Names of its actions."""
    max_reply_tokens: int
    """Maximum reply length; longer replies are cut, tokens."""
    temperature: float = 1.0
    """Sampling temperature, > 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpConfig:
    """Limits and names of one HTTP server. It contains the path of the token, never the token."""

    judges: tuple[str, ...] = ("judge",)
    """Serve apps that answer, as `backend` in requests; a request without a name goes to the first."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names for judges: `primo_r1_vllm: PRIMO-R1`."""
    policies: tuple[ActConfig, ...] = ()
    """Policies that answer `/v1/act`; without any there is no such route."""
    token_file: FilePath = ""
    """File with the bearer token, mode 0600; created with a random token if missing. Empty: `~/.rlvlm/token`."""
    hosts: tuple[str, ...] = LOOPBACK_NAMES
    """Host names, without port, that requests may address; others are refused (DNS rebinding)."""
    media_root: FilePath = ""
    """Folder from which `video_path` may name files; empty refuses every `video_path`."""
    body_bytes: PositiveInt = 8 * MIB
    """Maximum size of a request body, bytes."""
    body_deadline_s: PositiveFloat = 3.0
    """Maximum time for a body to arrive, seconds."""
    max_images: Annotated[int, Bound(f"[1, {MAX_IMAGES}]")] = NUM_IMAGES
    """Maximum number of images in a request, 1 to 1,024; all together have at most 16 Mpixel."""
    success_threshold: Share = 0.5
    """Score from which the model NAME#grade says success, in [0, 1]."""
    held_bytes: PositiveInt = 256 * MIB
    """Maximum size of all bodies held at once, bytes; beyond it callers get a 429."""
    timeout_s: PositiveFloat = 120.0
    """Maximum wait for the judge's answer, seconds."""
    retries: NonNegativeInt = 4
    """Tries after the first if a judge's replica fails while answering."""
    max_tokens: PositiveInt = 1_024
    """Maximum length of a reply that a caller of /generate may request, tokens."""
    num_replicas: PositiveInt = 1
    """Number of copies of the HTTP server."""
    num_cpus: NonNegativeFloat = 0.1
    """CPU cores that Ray reserves per copy."""

    def __post_init__(self) -> None:
        check_bounds(self, "http")
        if not (self.judges or self.policies) or not all(self.judges):
            raise ValueError("http.judges needs the name of at least one Serve app, got none; use e.g. [pocket]")
        if len(set(self.judges)) != len(self.judges):
            raise ValueError(f"http.judges must name each app once, got {list(self.judges)}")
        # at startup: an alias without a judge would otherwise be noticed by a caller, days later
        if unknown := set(self.aliases.values()) - set(self.judges):
            raise ValueError(f"http.aliases names {sorted(unknown)}, which is none of http.judges {list(self.judges)}")
        if self.media_root and not Path(self.media_root).is_absolute():
            raise ValueError(f"http.media_root must be an absolute path, got {self.media_root!r}")
        if self.held_bytes < self.body_bytes:
            raise ValueError(f"http.held_bytes must be >= body_bytes, got {self.held_bytes} and {self.body_bytes}")

    @property
    def token_path(self) -> Path:
        """Path of the token's file."""
        return Path(self.token_file).expanduser() if self.token_file else Path.home() / ".rlvlm" / "token"


def check_environment(judge: JudgeConfig, placement: PlacementConfig) -> None:
    """Checks a judge as `check_engine` does; if its backend needs no engine, checks only its GPUs.

    Raises:
        JudgeUnavailable, UsageError: see `check_engine`; or the judge is a person.
    """
    if judge.is_human:  # Serve would consider a replica dead that waits for minutes
        raise UsageError("people answer on a page, and not behind Ray Serve", "leave out the app; see docs/people.md")
    check_engine(judge.engine, placement, "serve", f"judge.backend {judge.backend}" if judge.python else "")


def check_engine(engine: VllmConfig, placement: PlacementConfig, section: str, who: str) -> None:
    """Checks that this machine has the required environment, and that there is a GPU for each part of the model.

    Args:
        engine: settings of vLLM.
        placement: resources of its replicas.
        section: prefix of the options that place it.
        who: part that runs on vLLM and needs its environment, for the message; empty if none does.

    Raises:
        JudgeUnavailable: the interpreter is missing; Ray would wait for it silently.
        UsageError: the model needs more GPUs than its replica gets.
    """
    python = Path(engine.interpreter).expanduser().absolute()
    if who and not python.is_file():
        raise JudgeUnavailable(
            f"{who} needs an environment of its own; {python} is missing",
            f"build it with make vllm, or name another with --{engine.section}.python",
        )
    parts = engine.tensor_parallel
    if parts > 1 and placement.num_gpus < parts:
        raise UsageError(
            f"{engine.section}.tensor_parallel {parts} needs {parts} GPUs a replica, got {placement.num_gpus:g}",
            f"add --{section}.num-gpus {parts}",
        )
