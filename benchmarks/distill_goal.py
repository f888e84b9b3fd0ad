"""Measures whether a pocket judge can learn a preference it does not have: `python -m benchmarks.distill_goal`

The shipped pocket judge knows one goal, and asked to close the drawer still prefers the open one. The store made here
holds labels of an oracle for "close the drawer" on drawn scenes; the pupil that is distilled from it is asked through
the same code as in a run. Prints one JSON object.
"""

import argparse
import json
import logging
import os
import resource
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from pocket_models.scenes import collect_scenes, draw_uniform_pairs, label_of
from rlvlm.core.judging import Label, Query, Stamp, Status, Verdict
from rlvlm.judge_bench.items import draw_gap_pairs
from rlvlm.labels.records import Origin, Truth, describe
from rlvlm.labels.store import LabelStore
from rlvlm.plugins.distill.config import DistillConfig
from rlvlm.plugins.distill.training import distill

GOAL = "close the drawer"
ORACLE = Stamp(judge="oracle:progress", revision="1", prompt="", decoding="")
LABELS = {0: Label.LEFT, 1: Label.RIGHT, -1: Label.TIE}


def fill(store: LabelStore, num_labels: int, seed: int) -> None:
    """Half of the pairs uniform over frames, half over gaps of all sizes."""
    rng = np.random.default_rng(seed)
    scenes = next(collect_scenes("drawer_open", "train", seed))
    half = num_labels // 2
    gaps = (rng.random(num_labels - half) * rng.choice([-1, 1], num_labels - half)).astype(np.float32)
    pairs = np.concatenate([draw_uniform_pairs(scenes, half, rng), draw_gap_pairs(scenes.progress, gaps, rng)])
    closed = 1 - scenes.progress
    for part in np.array_split(pairs, len(pairs) // 100 + 1):
        described = [
            describe(Query(goal=GOAL, left=scenes.images[[left]], right=scenes.images[[right]])) for left, right in part
        ]
        answers = []
        for left, right in part:
            label = LABELS[label_of(float(closed[left]), float(closed[right]))]
            status = Status.NO_PREFERENCE if label is Label.TIE else Status.OK
            answers.append(Verdict(status=status, label=label, stamp=ORACLE))
        store.keep_images([image for _, shown in described for image in shown])
        store.add_answers([(question, answer) for (question, _), answer in zip(described, answers, strict=True)])
        store.add_truths(
            [
                Truth(question=question.id, progress=(float(closed[left]), float(closed[right])))
                for (question, _), (left, right) in zip(described, part, strict=True)
            ]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/distill_goal"))
    parser.add_argument("--labels", type=int, default=2_000)
    parser.add_argument("--steps", type=int, default=DistillConfig().steps)
    parser.add_argument("--lr", type=float, default=DistillConfig().lr)
    parser.add_argument("--start", choices=("shipped", "scratch"), default="shipped")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ.setdefault("MUJOCO_GL", "egl")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    store = given.folder / "labels"
    if not store.exists():
        origin = Origin(run="distill_goal", task="drawer_open", seed=given.seed)
        fill(LabelStore(store, origin), given.labels, given.seed)
    started, busy = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    config = DistillConfig(steps=given.steps, lr=given.lr, start=given.start, seed=given.seed)
    outcome = distill(store, given.folder / f"pupil-{given.start}-{given.steps}", config)
    spent = {"wall_s": time.monotonic() - started, "cpu_s": resource.getrusage(resource.RUSAGE_SELF).ru_utime - busy}
    print(json.dumps(asdict(outcome) | spent, indent=1))


if __name__ == "__main__":
    main()
