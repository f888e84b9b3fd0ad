"""Requests of several runs put to a model that takes questions as they come, fairly. One queue per replica."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlvlm.serving.replicas.fair_queue import FairQueue, RequestDeduplicator

AskOne = Callable[[Any], Awaitable[Any]]


@dataclass(slots=True, eq=False)
class _Request:
    key: str
    items: list[Any]
    done: asyncio.Future[list[Any]]
    answers: list[Any]
    num_callers: int = 0
    num_begun: int = 0
    num_answered: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class FairSlots:
    """Lets questions in one by one, as soon as a slot is free; the run that got least so far is next.

    Nothing is asked twice (`RequestDeduplicator`). A request that every caller has left is given up at once: what waits
    is dropped, and what the model is at work on is cancelled.

    Args:
        ask: answers one question; it is cancelled where nobody waits for the answer any more.
        slots: questions under way at once.
    """

    def __init__(self, ask: AskOne, *, slots: int) -> None:
        self._ask = ask
        self._free = slots
        self._queue: FairQueue[_Request] = FairQueue()
        self.deduplicator: RequestDeduplicator[_Request] = RequestDeduplicator()

    @property
    def num_waiting(self) -> int:
        """Questions that have no slot yet."""
        return sum(len(request.items) - request.num_begun for request in self._queue.requests())

    async def put(self, items: Sequence[Any], *, run: str = "", key: str = "") -> list[Any]:
        """The answers to `items`, in order.

        Args:
            items: the questions of one request, at least one.
            run: who asks; each run has a queue of its own.
            key: equal for the tries of one request; empty for a request that is never sent again.

        Raises:
            Exception: whatever `ask` raised for one of them; the others are given up.
        """

        def begin(key: str) -> _Request:
            request = _Request(key, list(items), asyncio.get_running_loop().create_future(), [None] * len(items))
            self._queue.add(request, run)
            self._fill()
            return request

        return await self.deduplicator.answers(key, begin, self._give_up)

    def _fill(self) -> None:
        """Begins questions until no slot is free or nothing waits."""
        while self._free and (queue := self._queue.next()):
            request = queue.waiting[0]
            place = request.num_begun
            request.num_begun += 1
            queue.served += 1
            if request.num_begun == len(request.items):
                queue.waiting.popleft()
            self._free -= 1
            task = asyncio.get_running_loop().create_task(self._answer(request, place))
            request.tasks.add(task)
            task.add_done_callback(request.tasks.discard)
        if self._free:
            self._queue.forget_empty()

    async def _answer(self, request: _Request, place: int) -> None:
        try:
            request.answers[place] = await self._ask(request.items[place])
            request.num_answered += 1
            if request.num_answered == len(request.items):
                self.deduplicator.finish(request, request.answers)
        except Exception as error:  # every kind belongs to the callers, none to this task
            self.deduplicator.fail(request, error)
            self._give_up(request)
        finally:
            self._free += 1
            self._fill()

    def _give_up(self, request: _Request) -> None:
        self.deduplicator.close(request)
        self._queue.remove(request)
        for task in request.tasks - {asyncio.current_task()}:
            task.cancel()
