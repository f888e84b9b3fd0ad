"""Batches over callers: what threads and coroutines of a process ask a judge at the same time is asked together."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.vlms.chats import Refused
from rlvlm.vlms.engines.loop import LoopThread, PerProcess

GATHER_S = 0.002
"""Time for which the first of several callers waits for the others, seconds."""
Kind = Literal["score", "compare"]
Item = Clip | Query
Answer = Score | Verdict
Ask = Callable[[Kind, list[Item]], Awaitable[Sequence[Answer]]]
T = TypeVar("T")


def num_images(item: Item) -> int:
    """Returns the number of images of a question."""
    sides = [item.frames] if isinstance(item, Clip) else [item.left, item.right]
    return sum(map(len, sides)) + (item.goal_picture is not None)


class Batches:
    """Asks in batches, several at a time, and hands every caller its own answers in the order of its questions.

    Memory is bounded by the batches in flight: further questions wait as the arrays that their callers hold. The object
    pickles, and a fork of it starts anew, with a loop and connections of its own.

    Args:
        ask: answers one batch of a kind, one answer per item; `Refused` if a question of it cannot be asked.
        limit: returns the maximum number of images of a batch; awaited before the first batch of a process.
        in_flight: batches at a time, >= 1.
    """

    def __init__(self, ask: Ask, limit: Callable[[], Awaitable[int]], in_flight: int) -> None:
        self._ask, self._limit, self._in_flight = ask, limit, in_flight
        self._here = PerProcess(self._start)

    def run(self, kind: Kind, items: Sequence[Item]) -> list[Any]:
        """Returns one answer per item, in order; one that was not answered is `failed`, with the reason as its text.

        Raises:
            JudgeUnavailable: nothing was answered.
            UnsupportedQuestion: the judge cannot be asked this.
        """
        line = self._here()
        return _answers(line.loop.run(line.outcomes(kind, items))) if items else []

    async def on_loop(self, kind: Kind, items: Sequence[Item]) -> list[Any]:
        """Returns what `run` does, for callers with an event loop; cancelled with the task that awaits it."""
        line = self._here()
        return _answers(await line.loop.on_loop(line.outcomes(kind, items))) if items else []

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Runs `work` on the loop of this process and returns its result."""

        async def awaited() -> T:
            return await work()

        return self._here().loop.run(awaited())

    def _start(self) -> "_Line":
        return _Line(self._ask, self._limit, self._in_flight)


class _Line:
    """Questions that wait in one process; everything but `loop` is used on the loop alone."""

    def __init__(self, ask: Ask, limit: Callable[[], Awaitable[int]], in_flight: int) -> None:
        self.loop = LoopThread("judge")
        self._ask, self._limit = ask, limit
        self._max_images = 0
        self._num_idle = in_flight
        self._waiting: dict[Kind, deque[tuple[Item, asyncio.Future[Answer]]]] = {"score": deque(), "compare": deque()}
        self._tasks = set[asyncio.Task[None]]()  # asyncio itself keeps no reference to a task

    async def outcomes(self, kind: Kind, items: Sequence[Item]) -> list[Answer | BaseException]:
        """Returns the answer to each item, or the error in its place."""
        self._max_images = self._max_images or await self._limit()
        loop = asyncio.get_running_loop()
        asked = [(item, loop.create_future()) for item in items]
        self._waiting[kind].extend(asked)
        loop.call_later(GATHER_S, self._send)
        return await asyncio.gather(*(future for _, future in asked), return_exceptions=True)

    def _send(self) -> None:
        for kind, waiting in self._waiting.items():
            while waiting and self._num_idle:
                # by position alone, so that a single caller's questions make the same batches whatever the timing
                batch, room = [waiting.popleft()], self._max_images
                room -= num_images(batch[0][0])
                while waiting and num_images(waiting[0][0]) <= room:
                    room -= num_images(waiting[0][0])
                    batch.append(waiting.popleft())
                if batch := [(item, future) for item, future in batch if not future.done()]:  # cancelled by its caller
                    self._num_idle -= 1
                    task = asyncio.get_running_loop().create_task(self._serve(kind, batch))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def _serve(self, kind: Kind, batch: list[tuple[Item, "asyncio.Future[Answer]"]]) -> None:
        try:
            await self._answer(kind, batch)
        finally:
            self._num_idle += 1
            self._send()

    async def _answer(self, kind: Kind, batch: list[tuple[Item, "asyncio.Future[Answer]"]]) -> None:
        try:
            answers = await self._ask(kind, [item for item, _ in batch])
            if len(answers) != len(batch):
                raise JudgeUnavailable(f"the judge gave {len(answers)} answers to {len(batch)} questions")
        except Refused as error:
            if len(batch) > 1:  # one caller's question must not cost another's answer
                for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
                    await self._answer(kind, half)
                return
            answers = [error]
        except Exception as error:  # whatever a judge of one's own raises
            answers = [error] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def _answers(outcomes: Sequence[Answer | BaseException]) -> list[Answer]:
    """Returns the answers, with errors as failed ones; raises the first error if nothing was answered."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if len(errors) == len(outcomes):
        first = errors[0]
        if isinstance(first, Refused):
            raise JudgeUnavailable(f"the judge refuses every question: {first}") from first
        raise first
    stamp = next(outcome.stamp for outcome in outcomes if not isinstance(outcome, BaseException))
    is_score = any(isinstance(outcome, Score) for outcome in outcomes)
    return [
        _failed(outcome, stamp, is_score) if isinstance(outcome, BaseException) else outcome for outcome in outcomes
    ]


def _failed(error: BaseException, stamp: Stamp, is_score: bool) -> Answer:
    if is_score:
        return Score(status=Status.FAILED, value=None, stamp=stamp, text=str(error))
    return Verdict(status=Status.FAILED, label=None, stamp=stamp, text=str(error))
