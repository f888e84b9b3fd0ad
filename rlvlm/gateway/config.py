"""Where the judges' HTTP edge listens and what it lets in; imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
DEFAULT_PORT = 8123
"""Outside 10002 to 19999, where Ray's workers listen."""
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActConfig:
    """How a trained policy is asked."""

    app: str
    """Its Serve app, by which callers name it too."""
    action_names: tuple[str, ...]
    """What its actions are called."""
    max_reply_tokens: int
    """A reply is cut after this many tokens."""
    temperature: float = 1.0
    """Of sampling, > 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpConfig:
    """Limits and names of one gateway. It holds the path of the token, never the token."""

    judges: tuple[str, ...] = ("judge",)
    """Serve apps that answer; a request that names none gets the first. Known to callers as `backend`."""
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
    """Tries after the first when a judge's replica dies while answering."""
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
        if self.media_root and not Path(self.media_root).is_absolute():
            raise ValueError(f"http.media_root must be an absolute path, got {self.media_root!r}")
        for name in ("body_bytes", "body_deadline_s", "held_bytes", "timeout_s", "max_tokens", "num_replicas"):
            if getattr(self, name) <= 0:
                raise ValueError(f"http.{name} must be > 0, got {getattr(self, name)}")
        if self.retries < 0 or self.num_cpus < 0:
            raise ValueError(f"need http.retries and num_cpus >= 0, got {self.retries} and {self.num_cpus}")
        if self.held_bytes < self.body_bytes:
            raise ValueError(f"http.held_bytes must be >= body_bytes, got {self.held_bytes} and {self.body_bytes}")

    @property
    def token_path(self) -> Path:
        """The token's file."""
        return Path(self.token_file).expanduser() if self.token_file else Path.home() / ".rlvlm" / "token"
