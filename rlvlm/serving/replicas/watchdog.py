"""A thread inside each replica that ends it when its model or its event loop is stuck. Used by `deployments`.

Ray Serve notices a stuck replica only by asking it, three times in a row and each time up to a timeout, and then lets
it finish in peace what it never will. Ending the process is quicker and safer: callers get an `ActorDiedError` at once
and ask another replica, and Serve starts a successor. Where the process cannot run this thread at all (SIGSTOP, a C
call that keeps the GIL) Serve's own check remains; `deployments` sets its period and timeout for that case.

The difficulty is to leave alone a replica that is busy with one long honest batch. So it is not the clock that decides
but signs of life, see `Heartbeat`.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

SAMPLE_S = 0.25
"""Between two looks. Silence is counted in looks, not seconds: a starved or stopped process looks less often too."""
EXIT_STUCK = 70
MAX_FRAMES = 64


class Heartbeat:
    """Signs of life of the one thread that runs the model.

    - CPU time: on a CPU a thread that computes uses some between any two looks, one that sleeps, waits for a lock or
      for a pipe uses none. A thread that waits for a GPU may spin, so there it says nothing.
    - finished layers: on a GPU every module that returns counts; a hung kernel fills the launch queue and stops them.
    - the stack: moved on since the last look, as when images are decoded.

    A model that runs elsewhere (an API, an engine in its own process) shows none of these while it is well; for it only
    the deadline counts.

    Args:
        waits_for_gpu: whether the model runs on a GPU of this process.
        is_elsewhere: whether it runs in another process.
    """

    def __init__(self, *, waits_for_gpu: bool = False, is_elsewhere: bool = False) -> None:
        self._waits_for_gpu = waits_for_gpu
        self._is_elsewhere = is_elsewhere
        self._clock: int | None = None
        self._thread = 0
        self._batches = 0
        self._layers = 0
        self._begun: dict[object, float] = {}
        if waits_for_gpu:
            from torch.nn.modules.module import register_module_forward_hook

            register_module_forward_hook(self._count_layer)

    @property
    def busy_since(self) -> float | None:
        """When the oldest batch or question at work was begun, monotonic; None while there is none."""
        return next(iter(list(self._begun.values())), None)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around one batch, in the model's thread."""
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._batches += 1
        with self.waiting():
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around one question to a model that runs elsewhere; any number of them may be under way."""
        ticket = object()
        self._begun[ticket] = time.monotonic()
        try:
            yield
        finally:
            del self._begun[ticket]

    def read(self) -> tuple[Any, ...] | None:
        """What differs between two looks at a live thread; None where nothing can be seen."""
        if self._is_elsewhere:
            return None
        if self._waits_for_gpu or self._clock is None:
            return self._batches, self._layers, _stack(self._thread)
        return self._batches, time.clock_gettime_ns(self._clock)

    def _count_layer(self, *_: object) -> None:
        self._layers += 1


class Watchdog:
    """Looks every `SAMPLE_S` and ends the process when the loop or the model's thread is stuck.

    Args:
        heartbeat: of the model's thread.
        stall_s: longest silence.
        deadline_s: longest batch, however lively: callers have given up by then.
        end: ends the process; tests put something milder here.
    """

    def __init__(
        self, heartbeat: Heartbeat, *, stall_s: float, deadline_s: float, end: Callable[[str], None] | None = None
    ) -> None:
        self._heartbeat = heartbeat
        self._deadline_s = deadline_s
        self._max_silent = max(2, round(stall_s / SAMPLE_S))
        self._end = end or end_process
        self._loop_answered = True
        self._loop_silent = 0
        self._work_silent = 0
        self._last: tuple[Any, ...] | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to look, from a thread of its own, until the loop is closed."""
        threading.Thread(target=self._look_for_ever, args=(loop,), name="watchdog", daemon=True).start()

    def look(self, loop: asyncio.AbstractEventLoop) -> str | None:
        """Why the process is stuck; None while there is hope."""
        return self._look_at_loop(loop) or self._look_at_work()

    def _look_at_loop(self, loop: asyncio.AbstractEventLoop) -> str | None:
        if self._loop_answered:
            self._loop_answered, self._loop_silent = False, 0
            loop.call_soon_threadsafe(self._hear_loop)
            return None
        self._loop_silent += 1
        if self._loop_silent < self._max_silent:
            return None
        return f"its event loop has been blocked for {self._loop_silent * SAMPLE_S:.0f} s"

    def _look_at_work(self) -> str | None:
        busy_since = self._heartbeat.busy_since
        if busy_since is None:
            self._work_silent = 0
            return None
        busy_s = time.monotonic() - busy_since
        if busy_s > self._deadline_s:
            return f"one batch has taken {busy_s:.0f} s, callers wait {self._deadline_s:.0f} s (--serve.timeout-s)"
        now = self._heartbeat.read()
        self._work_silent = self._work_silent + 1 if now is not None and now == self._last else 0
        self._last = now
        if self._work_silent < self._max_silent:
            return None
        return (
            f"the model has shown no sign of life for {self._work_silent * SAMPLE_S:.0f} s; "
            "if it was only slow, raise --serve.stall-s"
        )

    def _hear_loop(self) -> None:
        self._loop_answered = True

    def _look_for_ever(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            time.sleep(SAMPLE_S)
            if loop.is_closed():
                return
            if reason := self.look(loop):
                self._end(reason)
                return


@contextmanager
def loading_within(limit_s: float, end: Callable[[str], None] | None = None) -> Iterator[None]:
    """Around the loading of a model: ends the process if that takes longer, for Serve waits however long it takes.

    Args:
        limit_s: longest time.
        end: as of `Watchdog`.
    """
    reason = f"its judge has not loaded within {limit_s:.0f} s"
    timer = threading.Timer(limit_s, end or end_process, [reason])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_process(reason: str) -> None:
    """Ends this process at once, with every thread's stack in its log."""
    logger.error("this replica is stuck and ends itself: %s", reason)
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    os._exit(EXIT_STUCK)


def _stack(thread: int) -> tuple[tuple[int, int], ...]:
    """Where a thread stands: its innermost frames and the instruction each is at."""
    frame = sys._current_frames().get(thread)
    places = []
    while frame is not None and len(places) < MAX_FRAMES:
        places.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return tuple(places)
