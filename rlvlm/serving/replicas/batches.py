"""Requests of several runs shared out to batches, fairly. One queue per replica.

Serve's own `@serve.batch` is first come, first served: a run that floods the server makes every other wait behind it,
and a request that its caller sends again is judged again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlvlm.serving.replicas.fair_queue import FairQueue, RequestDeduplicator

Ask = Callable[[list[Any]], Awaitable[list[Any]]]


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
    twice (`RequestDeduplicator`), and a request that every caller has left before its turn is dropped.

    Args:
        ask: answers one batch, in order.
        batch_size: most questions per batch; a larger request is a batch of its own.
        wait_s: how long an incomplete batch waits for more.
    """

    def __init__(self, ask: Ask, *, batch_size: int, wait_s: float) -> None:
        self._ask = ask
        self._batch_size = batch_size
        self._wait_s = wait_s
        self._queue: FairQueue[_Waiting] = FairQueue()
        self.deduplicator: RequestDeduplicator[_Waiting] = RequestDeduplicator()
        self._arrived = asyncio.Event()
        self._server: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Questions that no batch has taken yet."""
        return sum(len(request.items) for request in self._queue.requests())

    async def put(self, items: Sequence[Any], *, run: str = "", key: str = "") -> list[Any]:
        """The answers to `items`, in order, once a batch has held them.

        Args:
            items: the questions of one request, at least one.
            run: who asks; each run has a queue of its own.
            key: equal for the tries of one request; empty for a request that is never sent again.

        Raises:
            Exception: whatever `ask` raised for the batch that held the request.
        """

        def begin(key: str) -> _Waiting:
            request = _Waiting(key, list(items), asyncio.get_running_loop().create_future())
            self._queue.add(request, run)
            self._arrived.set()
            if self._server is None or self._server.done():
                self._server = asyncio.get_running_loop().create_task(self._serve())
            return request

        return await self.deduplicator.answers(key, begin, self._drop)

    def _drop(self, request: _Waiting) -> None:
        if not request.is_begun:
            self.deduplicator.close(request)
            self._queue.remove(request)

    async def _serve(self) -> None:
        """Takes batches until nothing waits."""
        while self.num_waiting:
            if self.num_waiting < self._batch_size:
                await self._wait_for_more()
            batch = self._take()
            if batch:
                await self._answer(batch)
        self._queue.forget_empty()

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
        """The next batch: whole requests, each from the queue that has been given least."""
        batch: list[_Waiting] = []
        room = self._batch_size
        while queue := self._queue.next(room if batch else None):
            request = queue.waiting.popleft()
            request.is_begun = True
            queue.served += len(request.items)
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
                self.deduplicator.fail(request, error)
            return
        for request, share in zip(batch, shares, strict=True):
            self.deduplicator.finish(request, share)
