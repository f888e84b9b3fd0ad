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

    items: list[Any]


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


@dataclass(slots=True, eq=False)
class _Waiting:
    key: str
    items: list[Any]
    answers: asyncio.Future[list[Any]]
    num_callers: int = 0
    is_begun: bool = False


class FairBatches:
    """Merges requests into batches of whole requests; the run that got least so far is next.

    A request is never cut, so with one client the model sees the same batches whatever the timing. A request that comes
    a second time under its key, because its caller gave up or lost the connection, joins the first instead of being
    judged twice; one that every caller has left before its turn is dropped.

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
        self._open: dict[str, _Waiting] = {}
        self._finished: OrderedDict[str, list[Any]] = OrderedDict()
        self._arrived = asyncio.Event()
        self._server: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self.num_joined = 0
        """Requests that were answered without being judged again."""

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
        key = key or f"#{next(self._numbers)}"
        if key in self._finished:
            self.num_joined += 1
            return self._finished[key]
        request = self._open.get(key)
        if request is None:
            request = self._enqueue(_Waiting(key, list(items), asyncio.get_running_loop().create_future()), run)
        else:
            self.num_joined += 1
        request.num_callers += 1
        try:
            return await asyncio.shield(request.answers)
        except asyncio.CancelledError:
            request.num_callers -= 1
            if request.num_callers == 0 and not request.is_begun:
                self._drop(request)
            raise

    def _enqueue(self, request: _Waiting, run: str) -> _Waiting:
        self._open[request.key] = request
        self._lines.add(request, run)
        self._arrived.set()
        if self._server is None or self._server.done():
            self._server = asyncio.get_running_loop().create_task(self._serve())
        return request

    def _drop(self, request: _Waiting) -> None:
        self._open.pop(request.key, None)
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
                self._open.pop(request.key, None)
                if not request.answers.done():
                    request.answers.set_exception(error)
                    request.answers.exception()  # read: a caller may have left
            return
        for request, share in zip(batch, shares, strict=True):
            self._open.pop(request.key, None)
            if not request.key.startswith("#"):
                self._finished[request.key] = share
                if len(self._finished) > MAX_REMEMBERED:
                    self._finished.popitem(last=False)
            if not request.answers.done():
                request.answers.set_result(share)
