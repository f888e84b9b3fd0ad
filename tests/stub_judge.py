"""A judge whose every answer is known beforehand, and that is slow, hangs or refuses to start on demand.

Made inside replicas by `tests/faults` and by whoever breaks his own service with `chaos`.
"""

import asyncio
import ctypes
import gc
import hashlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.judges.config import JudgeConfig

Hang = Literal["sleep", "gil", "loop", "stop"]
"""sleep: the model's thread waits for ever; gil: it never gives the interpreter back; loop: every event loop of the
process is blocked; stop: SIGSTOP."""


WHO = "say who answers"
"""Goal of a question whose answer carries the id of the process that gave it."""


class StubJudge:
    """A judge whose verdict is a pure function of the images, with faults on demand.

    The label and the text follow from the SHA-256 of the question, so a lost, doubled or swapped answer is provable.

    Args:
        latency_s: time per batch.
        per_item_s: and per question.
        trap: folder; a file `hang-KIND` in it makes the first judge that sees it hang that way, once. A judge looks
            from its second batch on: the first is the probe with which a replica starts, and one that hangs in its
            start is another fault.
        broken: message of the error with which it refuses to be built; empty builds it.
        name: backend and model that it says it is.
    """

    def __init__(
        self, latency_s: float = 0.0, per_item_s: float = 0.0, trap: str = "", broken: str = "", name: str = "stub"
    ) -> None:
        if broken == "exit":
            os._exit(3)
        if broken == "unavailable":
            raise JudgeUnavailable("the weights are made of cheese", "fetch them from the moon")
        if broken:
            raise RuntimeError(broken)
        self._latency_s = latency_s
        self._per_item_s = per_item_s
        self._trap = trap
        self._name = name
        self._was_asked = False

    @property
    def stamp(self) -> Stamp:
        """Always the same."""
        return Stamp(judge=self._name, revision="1", prompt="hash/1", decoding="")

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order."""
        self._think(len(queries))
        return [self.verdict(query) for query in queries]

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order."""
        self._think(len(clips))
        values = [_fingerprint(clip.goal, clip.frames)[0] / 255 for clip in clips]
        return [Score(status=Status.OK, value=value, stamp=self.stamp) for value in values]

    def verdict(self, query: Query) -> Verdict:
        """The one right answer."""
        mark = _fingerprint(query.goal, query.left, query.right)
        label = Label.RIGHT if mark[0] % 2 else Label.LEFT
        text = str(os.getpid()) if query.goal == WHO else mark.hex()
        return Verdict(status=Status.OK, label=label, stamp=self.stamp, text=text)

    def _think(self, count: int) -> None:
        for kind in ("sleep", "gil", "loop", "stop") if self._trap and self._was_asked else ():
            if _spring(Path(self._trap) / f"hang-{kind}"):
                hang(kind)
        self._was_asked = True
        end = time.monotonic() + self._latency_s + count * self._per_item_s
        while time.monotonic() < end:
            time.sleep(min(0.05, max(0.0, end - time.monotonic())))


def stub(**settings: Any) -> Callable[[JudgeConfig], StubJudge]:
    """A builder for `start_judge` that makes a `StubJudge` of these settings inside each replica."""
    return partial(_make_stub, settings)


def _make_stub(settings: dict[str, Any], config: JudgeConfig) -> StubJudge:
    return StubJudge(**settings)


def stub_queries(count: int, seed: int, goal: str = "open the drawer") -> list[Query]:
    """Different questions with tiny random images."""
    frames = np.random.default_rng(seed).integers(0, 256, (count, 2, 1, 8, 8, 3), np.uint8)
    return [Query(goal=goal, left=left, right=right) for left, right in frames]


def set_trap(folder: Path, kind: Hang) -> float:
    """Makes the next `StubJudge` that thinks with this `trap` hang; returns the time, monotonic."""
    (folder / f"hang-{kind}").touch()
    return time.monotonic()


def hang(kind: Hang) -> None:
    """Hangs this thread or process, for an hour or until it is killed."""
    if kind == "gil":
        ctypes.PyDLL(None).sleep(3600)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "loop":
        futures = [one for one in gc.get_objects() if issubclass(type(one), asyncio.Future)]
        for loop in {future.get_loop() for future in futures}:  # uvloop's loops hide from the collector
            if not loop.is_closed():
                loop.call_soon_threadsafe(time.sleep, 3600)
    else:
        time.sleep(3600)


def _spring(trap: Path) -> bool:
    """Whether this caller took the trap away; of several only one does."""
    try:
        trap.unlink()
    except FileNotFoundError:
        return False
    return True


def _fingerprint(goal: str, *clips: Any) -> bytes:
    content = hashlib.sha256(goal.encode())
    for clip in clips:
        content.update(np.ascontiguousarray(clip).data)
    return content.digest()[:8]
