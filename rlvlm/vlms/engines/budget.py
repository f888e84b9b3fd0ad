"""Budget of requests and cost of a paid API. Kept in memory, or in a file that replicas and restarts share."""

import fcntl
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rlvlm.core.disk import file_system
from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.judging import Usage
from rlvlm.vlms.config import ApiConfig

logger = logging.getLogger(__name__)

_ENTRY_CHARS = 120


class BudgetSpent(ModelUnavailable):
    """The next request would exceed the budget; it was not sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Requests and cost so far; running requests count at their maximum cost."""

    requests: int = 0
    """Requests sent, including retries."""
    cost_usd: float = 0.0


class Budget:
    """Admits a request only while the limits hold, whatever it will turn out to cost.

    Each request is reserved at its maximum price before it is sent, and settled at the true price when it is answered;
    if it ends without an answer it stays at the maximum, because the provider may have charged it. A ledger file shares
    the count between all processes that open it, and survives them.

    Args:
        config: limits, prices and path of the ledger.
    """

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        self._ledger = Path(config.ledger).expanduser() if config.ledger else None
        self._spent = Spent()
        self._num_untold = 0
        self._lock = threading.Lock()

    @property
    def spent(self) -> Spent:
        """Returns requests and dollars so far."""
        with self._open():
            return self._spent

    def price(self, tokens_in: int, tokens_out: int) -> float | None:
        """Returns the dollars for these tokens; None if no price is known."""
        config = self._config
        if not config.usd_per_million_input and not config.usd_per_million_output:
            return None
        return (tokens_in * config.usd_per_million_input + tokens_out * config.usd_per_million_output) / 1e6

    def reserve(self, tokens_in: int, tokens_out: int) -> float:
        """Counts one request at its maximum cost; returns that cost in dollars.

        Args:
            tokens_in: maximum tokens of chat and images.
            tokens_out: maximum tokens of the reply.

        Raises:
            BudgetSpent: a limit would be exceeded; nothing was counted.
        """
        config, worst = self._config, self.price(tokens_in, tokens_out) or 0.0
        with self._open():
            spent = self._spent
            if config.max_requests and spent.requests >= config.max_requests:
                raise BudgetSpent(
                    f"the budget of {config.max_requests} requests is spent",
                    f"raise {config.section}.max_requests in the run's config.yaml, then `rlvlm resume`",
                )
            if config.max_cost_usd and spent.cost_usd + worst > config.max_cost_usd:
                raise BudgetSpent(
                    f"the next request may cost {worst:.4f} USD; {spent.cost_usd:.4f} of {config.max_cost_usd:g} are "
                    f"spent{self._caveat}",
                    f"raise {config.section}.max_cost_usd in the run's config.yaml, then `rlvlm resume`",
                )
            self._spent = Spent(requests=spent.requests + 1, cost_usd=spent.cost_usd + worst)
        return worst

    def settle(self, reserved: float, usage: Usage | None) -> None:
        """Replaces the reserved cost of an answered request by its true cost."""
        if usage is None or usage.cost_usd is None:
            if reserved and not self._num_untold:
                logger.warning("the server does not say how many tokens it counts; its answers count at their most")
            self._num_untold += 1
            return
        with self._open():
            # another process may have counted meanwhile: add the difference rather than store the sum
            cost_usd = max(self._spent.cost_usd + usage.cost_usd - reserved, 0.0)
            self._spent = Spent(requests=self._spent.requests, cost_usd=cost_usd)

    @property
    def _caveat(self) -> str:
        if not self._num_untold:
            return ""
        return f" at most: {self._num_untold} answers came without a usage and count at the most that they can cost"

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Locks the count; with a ledger, against other processes too."""
        with self._lock:
            if self._ledger is None:
                yield
                return
            try:
                self._ledger.parent.mkdir(parents=True, exist_ok=True)
                stream = open(os.open(self._ledger, os.O_RDWR | os.O_CREAT, 0o600), "r+")
            except OSError as error:
                raise ModelUnavailable(
                    f"the ledger {self._ledger} cannot be opened: {error.strerror}",
                    "name a file that can be written, with ledger",
                ) from error
            with stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX)  # released when the file is closed
                except OSError as error:  # several processes that count without a lock would exceed the limit
                    raise ModelUnavailable(
                        f"the ledger {self._ledger} cannot be locked (flock: {error.strerror}; the file system is "
                        f"{file_system(self._ledger)})",
                        f"name a file on another disk: {self._config.section}.ledger",
                    ) from error
                try:
                    entry = json.loads(stream.read() or "{}")
                    before = Spent(requests=int(entry.get("requests", 0)), cost_usd=float(entry.get("cost_usd", 0.0)))
                except (ValueError, TypeError, AttributeError) as error:
                    raise ModelUnavailable(
                        f"the ledger {self._ledger} cannot be read: {error}",
                        "restore it, or remove it to count from nothing again",
                    ) from error
                self._spent = before
                yield
                if self._spent != before:
                    stream.seek(0)  # a single small write of constant length: never half an entry
                    stream.write(f"{json.dumps(asdict(self._spent)):<{_ENTRY_CHARS}}\n")
