"""Requests of several runs shared out to batches, fairly. One queue per replica; used by `deployments`.

Serve's own `@serve.batch` is first come, first served: a run that floods the server makes every other wait behind it,
and a request that its caller sends again is judged again.
"""

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

MAX_REMEMBERED = 256
"""Finished requests whose answers are kept for a caller that asks again."""

Ask = Callable[[list[Any]], Awaitable[list[Any]]]


class Queued(Protocol):
    """A request in a line."""

    key: str
    items: list[Any]
    done: asyncio.Future[list[Any]]
    """The answers to `items`, in order."""
    num_callers: int


Waiting = TypeVar("Waiting", bound=Queued)


@dataclass(slots=True)
class Line(Generic[Waiting]):
    """The waiting requests of one run."""

    served: int = 0
    """Questions given out so far, on the scale on which all lines compete."""
    waiting: deque[Waiting] = field(default_factory=deque)


class Lines(Generic[Waiting]):
    """A line for each run; the one that got least so far is next."""

    def __init__(self) -> None:
        self._lines: dict[str, Line[Waiting]] = {}

    def add(self, request: Waiting, run: str) -> None:
        """Puts `request` at the end of the line of `run`."""
        busy = [line.served for line in self._lines.values() if line.waiting]
        line = self._lines.setdefault(run, Line())
        if not line.waiting:  # who was away has saved up nothing
            line.served = max(line.served, min(busy, default=0))
        line.waiting.append(request)

    def next(self, room: int | None = None) -> Line[Waiting] | None:
        """The line to take from; None where nothing waits, or nothing whose whole first request fits into `room`."""
        fitting = [
            line
            for line in self._lines.values()
            if line.waiting and (room is None or len(line.waiting[0].items) <= room)
        ]
        return min(fitting, key=lambda line: line.served, default=None)

    def remove(self, request: Waiting) -> None:
        """Takes `request` out, where it still waits."""
        for line in self._lines.values():
            if request in line.waiting:
                line.waiting.remove(request)

    def requests(self) -> list[Waiting]:
        """All that wait."""
        return [request for line in self._lines.values() for request in line.waiting]

    def forget_empty(self) -> None:
        """Drops the lines in which nothing waits."""
        self._lines = {run: line for run, line in self._lines.items() if line.waiting}


class Tries(Generic[Waiting]):
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
            begin: makes the request, and puts it into a line.
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
            if len(self._finished) > MAX_REMEMBERED:
                self._finished.popitem(last=False)
        request.done.set_result(answers)

    def fail(self, request: Waiting, error: Exception) -> None:
        """Raises `error` where the callers of `request` wait; nowhere where it is closed."""
        if self.close(request):
            request.done.set_exception(error)
            request.done.exception()  # read: a caller may have left


@dataclass(slots=True, eq=False)
class _Waiting:
    key: str
    items: list[Any]
    done: asyncio.Future[list[Any]]
    num_callers: int = 0
    is_begun: bool = False


class FairBatches:
    """Merges requests into batches of whole requests; the run that got least so far is next.

    A request is never cut, so with one client the model sees the same batches whatever the timing. Nothing is judged
    twice (`Tries`), and a request that every caller has left before its turn is dropped.

    Args:
        ask: answers one batch, in order.
        batch_size: most questions per batch; a larger request is a batch of its own.
        wait_s: how long an incomplete batch waits for more.
    """

    def __init__(self, ask: Ask, *, batch_size: int, wait_s: float) -> None:
        self._ask = ask
        self._batch_size = batch_size
        self._wait_s = wait_s
        self._lines: Lines[_Waiting] = Lines()
        self.tries: Tries[_Waiting] = Tries()
        self._arrived = asyncio.Event()
        self._server: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Questions that no batch has taken yet."""
        return sum(len(request.items) for request in self._lines.requests())

    async def put(self, items: Sequence[Any], *, run: str = "", key: str = "") -> list[Any]:
        """The answers to `items`, in order, once a batch has held them.

        Args:
            items: the questions of one request, at least one.
            run: who asks; each run has a line of its own.
            key: equal for the tries of one request; empty for a request that is never sent again.

        Raises:
            Exception: whatever `ask` raised for the batch that held the request.
        """

        def begin(key: str) -> _Waiting:
            request = _Waiting(key, list(items), asyncio.get_running_loop().create_future())
            self._lines.add(request, run)
            self._arrived.set()
            if self._server is None or self._server.done():
                self._server = asyncio.get_running_loop().create_task(self._serve())
            return request

        return await self.tries.answers(key, begin, self._drop)

    def _drop(self, request: _Waiting) -> None:
        if not request.is_begun:
            self.tries.close(request)
            self._lines.remove(request)

    async def _serve(self) -> None:
        """Takes batches until nothing waits."""
        while self.num_waiting:
            if self.num_waiting < self._batch_size:
                await self._wait_for_more()
            batch = self._take()
            if batch:
                await self._answer(batch)
        self._lines.forget_empty()

    async def _wait_for_more(self) -> None:
        """Returns when a batch is full or has waited long enough."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        while self.num_waiting < self._batch_size and (left_s := deadline - loop.time()) > 0:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left_s)
            except TimeoutError:
                return

    def _take(self) -> list[_Waiting]:
        """The next batch: whole requests, each from the line that has been given least."""
        batch: list[_Waiting] = []
        room = self._batch_size
        while line := self._lines.next(room if batch else None):
            request = line.waiting.popleft()
            request.is_begun = True
            line.served += len(request.items)
            room -= len(request.items)
            batch.append(request)
            if room <= 0:
                break
        return batch

    async def _answer(self, batch: list[_Waiting]) -> None:
        try:
            answers = iter(await self._ask([item for request in batch for item in request.items]))
            shares = [[next(answers) for _ in request.items] for request in batch]
        except Exception as error:  # every kind belongs to the callers, none to this task
            for request in batch:
                self.tries.fail(request, error)
            return
        for request, share in zip(batch, shares, strict=True):
            self.tries.finish(request, share)
