"""Calls of one process to the replicas of an app, several in one request: a request of Serve costs as much as sixteen
small calls in it.

Every call stays one of its own on the replica, with its key, and is answered as soon as its answer is there. The
caller's end is `BagSender`, which `ServedEngine` uses, the replica's is `each_answer`.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlvlm.core.errors import ModelUnavailable, RunError

GATHER_S = 0.005
"""Time for which calls, and answers, wait for others to travel with, seconds."""


class Bag:
    """Calls that travel in one request of Serve, until all are answered. It pickles as a dict, by number, of those that
    are still open: what a replica gets.

    Args:
        calls: each with the future that gets its answer.
        check: raises ModelUnavailable if an answer does not fit its call.
    """

    def __init__(self, calls: Sequence[tuple[Any, Future[Any]]], check: Callable[[Any, Any], None]) -> None:
        self._open, self._check = dict(enumerate(calls)), check
        self._failure: ModelUnavailable | None = None

    def __reduce__(self) -> Any:
        return dict, ({number: call for number, (call, _) in self._open.items()},)

    @property
    def num_open(self) -> int:
        """Number of calls without an answer, by which `FewestRequestsRouter` counts."""
        return len(self._open)

    def take(self, answers: Sequence[tuple[int, Any]]) -> None:
        """Passes answers on to who waits for them. Calls that failed for a reason that may pass remain open."""
        for number, answer in answers:
            call, future = self._open[number]
            try:
                if isinstance(answer, RunError):  # errors are returned as values, see `PolicyReplica.ask`
                    raise answer
                self._check(call, answer)
            except ModelUnavailable as error:
                self._failure = error
                continue
            except RunError as error:
                future.set_exception(error)
            else:
                future.set_result(answer)
            del self._open[number]

    def end_try(self) -> None:
        """Raises the reason for which calls are still open after a request has ended; returns if none is.

        Raises:
            ModelUnavailable: another try may succeed.
        """
        if self._open:
            raise self._failure or ModelUnavailable("a replica has left out answers")

    def fail(self, error: BaseException) -> None:
        """Ends the open calls with `error`, or cancels who waits for them."""
        for _, future in self._open.values():
            if isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
        self._open.clear()


class BagSender:
    """Sends calls from any thread; their tries and answers are a matter of one thread with an event loop.

    Args:
        deliver: has the calls of a bag answered; raises the error of those that it leaves open.
        num_replicas: number of replicas.
        check: raises ModelUnavailable if an answer does not fit its call.
    """

    def __init__(
        self, deliver: Callable[[Bag], Awaitable[None]], num_replicas: int, check: Callable[[Any, Any], None]
    ) -> None:
        self._deliver, self._num_replicas, self._check = deliver, num_replicas, check
        self._gathered: list[tuple[Any, Future[Any]]] = []
        self._under_way: dict[asyncio.Task[None], Bag] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="requests")
        self._thread.start()

    def send(self, calls: Sequence[Any], *, gathers: bool) -> list[Future[Any]]:
        """Returns the futures of the answers to `calls`, in order.

        Args:
            calls: what the replica's method takes.
            gathers: whether calls wait some milliseconds for others and share requests; else each is sent at once in a
                request of its own.
        """
        pairs = [(call, Future[Any]()) for call in calls]
        self._loop.call_soon_threadsafe(self._gather if gathers else self._send_alone, pairs)
        return [future for _, future in pairs]

    def close(self) -> None:
        """Cancels what is under way, on the replicas too, and ends the thread."""

        async def end() -> None:
            tasks = list(self._under_way)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.stop()

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(end(), self._loop)

    def _gather(self, pairs: list[tuple[Any, Future[Any]]]) -> None:
        if not self._gathered:
            self._loop.call_later(GATHER_S, self._send_gathered)
        self._gathered += pairs

    def _send_gathered(self) -> None:
        pairs, self._gathered = self._gathered, []
        num_open = sum(bag.num_open for bag in self._under_way.values())
        # an even share of all that is under way: a whole row is cut into one bag a replica, and the few calls that
        # follow the answers of one replica go back to it in one
        size = -(-(num_open + len(pairs)) // self._num_replicas)
        for start in range(0, len(pairs), size):
            self._send(pairs[start : start + size])

    def _send_alone(self, pairs: list[tuple[Any, Future[Any]]]) -> None:
        for pair in pairs:
            self._send([pair])

    def _send(self, pairs: Sequence[tuple[Any, Future[Any]]]) -> None:
        bag = Bag(pairs, self._check)
        task = self._loop.create_task(self._delivered(bag))
        self._under_way[task] = bag
        task.add_done_callback(self._under_way.pop)

    async def _delivered(self, bag: Bag) -> None:
        try:
            await self._deliver(bag)
        except BaseException as error:  # every error belongs to the callers, none to this task
            bag.fail(error)
            if isinstance(error, asyncio.CancelledError):
                raise


async def each_answer(
    ask: Callable[[Any], Awaitable[Any]], calls: Mapping[int, Any]
) -> AsyncGenerator[list[tuple[int, Any]]]:
    """Yields the answers of `ask` to `calls`, with their numbers, as soon as they are there, those of some milliseconds
    together. Calls that are not answered are cancelled with it.
    """
    asked = {asyncio.ensure_future(ask(call)): number for number, call in calls.items()}
    waiting = set(asked)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting:
                late, waiting = await asyncio.wait(waiting, timeout=GATHER_S)
                done |= late
            yield [(asked[task], task.result()) for task in done]
    finally:
        for task in waiting:
            task.cancel()
