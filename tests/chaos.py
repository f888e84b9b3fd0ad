"""Breaking running judges on purpose: what kills, waits and talks nonsense, and what became of every question.

Everything follows from a seed, which is printed when a check fails. Used by `tests/faults` and by whoever wants to know
how his own judge fares; needs Ray, so it is not imported with the rest of the room. The judge that hangs on demand is
`stub_judge`'s.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil

from rlvlm.core.judging import Verdict

PATIENCE_S = 400.0
"""A bound for what comes back by itself, below that of a test: a process that starts while thirty others want the same
two cores takes minutes.
"""


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
        self,
        seed: int,
        targets: Callable[[], Sequence[int]],
        every_s: float,
        *,
        sent: signal.Signals = signal.SIGKILL,
        at_most: int = 1_000_000,
    ) -> None:
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


def replica_pids(app: str) -> list[int]:
    """Process ids of the app's replicas that Serve counts as running and that are there.

    Serve counts a killed replica until its next check, up to a second later.
    """
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "Serve runs when its replicas are asked for"
    details = client.get_serve_details()["applications"].get(app, {"deployments": {}})
    replicas = [replica for deployment in details["deployments"].values() for replica in deployment["replicas"]]
    pids = [replica["pid"] for replica in replicas if replica["state"] == "RUNNING" and replica["pid"]]
    return sorted(filter(exists, pids))


def pids_below(parent: psutil.Process, word: str) -> list[int]:
    """Process ids of the processes below `parent` whose command line has `word`."""
    found = []
    for process in parent.children(recursive=True):
        try:
            found += [process.pid] if word in " ".join(process.cmdline()) else []
        except psutil.Error:  # it has just ended
            continue
    return found


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


def wait_until(holds: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> float:
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
    *("The first image", "neither", "both", "?", "-", "\u2212", "\u0661", "\u00bd", "\u7b2c\u4e00", "\u0635"),
    *("\n", "\x00", " ", "\u202e", "\ud800", "\U0001f642", "9" * 400, "a" * 3000),
)
