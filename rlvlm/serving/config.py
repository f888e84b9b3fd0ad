"""Where a judge runs on Ray Serve; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConfig:
    """Resources and limits of a judge's Serve deployment."""

    app: str = ""
    """Name of a running Serve app to use; empty starts one of our own and stops it at the end."""
    num_replicas: int = 1
    """Copies of the judge."""
    num_cpus: float = 1.0
    """CPU cores per replica."""
    num_gpus: float = 0.0
    """Share of a GPU per replica; 0.5 lets two judges share a card. Bookkeeping only: it does not limit memory."""
    timeout_s: float = 120.0
    """Longest wait for one request's answer, in seconds."""
    retries: int = 4
    """Tries after the first when a replica dies or is overloaded."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"serve.num_replicas must be >= 1, got {self.num_replicas}")
        if self.num_cpus < 0 or self.num_gpus < 0:
            raise ValueError(f"serve.num_cpus and num_gpus must be >= 0, got {self.num_cpus} and {self.num_gpus}")
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"serve.num_gpus above 1 must be a whole number, got {self.num_gpus}")
        if self.timeout_s <= 0 or self.retries < 0:
            raise ValueError(f"need serve.timeout_s > 0 and retries >= 0, got {self.timeout_s} and {self.retries}")
