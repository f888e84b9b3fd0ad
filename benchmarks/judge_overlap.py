"""Time that the loop waits for labels, by cause: `python benchmarks/judge_overlap.py`.

Holds feedback sessions as a default run of drawer_open does: pairs of real episodes, drawn, sent to the pocket judge on
Serve, answered, stored. Prints, per session size, how long the loop waits, the share of it in which the judge computes,
and how long it waits when the labels may arrive one session late while something else keeps the learner busy.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from rlvlm.algorithms.sac_pebble.algorithm import SACPebbleConfig
from rlvlm.algorithms.sac_pebble.runner import StepEnvRunner
from rlvlm.core.steps import Trajectory
from rlvlm.envs.images import FrameStore
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.envs.registry import make_env
from rlvlm.judges.cache import CachedJudge
from rlvlm.labels.store import LabelStore
from rlvlm.preferences.asking import Session, TeacherQueue
from rlvlm.preferences.queries import draw_pairs
from rlvlm.preferences.teachers import JudgeTeacher
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.start.ray_session import ray_session
from rlvlm.serving.apps import start_judge

SIZES = (20, 100, 400)
BUSY_S = 6.0
"""How long the learner works between sessions in the second part: less than the 2,000 steps of a default run take."""


def episodes(num: int) -> list[Trajectory]:
    """Random play, some of it with an open drawer."""
    runner = StepEnvRunner(config=SACPebbleConfig().settings(task="drawer_open", env_settings=MetaWorldConfig()))
    return [episode for _ in range(num) for episode in runner.sample(num_steps=250, random_actions=True).episodes]


def sessions(found: list[Trajectory], size: int, rounds: int) -> list[Session]:
    """Fresh questions for every round."""
    rng = np.random.default_rng(size)
    return [
        Session(number=number, env_steps=0, questions=draw_pairs(found, size, 1, rng), num_look_alike=0)
        for number in range(rounds)
    ]


def judge_s(answered: Session) -> float:
    """Seconds in which the judge computed: one share per batch, told apart by their times."""
    return sum({verdict.latency_s for verdict in answered.answers})


def hold_ahead(asking: TeacherQueue, found: list[Trajectory], size: int, rounds: int) -> list[Session]:
    """Holds `rounds` sessions with other work after each; two more at either end are left out."""
    answered: list[Session] = []
    for session in sessions(found, size, rounds + 2):
        answered += asking.put(session)
        end = time.monotonic() + BUSY_S
        while time.monotonic() < end:
            torch.randn(256, 256) @ torch.randn(256, 256)
    return (answered + asking.finish())[1 : rounds + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    run, result = recipe("drawer_open"), {"machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    found = episodes(40)
    viewer = make_env("drawer_open", MetaWorldConfig(), 0)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(ray_session())
        running = stack.enter_context(start_judge(run.judge, run.serve, name="overlap"))

        def teacher() -> JudgeTeacher:
            """With nothing remembered, so that every question reaches the judge."""
            judge = CachedJudge(running, LabelStore(Path(tempfile.mkdtemp(dir=folder))))
            return JudgeTeacher(judge, FrameStore(viewer, run.judge.image_px, capacity=256), viewer.goal)

        for size in SIZES:
            held = [
                TeacherQueue(teacher(), ahead=False).put(session)[0] for session in sessions(found, size, rounds + 1)
            ][1:]
            result[f"{size} queries"] = {
                "wait_s": round(statistics.median(session.wait_s for session in held), 3),
                "judge_busy": round(statistics.median(judge_s(session) / session.wait_s for session in held), 3),
            }
        held = hold_ahead(TeacherQueue(teacher(), ahead=True), found, 100, rounds)
        result["100 queries, one session late"] = {
            "wait_s": round(statistics.median(session.wait_s for session in held), 4)
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
