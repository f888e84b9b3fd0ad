"""Requests of several runs put to a model that takes questions as they come, fairly. One queue per replica."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlvlm.serving.replicas.lines import Lines, Tries

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

    Nothing is asked twice (`Tries`). A request that every caller has left is given up at once: what waits is dropped,
    and what the model is at work on is cancelled.

    Args:
        ask: answers one question; it is cancelled where nobody waits for the answer any more.
        slots: questions under way at once.
    """

    def __init__(self, ask: AskOne, *, slots: int) -> None:
        self._ask = ask
        self._free = slots
        self._lines: Lines[_Request] = Lines()
        self.tries: Tries[_Request] = Tries()

    @property
    def num_waiting(self) -> int:
        """Questions that have no slot yet."""
        return sum(len(request.items) - request.num_begun for request in self._lines.requests())

    async def put(self, items: Sequence[Any], *, run: str = "", key: str = "") -> list[Any]:
        """The answers to `items`, in order.

        Args:
            items: the questions of one request, at least one.
            run: who asks; each run has a line of its own.
            key: equal for the tries of one request; empty for a request that is never sent again.

        Raises:
            Exception: whatever `ask` raised for one of them; the others are given up.
        """

        def begin(key: str) -> _Request:
            request = _Request(key, list(items), asyncio.get_running_loop().create_future(), [None] * len(items))
            self._lines.add(request, run)
            self._fill()
            return request

        return await self.tries.answers(key, begin, self._give_up)

    def _fill(self) -> None:
        """Begins questions until no slot is free or nothing waits."""
        while self._free and (line := self._lines.next()):
            request = line.waiting[0]
            place = request.num_begun
            request.num_begun += 1
            line.served += 1
            if request.num_begun == len(request.items):
                line.waiting.popleft()
            self._free -= 1
            task = asyncio.get_running_loop().create_task(self._answer(request, place))
            request.tasks.add(task)
            task.add_done_callback(request.tasks.discard)
        if self._free:
            self._lines.forget_empty()

    async def _answer(self, request: _Request, place: int) -> None:
        try:
            request.answers[place] = await self._ask(request.items[place])
            request.num_answered += 1
            if request.num_answered == len(request.items):
                self.tries.finish(request, request.answers)
        except Exception as error:  # every kind belongs to the callers, none to this task
            self.tries.fail(request, error)
            self._give_up(request)
        finally:
            self._free += 1
            self._fill()

    def _give_up(self, request: _Request) -> None:
        self.tries.close(request)
        self._lines.remove(request)
        for task in request.tasks - {asyncio.current_task()}:
            task.cancel()
