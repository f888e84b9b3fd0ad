"""Breaking running judges on purpose: what kills, hangs, floods and talks nonsense, and what became of every question.

Everything follows from a seed, which is printed when a check fails. Used by `tests/faults` and by whoever wants to know
how his own judge fares; needs Ray, so it is not imported with the rest of the room.
"""

import asyncio
import ctypes
import gc
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from rlvlm.errors import JudgeUnavailable
from rlvlm.judges.config import JudgeConfig
from rlvlm.types import Clip, Label, Query, Score, Stamp, Status, Verdict

Hang = Literal["sleep", "gil", "loop", "stop"]
"""sleep: the model's thread waits for ever; gil: it never gives the interpreter back; loop: every event loop of the
process is blocked; stop: SIGSTOP."""


@dataclass(kw_only=True, slots=True)
class FaultReport:
    """What a run of chaos did and what became of the questions; `write` makes one JSON file of it."""

    name: str
    seed: int
    faults_injected: int = 0
    asked: int = 0
    survived: int = 0
    """Questions with exactly one answer, and that the right one."""
    lost: int = 0
    """Questions without an answer."""
    duplicated: int = 0
    """Questions with more than one answer."""
    wrong: int = 0
    """Questions whose answer belongs to another, or is none of those allowed."""
    recovery_s: list[float] = field(default_factory=list)
    """From each fault until all was well again."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further figures by name."""

    def count(self, expected: Sequence[Verdict], answers: Sequence[Sequence[Verdict]]) -> None:
        """Counts every question.

        Args:
            expected: the right verdict of each question.
            answers: all verdicts that came for each question.
        """
        for right, got in zip(expected, answers, strict=True):
            self.asked += 1
            self.lost += not got
            self.duplicated += len(got) > 1
            self.wrong += any(verdict.label != right.label or verdict.text != right.text for verdict in got)
            self.survived += len(got) == 1 and got[0].label == right.label and got[0].text == right.text

    def summary(self) -> dict[str, Any]:
        """All figures, the recovery times as percentiles."""
        plain = {key: value for key, value in asdict(self).items() if key not in ("recovery_s", "extra")}
        for share in (50, 99) if self.recovery_s else ():
            plain[f"recovery_p{share}_s"] = round(float(np.percentile(self.recovery_s, share)), 3)
        return plain | self.extra

    def write(self, folder: Path) -> Path:
        """Writes `NAME.json` into `folder` and returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.summary(), indent=2) + "\n")
        return path


class Killer:
    """Sends a signal to a random target every so often, from a thread of its own, while its `with` block lasts.

    Args:
        seed: of the choice of targets and of the times between kills.
        targets: process ids that may be hit now; an empty answer is asked again.
        every_s: mean time between two signals; each is drawn from the half to the one and a half of it.
        sent: SIGKILL or SIGSTOP.
        at_most: signals sent in all.
    """

    def __init__(
        self, seed: int, targets: Callable[[], Sequence[int]], every_s: float, *,
        sent: signal.Signals = signal.SIGKILL, at_most: int = 1_000_000,
    ) -> None:  # fmt: skip
        self._seed = seed
        self._random = random.Random(seed)
        self._targets = targets
        self._every_s = every_s
        self._sent = sent
        self._at_most = at_most
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)
        self.killed: list[tuple[float, int]] = []
        """Monotonic time and process id of every signal."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        if error is not None:
            print(f"chaos: Killer(seed={self._seed}) had sent {len(self.killed)} signals", file=sys.stderr)  # noqa: T201

    def _run(self) -> None:
        while len(self.killed) < self._at_most:
            if self._over.wait(self._every_s * self._random.uniform(0.5, 1.5)):
                return
            targets = sorted(self._targets())
            if targets:
                pid = self._random.choice(targets)
                if send(pid, self._sent):
                    self.killed.append((time.monotonic(), pid))


class StubJudge:
    """A judge whose verdict is a pure function of the pictures, with faults on demand.

    The label and the text follow from the SHA-256 of the question, so a lost, doubled or swapped answer is provable.

    Args:
        latency_s: time per batch.
        per_item_s: and per question.
        trap: folder; a file `hang-KIND` in it makes the first judge that sees it hang that way, once.
        broken: message of the error with which it refuses to be built; empty builds it.
    """

    def __init__(self, latency_s: float = 0.0, per_item_s: float = 0.0, trap: str = "", broken: str = "") -> None:
        if broken == "exit":
            os._exit(3)
        if broken == "unavailable":
            raise JudgeUnavailable("the weights are made of cheese", "fetch them from the moon")
        if broken:
            raise RuntimeError(broken)
        self._latency_s = latency_s
        self._per_item_s = per_item_s
        self._trap = trap

    @property
    def stamp(self) -> Stamp:
        """Always the same."""
        return Stamp(judge="stub", revision="1", prompt="hash/1", decoding="")

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
        return Verdict(status=Status.OK, label=label, stamp=self.stamp, text=mark.hex())

    def _think(self, count: int) -> None:
        for kind in ("sleep", "gil", "loop", "stop") if self._trap else ():
            if _spring(Path(self._trap) / f"hang-{kind}"):
                hang(kind)
        end = time.monotonic() + self._latency_s + count * self._per_item_s
        while time.monotonic() < end:
            time.sleep(min(0.05, max(0.0, end - time.monotonic())))


def stub(**settings: Any) -> Callable[[JudgeConfig], StubJudge]:
    """A builder for `start_judge` that makes a `StubJudge` of these settings inside each replica."""
    return partial(_make_stub, settings)


def _make_stub(settings: dict[str, Any], config: JudgeConfig) -> StubJudge:
    return StubJudge(**settings)


def stub_queries(count: int, seed: int, goal: str = "open the drawer") -> list[Query]:
    """Different questions with tiny random pictures."""
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


def replica_pids(app: str) -> list[int]:
    """Process ids of the app's replicas that Serve counts as running."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "Serve runs when its replicas are asked for"
    details = client.get_serve_details()["applications"].get(app, {"deployments": {}})
    replicas = [replica for deployment in details["deployments"].values() for replica in deployment["replicas"]]
    return sorted(replica["pid"] for replica in replicas if replica["state"] == "RUNNING" and replica["pid"])


def send(pid: int, sent: signal.Signals) -> bool:
    """Whether the signal reached a process."""
    try:
        os.kill(pid, sent)
    except ProcessLookupError:
        return False
    return True


def exists(pid: int) -> bool:
    """Whether the process is there, a zombie not counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds: Callable[[], bool], within_s: float, what: str) -> float:
    """Seconds until `holds` did.

    Raises:
        TimeoutError: it did not within `within_s`.
    """
    start = time.monotonic()
    while not holds():
        if time.monotonic() - start > within_s:
            raise TimeoutError(f"{what}: not within {within_s:g} s")
        time.sleep(0.1)
    return time.monotonic() - start


def garbage(count: int, seed: int) -> Iterable[str]:
    """Answers that no label or number can be read from for certain, and some from which one nearly can."""
    rng = random.Random(seed)
    for _ in range(count):
        yield "".join(rng.choice(_PIECES) + rng.choice(["", " ", "\n"]) for _ in range(rng.randrange(0, 12)))


_PIECES = (
    *("0", "1", "-1", "50", "100", "%", "10", "0.5", "1e9", "nan", "inf", "2", "-0", "+1", "0x1", "0/1", "1)", "1."),
    *("<think>", "</think>", "<|im_end|>", "<answer>", "</answer>", "\\boxed{", "}", "label:", "Answer:", "**1**"),
    *("The first picture", "neither", "both", "?", "-", "\u2212", "\u0661", "\u00bd", "\u7b2c\u4e00", "\u0635"),
    *("\n", "\x00", " ", "\u202e", "\ud800", "\U0001f642", "9" * 400, "a" * 3000),
)


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
