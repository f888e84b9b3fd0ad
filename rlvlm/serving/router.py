"""Router that sends a request to the replica with the fewest running requests.

Serve's own router compares two random replicas by queue lengths that it learns only after requests were sent, so the
pieces of one row meet in one replica while another is idle: 4 replicas collide in 15 of 16 rows, and a row takes twice
as long (`benchmarks/replica_rows.py`).
"""

from collections import Counter
from itertools import count
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class FewestRequestsRouter(RequestRouter):
    """Counts a request from the choice of its replica until it ends, for whatever reason.

    One per handle and process: requests of other clients are seen in the queue lengths that replicas report.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Starts with no running requests; called by Serve."""
        self._under_way: dict[str, tuple[ReplicaID, PendingRequest]] = {}
        self._turns = count()
        self._last_turn: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replica with the fewest requests, ties to the longest unused; none while all are full."""
        assert pending_request is not None, "Serve's generator passes it"
        # if the chosen one turns out to be full, Serve then pauses before it asks again
        pending_request.routing_context.should_backoff = True
        key = pending_request.metadata.internal_request_id
        self._under_way.pop(key, None)  # its replica was full or died: this is the next try
        for other, (_, request) in list(self._under_way.items()):
            if request.future.cancelled():  # its caller left before it was sent, which Serve does not report
                self._under_way.pop(other, None)
        if not candidate_replicas:
            return []
        # all of them if all seem full: Serve asks them again
        replicas = self.select_available_replicas(candidate_replicas) or candidate_replicas
        own = Counter[ReplicaID]()
        for replica_id, request in list(self._under_way.values()):
            own[replica_id] += num_calls(request)

        def load(replica: RunningReplica) -> tuple[int, int]:
            reported = self.replica_queue_len_cache.get(replica.replica_id) or 0
            # a reply that has just arrived may still be counted: the longest unused replica is the likeliest to be idle
            return max(own[replica.replica_id], reported), self._last_turn.get(replica.replica_id, -1)

        chosen = min(replicas, key=load)
        self._under_way[key] = chosen.replica_id, pending_request
        self._last_turn[chosen.replica_id] = next(self._turns)
        return [[chosen]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stops counting a request; called by Serve, also for requests that failed or were refused."""
        if self._under_way.get(internal_request_id, (None,))[0] == replica_id:
            self._under_way.pop(internal_request_id, None)


def num_calls(request: PendingRequest) -> int:
    """Returns the number of calls in a request that have no answer yet, see `bags`; 1 for a request that is one."""
    return getattr(request.args[0], "num_open", 1) if request.args else 1
