"""Does a learned value of judged outcomes help, how wrong may the judge be, and does it save questions?

    python benchmarks/credit.py --out credit.csv                       # all of the grid: many hours
    python benchmarks/credit.py --out credit.csv --judges "fp .3" --only push_block --seeds 1
    python benchmarks/credit.py --out credit.csv --report credit.png   # table and figure of the rows so far

Goes on where it was stopped: a row that is in the file is not made again. Every run is asked about each episode once.
Expectations stand in docs/experiments/credit.md and were written before the first run. What a value is worth to
recorded data: benchmarks/labelled_starts.py.
"""

import csv
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

TASKS = {
    "push_block": "--steps 200000 --eval.every-steps 20000",
    "number_line": "--steps 10240 --eval.every-steps 1024 --algo.rollout-turns 0 --reward.per episode --sft.updates 30",
}
"""Options of a run. Whole episodes in groups in both, so that turns can be compared; the shorter start of `number_line`
solves half of its episodes, that of its recipe all."""
METHODS = {
    "outcome, episodes": "--algo.advantage.estimator rloo",
    "outcome, turns": "--algo.advantage.estimator rloo_turns",
    "value": "--algo.advantage.estimator rloo_turns --reward.shaping value --reward.no-corrects-noise",
    "value, corrected": "--algo.advantage.estimator rloo_turns --reward.shaping value",
}
"""What is learned from: the outcome as an episode's advantage, the same compared turn by turn, and with shaping."""
_WRONG = {"fp 0": (0, 0), "fp .1": (0.1, 0), "fp .3": (0.3, 0), "fn .1": (0, 0.1), "fn .3": (0, 0.3)}
JUDGES = {
    name: f"--reward.teacher biased --reward.false-positives {false} --reward.false-negatives {missed}"
    for name, (false, missed) in _WRONG.items()
} | {
    name: f"--judge.backend rlvlm.plugins.known_judges.pixel_truth:{name} --judge.image-px 144 --judge.score success "
    "--judge.faulty ok --reward.threshold 0.5"
    for name in ("best_near", "hand_at_pad")
}
"""Judges whose errors are by chance, and two whose errors a policy can seek, which know `push_block` alone."""
COLUMNS = ("task", "judge", "method", "seed", "success", "questions", "seconds", "curve")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Part of the grid to make, or the report."""

    out: Path = Path("credit.csv")
    """Rows are added to it."""
    only: tuple[str, ...] = tuple(TASKS)
    """Tasks."""
    judges: tuple[str, ...] = tuple(JUDGES)
    """Judges."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Methods."""
    seeds: int = 3
    """Seeds of each run."""
    run: str = ""
    """Further options of every run, e.g. --run="--steps 2000"."""
    hours: float = 3.0
    """Time after which no further row is begun."""
    report: Path | None = None
    """Only prints the table of the rows there are, and draws them into this PNG."""
    goal: float = 0.9
    """True success whose steps and questions the table counts."""


def train(task: str, judge: str, method: str, seed: int, more: str) -> dict[str, float | str]:
    """Returns the mean true success of the evaluations in the last fifth of a run, and all of them with the env steps
    and the questions until then.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = f"{TASKS[task]} --reward.source judged {METHODS[method]} {JUDGES[judge]} --seed {seed} {more}"
        words = ["rlvlm.run", task, *options.split(), "--out", f"{folder}/run"]
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} failed: {done.stderr[-2_000:]}")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        with (Path(folder) / "run" / "vlm_score_log.csv").open(newline="") as file:
            asked = np.array([float(row["env_step"]) for row in csv.DictReader(file)])
    evaluated = [(row["env_steps"], row["eval/success_at_end"]) for row in rows if "eval/success_at_end" in row]
    late = [success for step, success in evaluated if step >= 0.8 * evaluated[-1][0]]
    curve = [[step, int((asked <= step).sum()), round(success, 4)] for step, success in evaluated]
    return {"success": round(float(np.mean(late)), 4), "questions": len(asked), "curve": json.dumps(curve)}


def read(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a file; empty if there is none."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def until(goal: float, curve: str) -> tuple[float, float]:
    """Returns env steps and questions until the first evaluation of `goal` or more; NaN if there is none."""
    return next(((steps, asked) for steps, asked, success in json.loads(curve) if success >= goal), (math.nan,) * 2)


def report(rows: Sequence[dict[str, str]], path: Path, goal: float) -> None:
    """Prints mean and range over seeds of each cell, and draws success by judge, a colour for each method."""
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    figure = Figure(figsize=(6 * max(len(tasks), 1), 4), layout="constrained")
    panels = figure.subplots(1, max(len(tasks), 1), squeeze=False)[0]
    sys.stdout.write(f"task, judge, method, seeds, success (range), steps and questions to {goal}\n")
    for task, axes in zip(tasks, panels, strict=True):
        judges = [judge for judge in JUDGES if any((row["task"], row["judge"]) == (task, judge) for row in rows)]
        for method in METHODS:
            points = []
            for place, judge in enumerate(judges):
                own = [row for row in rows if (row["task"], row["judge"], row["method"]) == (task, judge, method)]
                if not own:
                    continue
                success = [float(row["success"]) for row in own]
                points.append((place, np.mean(success)))
                # a seed that did not get there has no number, so neither has their mean
                reached = [f"{mean:,.0f}" for mean in np.mean([until(goal, row["curve"]) for row in own], axis=0)]
                spread = f"{np.mean(success):.2f} ({min(success):.2f} to {max(success):.2f})"
                sys.stdout.write(f"{task}, {judge}, {method}, {len(own)}, {spread}, {', '.join(reached)}\n")
            if points:
                axes.plot(*np.transpose(points), "o", label=method)
        axes.set(title=task, ylim=(-0.02, 1.02), xticks=range(len(judges)), xticklabels=judges)
        axes.tick_params(axis="x", labelrotation=20)
        axes.legend(fontsize=8)
    figure.savefig(path)


def main(settings: Settings) -> None:
    """Makes what is missing of the grid, one row after the other, a whole seed first."""
    if settings.report is not None:
        report(read(settings.out), settings.report, settings.goal)
        return
    began = time.time()
    done = {(row["task"], row["judge"], row["method"], int(row["seed"])) for row in read(settings.out)}
    if not settings.out.exists():
        settings.out.write_text(",".join(COLUMNS) + "\n")
    for seed, task, judge, method in product(
        range(settings.seeds), settings.only, settings.judges, settings.methods
    ):  # fmt: skip
        of_blocks = not JUDGES[judge].startswith("--reward.teacher")
        if (task, judge, method, seed) in done or (of_blocks and task != "push_block"):
            continue
        if time.time() - began > 3_600 * settings.hours:
            return
        start = time.time()
        row = {"task": task, "judge": judge, "method": method, "seed": seed}
        row |= train(task, judge, method, seed, settings.run) | {"seconds": round(time.time() - start)}
        with settings.out.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)


if __name__ == "__main__":
    main(tyro.cli(Settings))
