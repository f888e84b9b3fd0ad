"""Where judges and policies run on Ray Serve, and what their HTTP server lets in; imports nothing heavy."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from rlvlm.core.checks import check_least, check_positive
from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.judges.config import JudgeConfig
from rlvlm.policies.vlm.config import BUCKET_MIB
from rlvlm.vlms.config import EngineConfig as VllmConfig

MIB = 2**20
DEFAULT_PORT = 8123
"""Outside 10002 to 19999, where Ray's workers listen."""
LABEL_PORT = 8731
"""Port of the page on which people answer."""
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


def _check_replicas(config: "PlacementConfig | ServedEngineConfig", section: str) -> None:
    """Raises ValueError where what is asked for each replica is not to be had."""
    check_least(config, section, 0, "num_cpus", "num_gpus", "retries")
    check_positive(config, section, "timeout_s")
    check_least(config, section, 1, "stall_s")  # a short pause is no fault
    # Ray places shares of one GPU or several whole ones, nothing in between
    if config.num_gpus > 1 and config.num_gpus != int(config.num_gpus):
        raise ValueError(f"{section}.num_gpus above 1 must be a whole number, got {config.num_gpus}")


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
    """Share of a GPU per replica; 0.5 lets two judges share a GPU, each limited to half of its memory."""
    timeout_s: float = 120.0
    """Longest wait for one request's answer, in seconds."""
    retries: int = 4
    """Tries after the first when a replica fails or is overloaded."""
    stall_s: float = 5.0
    """Silence after which a replica counts as stuck and is replaced, >= 1: its model, at work, uses no CPU (on a GPU:
    finishes no layer), or its event loop does not turn. A long batch is no silence."""

    def __post_init__(self) -> None:
        _check_replicas(self, "serve")
        check_least(self, "serve", 1, "num_replicas")
        check_positive(self, "serve", "target_ongoing_requests")
        check_least(self, "serve", 0, "upscale_delay_s", "downscale_delay_s")
        if self.max_replicas and self.max_replicas < self.num_replicas:
            raise ValueError(
                f"serve.max_replicas must be 0 or >= num_replicas, got {self.max_replicas} and {self.num_replicas}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyVllmConfig(VllmConfig):
    """vLLM under a policy."""

    section: ClassVar[str] = "engine.vllm"
    """Where these fields stand on the command line."""

    def __post_init__(self) -> None:
        VllmConfig.__post_init__(self)  # not super(): a class with slots is made twice, and super() knows the first
        if not self.structured or self.max_lora_rank != VllmConfig().max_lora_rank:
            raise ValueError(
                "engine.vllm.structured and max_lora_rank are for judges; a policy has --policy.adapter and "
                "--policy.lora-rank"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedEngineConfig:
    """Where a policy that is trained samples its replies."""

    backend: Literal["transformers", "vllm"] = "transformers"
    """What samples in a replica. transformers: the policy itself, in batches; vllm: its chat VLM on vLLM, in an
    environment of its own, to which replies come and from which they go one by one."""
    num_replicas: int = 0
    """Copies of the policy on Ray Serve that answer rollouts and evaluations; 0: the run's own process does."""
    num_cpus: float = 1.0
    """CPU cores per replica."""
    num_gpus: float = 0.0
    """Share of a GPU per replica; 0.5 lets it share a GPU with a judge."""
    timeout_s: float = 120.0
    """Longest wait for a batch of replies, in seconds."""
    retries: int = 4
    """Tries after the first when a replica fails."""
    stall_s: float = 5.0
    """Silence after which a replica counts as stuck and is replaced, >= 1; as `serve.stall_s`."""
    bucket_mib: int = BUCKET_MIB
    """Weights come in pieces of so many MiB, > 0, of which no process holds more than two beside its own weights; a
    larger tensor is a piece of its own."""
    colocated: bool = False
    """Share the learners' GPUs: the replicas, at most one for each learner, have none of their own, and sleep while the
    learners learn, with weights and caches off the GPU."""
    vllm: PolicyVllmConfig = field(default_factory=PolicyVllmConfig)

    def __post_init__(self) -> None:
        _check_replicas(self, "engine")
        check_least(self, "engine", 0, "num_replicas")
        check_least(self, "engine", 1, "bucket_mib")
        if self.colocated and self.num_gpus:
            raise ValueError(
                f"engine.num_gpus must be 0 with engine.colocated, which uses the learners' GPUs, got {self.num_gpus:g}"
            )
        # a setting that does nothing would look as if it did
        others = [setting for setting in fields(self) if setting.name not in ("num_replicas", "vllm")]
        if not self.num_replicas and any(getattr(self, setting.name) != setting.default for setting in others):
            raise ValueError("the other settings of engine have no effect without engine.num_replicas")
        if self.backend != "vllm" and self.vllm != PolicyVllmConfig():
            raise ValueError("the settings of engine.vllm have no effect without engine.backend vllm")

    @property
    def placement(self) -> PlacementConfig:
        """The same as a deployment's."""
        return PlacementConfig(
            num_replicas=self.num_replicas, num_cpus=self.num_cpus, num_gpus=self.num_gpus, timeout_s=self.timeout_s,
            retries=self.retries, stall_s=self.stall_s,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ActConfig:
    """How a trained policy is asked."""

    app: str
    """Its Serve app, by which callers name it too."""
    action_names: tuple[str, ...]
    """Names of its actions."""
    max_reply_tokens: int
    """A reply is cut after this many tokens."""
    temperature: float = 1.0
    """Sampling temperature, > 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpConfig:
    """Limits and names of one gateway. It holds the path of the token, never the token."""

    judges: tuple[str, ...] = ("judge",)
    """Serve apps that answer; a request that names none gets the first. Known to callers as `backend`."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names by which callers may call a judge: `primo_r1_vllm: PRIMO-R1`."""
    policies: tuple[ActConfig, ...] = ()
    """Policies that answer `/v1/act`; with none, there is no such route."""
    token_file: str = ""
    """File with the bearer token, mode 0600; made with a random one if absent. Empty is `~/.rlvlm/token`."""
    hosts: tuple[str, ...] = LOOPBACK_NAMES
    """Names that a request's Host header may carry, without port; others are refused (DNS rebinding)."""
    media_root: str = ""
    """Folder that `video_path` may name files of; empty refuses every `video_path`."""
    body_bytes: int = 8 * MIB
    """Longest request body."""
    body_deadline_s: float = 3.0
    """Longest time for a body to arrive, in seconds."""
    held_bytes: int = 256 * MIB
    """Bodies held at once, all requests together; beyond it callers get a 429."""
    timeout_s: float = 120.0
    """Longest wait for the judge's answer, in seconds."""
    retries: int = 4
    """Tries after the first when a judge's replica fails while answering."""
    max_tokens: int = 1_024
    """Longest reply that a caller of /generate may ask for, in tokens."""
    num_replicas: int = 1
    """Copies of the gateway."""
    num_cpus: float = 0.1
    """CPU cores that Ray counts per copy."""

    def __post_init__(self) -> None:
        if not (self.judges or self.policies) or not all(self.judges):
            raise ValueError("http.judges needs the name of at least one Serve app, got none; use e.g. [pocket]")
        if len(set(self.judges)) != len(self.judges):
            raise ValueError(f"http.judges must name each app once, got {list(self.judges)}")
        # at the start: an alias that leads nowhere would be met by a caller, days later
        if unknown := set(self.aliases.values()) - set(self.judges):
            raise ValueError(f"http.aliases names {sorted(unknown)}, which is none of http.judges {list(self.judges)}")
        if self.media_root and not Path(self.media_root).is_absolute():
            raise ValueError(f"http.media_root must be an absolute path, got {self.media_root!r}")
        check_positive(
            self, "http", "body_bytes", "body_deadline_s", "held_bytes", "timeout_s", "max_tokens", "num_replicas"
        )
        check_least(self, "http", 0, "retries", "num_cpus")
        if self.held_bytes < self.body_bytes:
            raise ValueError(f"http.held_bytes must be >= body_bytes, got {self.held_bytes} and {self.body_bytes}")

    @property
    def token_path(self) -> Path:
        """The token's file."""
        return Path(self.token_file).expanduser() if self.token_file else Path.home() / ".rlvlm" / "token"


@dataclass(frozen=True, kw_only=True, slots=True)
class PageConfig:
    """Where the page is, and who answers on it."""

    people: tuple[str, ...] = ("me",)
    """Names; each gets a link of their own."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = LABEL_PORT
    """The next free one is taken where it is not free."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which browsers may call, beside those of this machine."""
    token_file: str = ""
    """File with the token of the links, mode 0600; made with a random one if absent. Empty is `~/.rlvlm/ask_token`."""

    def __post_init__(self) -> None:
        if not self.people:
            raise ValueError("--people needs at least one name, got none")
        from rlvlm.labels.people import check_name  # numpy is not for those who only ask for help

        for name in self.people:
            check_name(name)

    @property
    def token_path(self) -> Path:
        """The token's file: not the gateway's, since this token stands in links."""
        return Path(self.token_file).expanduser() if self.token_file else Path.home() / ".rlvlm" / "ask_token"


def check_environment(judge: JudgeConfig, placement: PlacementConfig) -> None:
    """`check_engine` of a judge; where its backend needs no engine, only its GPUs are looked at.

    Raises:
        JudgeUnavailable, UsageError: as `check_engine`; or the judge is a person.
    """
    if judge.is_human:  # a replica that waits for minutes is taken for dead
        raise UsageError("people answer on a page, and not behind Ray Serve", "leave out the app; see docs/people.md")
    check_engine(judge.engine, placement, "serve", f"judge.backend {judge.backend}" if judge.python else "")


def check_engine(engine: VllmConfig, placement: PlacementConfig, section: str, who: str) -> None:
    """Checks that the environment that is needed is on this machine and there is a GPU for each part of the model.

    Args:
        engine: vLLM's settings.
        placement: of its replicas.
        section: of the options that place it.
        who: the part that runs on vLLM and needs its environment, for the message; empty where none does.

    Raises:
        JudgeUnavailable: the interpreter is missing; Ray would wait for it without a word.
        UsageError: the model is to be spread over more GPUs than its replica gets.
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
