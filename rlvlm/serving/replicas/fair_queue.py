"""What both queues of a replica have: a queue for each run, of which the one that got least so far is next, and answers
that are given again to who asks again.
"""

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

_MAX_REMEMBERED = 256
"""Finished requests whose answers are kept for a caller that asks again."""


class Queued(Protocol):
    """A request in a queue."""

    key: str
    items: list[Any]
    done: asyncio.Future[list[Any]]
    """The answers to `items`, in order."""
    num_callers: int


Waiting = TypeVar("Waiting", bound=Queued)


@dataclass(slots=True)
class RunQueue(Generic[Waiting]):
    """The waiting requests of one run."""

    served: int = 0
    """Questions given out so far, on the scale on which all queues compete."""
    waiting: deque[Waiting] = field(default_factory=deque)


class FairQueue(Generic[Waiting]):
    """A queue for each run; the one that got least so far is next."""

    def __init__(self) -> None:
        self._queues: dict[str, RunQueue[Waiting]] = {}

    def add(self, request: Waiting, run: str) -> None:
        """Puts `request` at the end of the queue of `run`."""
        busy = [queue.served for queue in self._queues.values() if queue.waiting]
        queue = self._queues.setdefault(run, RunQueue())
        if not queue.waiting:  # who was away has saved up nothing
            queue.served = max(queue.served, min(busy, default=0))
        queue.waiting.append(request)

    def next(self, room: int | None = None) -> RunQueue[Waiting] | None:
        """The queue to take from; None where nothing waits, or nothing whose whole first request fits into `room`."""
        fitting = [
            queue
            for queue in self._queues.values()
            if queue.waiting and (room is None or len(queue.waiting[0].items) <= room)
        ]
        return min(fitting, key=lambda queue: queue.served, default=None)

    def remove(self, request: Waiting) -> None:
        """Takes `request` out, where it still waits."""
        for queue in self._queues.values():
            if request in queue.waiting:
                queue.waiting.remove(request)

    def requests(self) -> list[Waiting]:
        """All that wait."""
        return [request for queue in self._queues.values() for request in queue.waiting]

    def forget_empty(self) -> None:
        """Drops the queues in which nothing waits."""
        self._queues = {run: queue for run, queue in self._queues.items() if queue.waiting}


class RequestDeduplicator(Generic[Waiting]):
    """Requests by their keys. One that comes a second time, because its caller gave up or lost the connection, joins
    the first, or gets the answers that the first was given.
    """

    def __init__(self) -> None:
        self._open: dict[str, Waiting] = {}
        self._finished: OrderedDict[str, list[Any]] = OrderedDict()
        self._numbers = itertools.count()
        self.num_joined = 0
        """Requests that were answered without being asked again."""

    async def answers(self, key: str, begin: Callable[[str], Waiting], leave: Callable[[Waiting], None]) -> list[Any]:
        """The answers to a request.

        Args:
            key: equal for the tries of one request; empty for a request that is never sent again.
            begin: makes the request, and puts it into a queue.
            leave: told of a request that every caller has left.

        Raises:
            Exception: whatever became of `done`.
        """
        key = key or f"#{next(self._numbers)}"
        if key in self._finished:
            self.num_joined += 1
            return self._finished[key]
        request = self._open.get(key)
        if request is None:
            request = self._open[key] = begin(key)
        else:
            self.num_joined += 1
        request.num_callers += 1
        try:
            return await asyncio.shield(request.done)
        except asyncio.CancelledError:
            request.num_callers -= 1
            if request.num_callers == 0:
                leave(request)
            raise

    def close(self, request: Waiting) -> bool:
        """Lets nobody join `request` any more; whether anybody could until now."""
        is_open = self._open.get(request.key) is request
        if is_open:
            del self._open[request.key]
        return is_open

    def finish(self, request: Waiting, answers: list[Any]) -> None:
        """Gives the callers of `request` the answers, and keeps them for who asks again; none where it is closed."""
        if not self.close(request):
            return
        if not request.key.startswith("#"):
            self._finished[request.key] = answers
            if len(self._finished) > _MAX_REMEMBERED:
                self._finished.popitem(last=False)
        request.done.set_result(answers)

    def fail(self, request: Waiting, error: Exception) -> None:
        """Raises `error` where the callers of `request` wait; nowhere where it is closed."""
        if self.close(request):
            request.done.set_exception(error)
            request.done.exception()  # read: a caller may have left
