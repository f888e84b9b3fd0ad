"""Queue that gives several runs even shares of a model, and asks each question once. One or two in every replica.

Serve's own `@serve.batch` is first come, first served: a run that floods the server makes every other wait behind it
(`tests/faults/test_served_judges.py::test_two_runs_on_one_server_share_it_and_never_cross` at full scale), and a
request that its caller sends again is computed again (`tests/serving/test_fair_queue.py`).
"""

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_MAX_REMEMBERED = 256
"""Number of finished requests whose answers are kept for a caller that asks again."""


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


@dataclass(slots=True)
class _Run:
    served: int = 0
    """Questions served so far, relative to a scale common to all runs."""
    waiting: deque[_Request] = field(default_factory=deque)


class FairQueue:
    """Merges requests into batches; the run served least so far comes next.

    A request that arrives again under its key, because its caller gave up or lost the connection, joins the first, or
    gets the first one's answers. A request that all callers have left before its turn is dropped.

    In batches a request is never split, so with a single client the model sees the same batches whatever the timing.
    One by one, for an engine that batches by itself, questions enter as soon as a slot is free, and running ones are
    cancelled once no caller waits for them.

    Args:
        ask: answers one batch, in order.
        batch_size: maximum questions per batch; a larger request is a batch of its own. 1 admits questions one by one.
        concurrency: number of concurrent batches.
        wait_s: how long an incomplete batch waits for more questions, seconds.
    """

    def __init__(
        self,
        ask: Callable[[list[Any]], Awaitable[list[Any]]],
        *,
        batch_size: int,
        concurrency: int = 1,
        wait_s: float = 0.0,
    ) -> None:
        self._ask = ask
        self._batch_size = batch_size
        self._is_one_by_one = concurrency > 1
        self._free = concurrency
        self._wait_s = wait_s
        self._runs: dict[str, _Run] = {}
        self._open: dict[str, _Request] = {}
        self._finished: OrderedDict[str, list[Any]] = OrderedDict()
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self.num_joined = 0
        """Number of requests answered without asking the model again."""

    @property
    def num_waiting(self) -> int:
        """Number of questions not yet in a batch."""
        return sum(len(request.items) - request.num_begun for run in self._runs.values() for request in run.waiting)

    async def put(self, items: Sequence[Any], *, run: str = "", key: str = "") -> list[Any]:
        """Returns the answers to `items`, in order.

        Args:
            items: the questions of one request.
            run: name of the asking run; each run has a queue of its own.
            key: the same for all tries of one request; empty for a request that is never sent again.

        Raises:
            Exception: the error raised by `ask` for a batch with one of them.
        """
        if not items:
            return []
        key = key or f"#{next(self._numbers)}"
        if key in self._finished:  # the answer was lost with the connection or because the caller gave up
            self.num_joined += 1
            return self._finished[key]
        request = self._open.get(key)
        if request is None:
            done = asyncio.get_running_loop().create_future()
            request = self._open[key] = _Request(key, list(items), done, [None] * len(items))
            # a run starts level with those that wait: counted from zero it would be served alone until it had caught up
            busy = [other.served for other in self._runs.values() if other.waiting]
            mine = self._runs.setdefault(run, _Run())
            if not mine.waiting:  # a run that was idle has not saved up any turns
                mine.served = max(mine.served, min(busy, default=0))
            mine.waiting.append(request)
            self._begin_batches()
        else:
            self.num_joined += 1
        request.num_callers += 1
        try:
            # shielded: a caller that leaves must not cancel what others wait for
            return await asyncio.shield(request.done)
        except asyncio.CancelledError:
            request.num_callers -= 1
            # a running batch cannot be stopped: a caller that asks again joins it
            if not request.num_callers and (self._is_one_by_one or not request.num_begun):
                self._drop(request)
            raise

    def _begin_batches(self, *, has_waited: bool = False) -> None:
        """Starts batches until the model is busy, nothing waits, or an incomplete batch should wait for more."""
        loop = asyncio.get_running_loop()
        while self._free and (num_waiting := self.num_waiting):
            # a fuller batch costs the model hardly more time, so an incomplete one waits some milliseconds
            if num_waiting < self._batch_size and self._wait_s and not has_waited:
                if self._timer is None:
                    self._timer = loop.call_later(self._wait_s, self._stop_waiting)
                return
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            has_waited = False
            self._free -= 1
            batch = self._take()
            task = loop.create_task(self._answer(batch))
            for request, _ in batch:
                request.tasks.add(task)
        # idle: no run is owed anything, and names of finished runs are dropped
        if not self._open:
            self._runs.clear()

    def _stop_waiting(self) -> None:
        self._timer = None
        self._begin_batches(has_waited=True)

    def _take(self) -> list[tuple[_Request, int]]:
        """Returns the next batch, as pairs of request and index, each from the run that was served least."""
        batch: list[tuple[_Request, int]] = []
        while (room := self._batch_size - len(batch)) > 0:
            fitting = [
                run
                for run in self._runs.values()
                if run.waiting and (self._is_one_by_one or not batch or len(run.waiting[0].items) <= room)
            ]
            if not fitting:
                break
            run = min(fitting, key=lambda run: run.served)  # ties go to the one that came first
            request = run.waiting[0]
            count = 1 if self._is_one_by_one else len(request.items)
            batch += [(request, request.num_begun + number) for number in range(count)]
            request.num_begun += count
            run.served += count
            if request.num_begun == len(request.items):
                run.waiting.popleft()
        return batch

    async def _answer(self, batch: list[tuple[_Request, int]]) -> None:
        try:
            answers = await self._ask([request.items[place] for request, place in batch])
            for (request, place), answer in zip(batch, answers, strict=True):
                request.answers[place] = answer
                request.num_answered += 1
                if request.num_answered == len(request.items) and self._open.get(request.key) is request:
                    del self._open[request.key]
                    if not request.key.startswith("#"):
                        # kept for a caller that lost the answer and asks again
                        self._finished[request.key] = request.answers
                        if len(self._finished) > _MAX_REMEMBERED:
                            self._finished.popitem(last=False)
                    request.done.set_result(request.answers)
        except Exception as error:  # every error belongs to the callers, none to this task
            for request in dict.fromkeys(request for request, _ in batch):
                if self._open.get(request.key) is request:
                    request.done.set_exception(error)
                    request.done.exception()  # marks it as retrieved: its caller may have left
                self._drop(request)
        finally:
            self._free += 1
            self._begin_batches()

    def _drop(self, request: _Request) -> None:
        """Closes `request` to new callers; removes its waiting items and cancels the running ones."""
        if self._open.get(request.key) is request:
            del self._open[request.key]
        for run in self._runs.values():
            if request in run.waiting:
                run.waiting.remove(request)
        if self._is_one_by_one:
            for task in request.tasks - {asyncio.current_task()}:
                task.cancel()
