"""Which replica of an app answers a request: the one with the fewest requests under way.

Serve's own router compares two replicas drawn at random by queue lengths that it learns only after requests were sent,
so the pieces of one row meet in one replica while another is idle: 4 replicas collide in 15 of 16 rows, and a row takes
twice as long (`benchmarks/replica_rows.py`).
"""

from collections import Counter
from itertools import count
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class FewestRequestsRouter(RequestRouter):
    """Counts a request from the moment its replica is chosen until it is answered, whatever the reason it ends.

    One per handle and process: requests of other clients are known by the queue lengths that replicas report.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Begins with nothing under way; called by Serve."""
        self._under_way: dict[str, tuple[ReplicaID, PendingRequest]] = {}
        self._turns = count()
        self._last_turn: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one with the fewest requests, the longest unused among equals; none while all of them are full."""
        assert pending_request is not None, "Serve's generator passes it"
        # where the chosen one turns out to be full, Serve waits before it asks again, instead of without a pause
        pending_request.routing_context.should_backoff = True
        key = pending_request.metadata.internal_request_id
        self._under_way.pop(key, None)  # a replica that was full or died: this is the next try
        for other, (_, request) in list(self._under_way.items()):
            if request.future.cancelled():  # its caller left before it was sent, which Serve does not tell
                self._under_way.pop(other, None)
        if not candidate_replicas:
            return []
        # all where all are full by what is known: Serve asks them anew
        replicas = self.select_available_replicas(candidate_replicas) or candidate_replicas
        own = Counter(replica_id for replica_id, _ in list(self._under_way.values()))

        def load(replica: RunningReplica) -> tuple[int, int]:
            reported = self.replica_queue_len_cache.get(replica.replica_id) or 0
            # a reply that has only just come may still be counted: the longest unused replica is the likeliest idle one
            return max(own[replica.replica_id], reported), self._last_turn.get(replica.replica_id, -1)

        chosen = min(replicas, key=load)
        self._under_way[key] = chosen.replica_id, pending_request
        self._last_turn[chosen.replica_id] = next(self._turns)
        return [[chosen]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Counts it no more; called by Serve, also for requests that failed or were refused."""
        if self._under_way.get(internal_request_id, (None,))[0] == replica_id:
            self._under_way.pop(internal_request_id, None)
