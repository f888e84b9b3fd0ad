"""Trains with simulated judges of known quality, and writes the curve that `rlvlm judge-bench` predicts from.

    python benchmarks/judge_quality.py --out quality.csv                     # all of the grid: hours
    python benchmarks/judge_quality.py --out quality.csv --only number_line --seeds 1 --points 1

Goes on where it was stopped: a row that is in the file is not run again. Copied to rlvlm/judge_bench/quality.csv, the
rows ship; `--curve quality.csv` takes them from where they are. A judge of comparisons is right in `accuracy` of its
decided answers whatever the difficulty, `undecided` in so many, and names the left side in `left` of them without
looking. A judge of episodes calls `false_positives` of failures successes and misses `misses` of the successes.
"""

import csv
import itertools
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from rlvlm.judge_bench.prediction import COLUMNS, SHARES, read_curve, worth_of
from rlvlm.pages.bench_charts import draw_success
from rlvlm.pages.charts import save

PAIRS = [
    {"accuracy": accuracy, "undecided": undecided, "left": left}
    for accuracy, undecided, left in (
        (0.5, 0.0, 0.0),
        (0.6, 0.0, 0.0),
        (0.65, 0.5, 0.0),
        (0.75, 0.5, 0.3),
        (0.7, 0.0, 0.0),
        (0.8, 0.0, 0.0),
        (0.85, 0.0, 0.3),
        (0.9, 0.5, 0.0),
        (0.9, 0.0, 0.0),
        (1.0, 0.0, 0.0),
    )
]
SCORES = [
    {"false_positives": false, "misses": misses}
    for false, misses in (
        (0.5, 0.5),
        (0.4, 0.5),
        (0.6, 0.2),
        (0.2, 0.5),
        (0.4, 0.2),
        (0.2, 0.2),
        (0.4, 0.0),
        (0.1, 0.0),
        (0.0, 0.0),
    )
]
TASKS: dict[str, tuple[str, list[dict[str, float]], str]] = {
    "drawer_open": (
        "pairs",
        PAIRS,
        "--steps 20000 --feedback.queries 800 --feedback.max-queries 9600 --algo.hidden 128 128 --algo.batch-size 128 "
        "--algo.is-calibrated --reward.teacher measured --feedback.measured",
    ),
    "number_line": (
        "scores",
        SCORES,
        "--steps 5120 --reward.source judged --reward.per episode --reward.teacher measured --reward.measured",
    ),
    "push_block": (
        "scores",
        SCORES,
        "--steps 600000 --reward.source judged --reward.teacher measured --reward.measured",
    ),
}
"""What is asked, the grid, and the options before the file of the judge's table. drawer_open has the settings that
docs/results.md gives for labels that are often wrong; the other two a length that a judge without mistakes needs."""
_JUDGE = COLUMNS[:7]
"""The columns that say which judge taught which task."""
_ROWS = 1_000
"""Answers that shares are written as."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which part of the grid is run."""

    out: Path = Path("judge_quality.csv")
    """Rows are added to it."""
    only: tuple[str, ...] = tuple(TASKS)
    """Tasks."""
    seeds: int = 3
    """Seeds of each point."""
    points: int | None = None
    """Points of each task's grid, drawn at random, always the same; None runs all."""
    run: tuple[str, ...] = ()
    """Further options of every run, e.g. --run --steps 20000."""
    plot: Path | None = None
    """Only draws the rows there are, as PNG."""


def pair_table(accuracy: float, undecided: float, left: float) -> list[list[list[float]]]:
    """[10, 2, 3] as `judge_bench.figures.teacher_table` counts them."""
    decided = 1 - undecided
    looks = (1 - left) * accuracy
    right = {"left": decided * (looks + left), "right": decided * looks}
    row = [[round(_ROWS * one, 3) for one in (right[s], decided - right[s], undecided)] for s in ("left", "right")]
    return [row] * 10


def score_table(false_positives: float, misses: float) -> list[list[float]]:
    """[11] scores, 1 or 0, by progress."""
    failures = [1.0] * round(100 * false_positives) + [0.0] * (100 - round(100 * false_positives))
    return [failures] * 10 + [[0.0] * round(100 * misses) + [1.0] * (100 - round(100 * misses))]


def run(task: str, kind: str, judge: dict[str, float], seed: int, more: tuple[str, ...]) -> dict[str, Any] | None:
    """The row of one run; None where it failed, which the log says."""
    table: Any = pair_table(**judge) if kind == "pairs" else score_table(**judge)
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "bench.json", Path(folder) / "run"
        file.write_text(json.dumps({"teacher": {"all": {kind: table}}}))
        words = [*TASKS[task][2].split(), str(file), "--seed", str(seed), "--out", str(out), *more]
        done = subprocess.run([sys.executable, "-m", "rlvlm.run", task, *words], capture_output=True, text=True)
        if done.returncode:
            sys.stderr.write(f"{task} {judge} seed {seed} failed: {done.stderr[-2_000:]}\n")
            return None
        before, success = successes(out)
    worth = worth_of(*SHARES[kind](table))
    return {"task": task, "kind": kind, **judge, "worth": round(worth, 4), "seed": seed} | {
        "before": round(before, 4),
        "success": round(success, 4),
    }


def successes(run_folder: Path) -> tuple[float, float]:
    """Success at the end of episodes, before training and as the mean over evaluations in its last fifth.

    Of a policy that samples, as it samples: greedy success of small models moves in steps.
    """
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    found = [
        (row["env_steps"], row.get("eval/sampled_success", row["eval/success_at_end"]))
        for row in rows
        if "eval/success_at_end" in row
    ]
    last = found[-1][0]
    late = [success for step, success in found if step >= 0.8 * last]
    return found[0][1], sum(late) / len(late)


def main(settings: Settings) -> None:
    """Runs what is missing of the grid, one run after the other."""
    if settings.plot is not None:
        save(draw_success(read_curve(settings.out)), settings.plot)
        return
    done = set()
    if settings.out.exists():
        with settings.out.open(newline="") as file:
            done = {tuple(row[name] for name in _JUDGE) + (row["seed"],) for row in csv.DictReader(file)}
    else:
        settings.out.write_text(",".join(COLUMNS) + "\n")
    for seed, task in itertools.product(range(settings.seeds), settings.only):  # a whole grid of one seed first
        kind, grid, _ = TASKS[task]
        for judge in random.Random(0).sample(grid, settings.points) if settings.points else grid:
            known = {"task": task, "kind": kind, **judge}
            if (*(str(known.get(name, "")) for name in _JUDGE), str(seed)) in done:
                continue
            row = run(task, kind, judge, seed, settings.run)
            if row is not None:
                with settings.out.open("a", newline="") as file:
                    csv.writer(file).writerow([row.get(name, "") for name in COLUMNS])
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
