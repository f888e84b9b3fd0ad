"""Memory and time per step at the start and the end of a million env steps: `python benchmarks/growth.py`.

The run is `drawer_open` as a user would start it (served pocket judge, image reward model, replay, relabelling), but
for the policy, which stays random, and SAC's updates, which are left out: they cost the same at every age of a run and
would make it last for hours. Prints one line per 50,000 steps and a summary as JSON. CPU seconds are those of the
process that acts, labels and learns; memory is the proportional share (PSS) of all processes together.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from rlvlm.algorithms.sac_pebble.algorithm import SACPebble
from rlvlm.core import metrics
from rlvlm.core.memory import MemoryWatch, release_free_memory, tree_memory_mb
from rlvlm.labels.store import LabelStore
from rlvlm.runs.settings.config import RunConfig
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.start.build import open_algorithm
from rlvlm.runs.start.placement import held_places
from rlvlm.runs.start.ray_session import ray_session
from rlvlm.runs.train import judge_session

WINDOW = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What 50,000 steps cost."""

    env_steps: int
    cpu_s: float
    session_s: float
    """Seconds of these in feedback sessions."""
    tree_mb: float

    @property
    def step_ms(self) -> float:
        """CPU time per step, sessions included."""
        return self.cpu_s / WINDOW * 1e3

    @property
    def plain_step_ms(self) -> float:
        """CPU time per step outside of sessions."""
        return (self.cpu_s - self.session_s) / WINDOW * 1e3


def config(steps: int) -> RunConfig:
    """The default run, at random for its whole length."""
    usual = recipe("drawer_open")
    return replace(usual, steps=steps, algo=replace(usual.algo, seed_steps=steps))


def windows(algorithm: SACPebble, steps: int) -> Iterator[Window]:
    """Trains to `steps` and tells of every window as it ends."""
    own = psutil.Process()
    hold, session_s = algorithm._learn_reward, [0.0]

    def timed_session() -> None:
        started = time.process_time()
        hold()
        session_s[0] += time.process_time() - started

    algorithm._learn_reward = timed_session
    while algorithm.env_steps < steps:
        cpu_before, session_s[0] = sum(own.cpu_times()[:2]), 0.0
        end = algorithm.env_steps + WINDOW
        while algorithm.env_steps < end:
            algorithm.train()
            if algorithm.drain_records():
                release_free_memory()
        yield Window(
            env_steps=algorithm.env_steps,
            cpu_s=sum(own.cpu_times()[:2]) - cpu_before,
            session_s=session_s[0],
            tree_mb=tree_memory_mb(),
        )


def shares() -> dict[str, int]:
    """PSS in MiB of every process of the run, by name."""
    own = psutil.Process()
    found: dict[str, int] = {}
    for process in (own, *own.children(recursive=True)):
        name = process.name() if process.pid != own.pid else "driver"
        found[name] = found.get(name, 0) + process.memory_full_info().pss // 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    logging.disable(logging.WARNING)
    run = config(steps)
    done: list[Window] = []
    with ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory())
        memory = stack.enter_context(MemoryWatch(0.0))
        stack.enter_context(ray_session())
        open_store = partial(LabelStore, Path(store) / "labels")
        places = stack.enter_context(held_places(run, logging.info))
        make_judge = stack.enter_context(judge_session(run, open_store, Path(store) / "spent", places))
        algorithm = stack.enter_context(open_algorithm(run, make_judge, places))
        for window in windows(algorithm, steps):
            done.append(window)
            print(
                f"{window.env_steps:>9,} steps  {window.step_ms:.3f} ms a step, {window.plain_step_ms:.3f} outside "
                f"of sessions  {window.tree_mb:,.0f} MB",
                flush=True,
            )
        by_process, asked = shares(), algorithm.report()[metrics.QUERIES]
    early, late = done[1] if len(done) > 1 else done[0], statistics.fmean([w.step_ms for w in done[-2:]])
    late_plain = statistics.fmean([w.plain_step_ms for w in done[-2:]])
    print(
        json.dumps(
            {
                "steps": steps,
                "peak_mb": round(memory.peak_mb),
                "mb_by_process": by_process,
                "queries": asked,
                "step_ms_50k_to_100k": round(early.step_ms, 3),
                "step_ms_last_100k": round(late, 3),
                "ratio": round(late / early.step_ms, 3),
                "ratio_outside_sessions": round(late_plain / early.plain_step_ms, 3),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
