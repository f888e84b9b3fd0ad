"""Router that sends a request to the replica with the fewest running requests, and spares one that is much slower.

Serve's own router compares two random replicas by queue lengths that it learns only after requests were sent, so the
pieces of one row meet in one replica while another is idle: 4 replicas collide in 15 of 16 rows, and a row takes twice
as long (`benchmarks/replica_rows.py`).
"""

import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

logger = logging.getLogger(__name__)

SLOW, SLOW_S = 3.0, 0.1
"""A replica is slow if the quickest of its latest requests took so many times as long as the other replicas' and as
was usual, and so many seconds longer."""
_LATEST, _KNOWN, _USUAL = 5, 3, 200
"""Requests of a replica that are remembered, how many must have ended before it is called slow, and requests of all
replicas by which it is judged."""
_TRY_AGAIN_S = 60.0
"""Time after which a slow replica that was spared is tried again, seconds."""

Replica = TypeVar("Replica", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Sent:
    replica_id: ReplicaID
    request: PendingRequest
    begun_s: float
    place: int
    """Number of requests that the replica then had, this one included: it may answer one after the other."""


class Paces:
    """How long requests take on each replica, by method."""

    def __init__(self) -> None:
        self._latest_s: dict[tuple[str, Hashable], deque[float]] = {}
        self._usual_s: dict[str, deque[float]] = {}

    def add(self, method: str, replica: Hashable, took_s: float) -> None:
        """Adds a request that has ended, seconds."""
        self._latest_s.setdefault((method, replica), deque(maxlen=_LATEST)).append(took_s)
        self._usual_s.setdefault(method, deque(maxlen=_USUAL)).append(took_s)

    def slow(self, method: str, replicas: Sequence[Replica]) -> dict[Replica, tuple[float, float]]:
        """Returns those of `replicas` that are slow, with the seconds that a request takes there and usually."""
        # the quickest of the latest: long questions come to all of them, and are no reason
        latest = {replica: self._latest_s.get((method, replica), ()) for replica in replicas}
        quickest = {replica: min(some) for replica, some in latest.items() if len(some) >= _KNOWN}
        if len(quickest) < 2:
            return {}
        # beside what was usual before, too: a broken replica, which fails at once, makes no other one slow
        usual_s = max(statistics.median_low(quickest.values()), statistics.median(self._usual_s[method]))
        limit_s = max(SLOW * usual_s, usual_s + SLOW_S)
        return {replica: (took_s, usual_s) for replica, took_s in quickest.items() if took_s > limit_s}


class FewestRequestsRouter(RequestRouter):
    """Counts a request from the choice of its replica until it ends, for whatever reason.

    One per handle and process: requests of other clients are seen in the queue lengths that replicas report.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Starts with no running requests; called by Serve."""
        self._under_way: dict[str, _Sent] = {}
        self._turns = count()
        self._last_turn: dict[ReplicaID, tuple[int, float]] = {}
        self._paces = Paces()
        self._named: set[ReplicaID] = set()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replica with the fewest requests, ties to the longest unused; none while all are full."""
        assert pending_request is not None, "Serve's generator passes it"
        # if the chosen one turns out to be full, Serve then pauses before it asks again
        pending_request.routing_context.should_backoff = True
        key = pending_request.metadata.internal_request_id
        self._under_way.pop(key, None)  # its replica was full or died: this is the next try
        for other, sent in list(self._under_way.items()):
            if sent.request.future.cancelled():  # its caller left before it was sent, which Serve does not report
                self._under_way.pop(other, None)
        if not candidate_replicas:
            return []
        # all of them if all seem full: Serve asks them again
        replicas = self.select_available_replicas(candidate_replicas) or candidate_replicas
        own, places = Counter[ReplicaID](), Counter[ReplicaID]()
        for sent in list(self._under_way.values()):
            own[sent.replica_id] += num_calls(sent.request)
            places[sent.replica_id] += 1
        now = time.monotonic()
        slow = self._paces.slow(pending_request.metadata.call_method, [one.replica_id for one in candidate_replicas])
        for replica in candidate_replicas:
            if replica.replica_id in slow and replica.replica_id not in self._named:
                self._name(replica, *slow[replica.replica_id])

        def load(replica: RunningReplica) -> tuple[float, int]:
            reported = self.replica_queue_len_cache.get(replica.replica_id) or 0
            turn, used_s = self._last_turn.get(replica.replica_id, (-1, now))
            took_s, usual_s = slow.get(replica.replica_id, (1.0, 1.0)) if now - used_s < _TRY_AGAIN_S else (1.0, 1.0)
            # a reply that has just arrived may still be counted: the longest unused replica is the likeliest to be idle
            return (1 + max(own[replica.replica_id], reported)) * took_s / usual_s, turn

        chosen = min(replicas, key=load)
        self._under_way[key] = _Sent(chosen.replica_id, pending_request, now, places[chosen.replica_id] + 1)
        self._last_turn[chosen.replica_id] = next(self._turns), now
        return [[chosen]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stops counting a request; called by Serve, also for requests that failed or were refused."""
        sent = self._under_way.get(internal_request_id)
        if sent is not None and sent.replica_id == replica_id:
            self._under_way.pop(internal_request_id, None)
            took_s = (time.monotonic() - sent.begun_s) / sent.place
            self._paces.add(sent.request.metadata.call_method, replica_id, took_s)

    def _name(self, replica: RunningReplica, took_s: float, usual_s: float) -> None:
        self._named.add(replica.replica_id)
        logger.warning(
            "%s on node %s is slow: a request takes %.2g s, usually %.2g s; fewer are sent there",
            replica.replica_id.to_full_id_str(),
            replica.node_id,
            took_s,
            usual_s,
        )


def num_calls(request: PendingRequest) -> int:
    """Returns the number of calls in a request that have no answer yet, see `bags`; 1 for a request that is one."""
    return getattr(request.args[0], "num_open", 1) if request.args else 1
