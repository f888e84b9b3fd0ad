"""Seconds until a run's first step, and the processor time of its processes, of several checkouts by turns.

    python benchmarks/start_up.py number_line push_block drawer_open --roots . ../older --runs 5

Each run is begun with --smoke and ended at its first line of training. A round before the first fills the disk's caches
and is not counted. Prints medians of what was counted.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

MARKS = ("starting Ray", "training in")


@dataclass(frozen=True, kw_only=True)
class Config:
    tasks: tyro.conf.Positional[list[str]]
    roots: tuple[Path, ...] = (Path(),)
    """Checkouts of rlvlm."""
    runs: int = 5


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    found: dict[tuple[str, Path, str], list[tuple[float, float]]] = {}
    for number in range(config.runs + 1):
        for task in config.tasks:
            for root in config.roots[:: (-1) ** number]:
                for mark, spent in start(task, root.resolve()).items():
                    if number:
                        found.setdefault((task, root, mark), []).append(spent)
    for (task, root, mark), spent in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*spent, strict=True))
        print(f"{task}, {root}, {mark}: {wall:.1f} s, {cpu:.1f} s of processor time, {len(spent)} runs")


def start(task: str, root: Path) -> dict[str, tuple[float, float]]:
    """Wall and processor seconds by the line that they lead to."""
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-u", "-m", "rlvlm.run", task, "--smoke", "--out", f"{folder}/run"]
        began, marks, processes = time.monotonic(), {}, dict[int, float]()
        child = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            with suppress(psutil.Error):
                parent = psutil.Process(child.pid)
                for process in (parent, *parent.children(recursive=True)):
                    processes[process.pid] = sum(process.cpu_times()[:2])
            marks |= {mark: (time.monotonic() - began, sum(processes.values())) for mark in MARKS if mark in line}
            if MARKS[-1] in line:
                break
        child.send_signal(signal.SIGTERM)
        child.wait(300)
    return marks


if __name__ == "__main__":
    main()
