"""Which figure of a judge predicts what reinforcement learning does with it?

    python benchmarks/judge_study.py --out study.csv                        # all of the grid: many hours
    python benchmarks/judge_study.py --out study.csv --only push_block --judges truth hand_at_pad --seeds 1
    python benchmarks/judge_study.py --out study.csv --report study.png     # table and figure of the rows so far

Goes on where it was stopped: a row that is in the file is not made again. The judges read pixels, so that they reward
runs as a VLM would. Rows of kind `bench` hold the figures that might predict, rows of kind `run` the true success of a
run. Expectations stand in docs/experiments/judge_study.md and were written before the first run.
"""

import csv
import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rlvlm.judge_bench.figures import rank_correlation
from rlvlm.judge_bench.prediction import SHARES, worth_of

HONEST, PLACE, TRICK, APPEARANCE = FAULTS = "honest", "place of the best", "trick", "appearance"
JUDGES: dict[str, tuple[str, str]] = {
    "truth": ("plugins.known_judges.pixel_truth", HONEST),
    "flips": ("plugins.known_judges.pixel_truth", HONEST),
    "low": ("plugins.known_judges.pixel_truth", HONEST),
    "two_levels": ("plugins.known_judges.pixel_truth", HONEST),
    "distorted": ("plugins.known_judges.pixel_truth", HONEST),
    "best_at_two_thirds": ("plugins.known_judges.pixel_truth", PLACE),
    "best_near": ("plugins.known_judges.pixel_truth", PLACE),
    "alike_from_here": ("plugins.known_judges.pixel_truth", PLACE),
    "half_way": ("plugins.known_judges.pixel_truth", PLACE),
    "inverted": ("plugins.known_judges.pixel_truth", PLACE),
    "hand_at_pad": ("plugins.known_judges.pixel_truth", TRICK),
    "contact": ("plugins.known_judges.pixel_truth", TRICK),
    "wrong_block": ("plugins.known_judges.pixel_truth", TRICK),
    "motion": ("testing.fooled", APPEARANCE),
    "brightness": ("testing.fooled", APPEARANCE),
}
"""Judges, with the module of `rlvlm` and the kind of their fault."""
_BLOCKS_ALONE = ("hand_at_pad", "contact", "wrong_block")
"""Judges that know the things of `push_block` alone."""
GRID = "minigrid/MiniGrid-Empty-Random-6x6-v0"
TASKS: dict[str, tuple[str, str]] = {
    "push_block": ("scores", "--steps 300000 --reward.source judged --reward.monitor.preflight 0"),
    GRID: (
        "scores",
        "--steps 30000 --reward.source judged --reward.per episode --judge.score success --reward.monitor.preflight 0",
    ),
    "drawer_open": (
        "pairs",
        "--steps 40000 --reward.teacher judge --feedback.preflight 0 --feedback.queries 200 "
        "--feedback.max-queries 4000",
    ),
}
"""Kind of question, and options of a run."""
PREDICTORS = {
    "voc": "value-order correlation",
    "accuracy": "accuracy on pairs",
    "auc": "AUC of success",
    "mae": "- mean absolute error",
    "tau": "Kendall's tau",
    "worth": "worth",
    "controls": "- controls called successes",
    "hacked_auc": "AUC against hacked episodes",
    "attempts": "- attempts called successes",
    "line": "- faults on the line to the goal",
    "rehearsal": "- rehearsal's difference",
    "paid": "- failures paid in the rehearsal",
}
"""Figures that might predict, and their titles; in each the better judge has the larger number."""
COLUMNS = (
    "task", "judge", "fault", "kind", "seed", *PREDICTORS, "before", "success", "seconds", "peak", "alarm",
    "alarm_step",
)  # fmt: skip
"""Of runs the last three are the best evaluation, the monitor's alarm, 0 for none, and the step of the first line of
metrics with it; rows made before these columns lack them."""
_RESAMPLES = 2_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Part of the grid to make, or the report."""

    out: Path = Path("judge_study.csv")
    """Rows are added to it."""
    only: tuple[str, ...] = tuple(TASKS)
    """Tasks."""
    judges: tuple[str, ...] = tuple(JUDGES)
    """Judges."""
    seeds: int = 3
    """Seeds of each run."""
    rehearse: int = 800
    """Questions of each rehearsal."""
    run: str = ""
    """Further options of every run, e.g. --run="--steps 2000"."""
    hours: float = 3.0
    """Time after which no further row is begun."""
    report: Path | None = None
    """Only prints the table of the rows there are, and draws them into this PNG."""


def judge_words(judge: str) -> list[str]:
    """Returns the options that choose a judge."""
    return ["--judge.backend", f"rlvlm.{JUDGES[judge][0]}:{judge}", "--judge.image-px", "144"]


def bench(task: str, judge: str, rehearse: int) -> dict[str, Any]:
    """Returns the figures of a judge on a task that might predict; those that its answers do not give are left out."""
    kind = TASKS[task][0]
    with tempfile.TemporaryDirectory() as folder:
        words = ["judge-bench", task, *judge_words(judge), "--rehearse", str(rehearse), "--out", folder]
        _run(["rlvlm.cli", *words])
        row = json.loads((Path(folder) / "bench.json").read_text())
    pairs, scores, named = (row["figures"][name] for name in ("pairs", "scores", "published"))
    false = scores.get("false_positives", {})
    attempts = [false[case]["value"] for case in ("start policy", "disturbed", "without the object") if case in false]
    controls = [part["value"] for case, part in false.items() if part and case in ("reversed", "other goal", "still")]
    faults = [fault["name"] for fault in row["tasks"][task]["faults"]]
    on_line = [name for name in faults if "the goal" in name and any(w in name for w in ("short", "beyond", "near"))]
    rehearsed = next((each for each in row["rehearsals"].get(task, ()) if each["kind"] == kind), {})
    found = {
        "voc": _value(scores.get("voc")),
        "accuracy": _value(pairs.get("accuracy")),
        "auc": _value(scores.get("auc")),
        "mae": -_value(named.get("mae")),
        "tau": _value(named.get("kendall_tau")),
        "worth": worth_of(*SHARES[kind](row["teacher"]["all"][kind])) if kind in row["teacher"]["all"] else math.nan,
        "controls": -float(np.mean(controls)) if controls else math.nan,
        "hacked_auc": _value(scores.get("hacked_auc")),
        "attempts": -float(np.mean(attempts)) if attempts else math.nan,
        "line": -float(len(on_line)),
        "rehearsal": -_value(rehearsed.get("difference")),
        "paid": -_value(rehearsed.get("fooled")),
    }
    return {name: round(value, 4) for name, value in found.items() if math.isfinite(value)}


def _value(figure: Any) -> float:
    value = figure["value"] if isinstance(figure, dict) else figure
    return math.nan if value is None else float(value)


def train(task: str, judge: str, seed: int, more: Sequence[str]) -> dict[str, Any]:
    """Returns the true success before a run, at its best and at its end, the mean over evaluations in its last fifth;
    and the monitor's alarm.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [*TASKS[task][1].split(), *judge_words(judge), "--judge.faulty", "ok", "--seed", str(seed)]
        _run(["rlvlm.run", task, *words, "--out", f"{folder}/run", *more])
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    alarm = next((row for row in logged if row.get("judge/alarm")), {})
    ends = [(row["env_steps"], row["eval/success_at_end"]) for row in logged if "eval/success_at_end" in row]
    late = [success for step, success in ends if step >= 0.8 * ends[-1][0]]
    return {
        "before": round(ends[0][1], 4),
        "success": round(float(np.mean(late)), 4),
        "peak": round(max(success for _, success in ends), 4),
        "alarm": int(alarm.get("judge/alarm", 0)),
        "alarm_step": alarm.get("env_steps", ""),
    }


def _run(words: Sequence[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed: {done.stderr[-2_000:]}")


def read(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a file; empty if there is none."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(rows: Sequence[dict[str, str]]) -> dict[str, NDArray[np.float64]]:
    """Returns for each predictor [N, 3] its value, the loss of success to the truth, and the place of the judge's kind
    of fault in `FAULTS`, one row per task and judge.
    """
    outcomes: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["kind"] == "run":
            outcomes.setdefault((row["task"], row["judge"]), []).append(float(row["success"]))
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in PREDICTORS}
    for row in (row for row in rows if row["kind"] == "bench"):
        own, best = outcomes.get((row["task"], row["judge"])), outcomes.get((row["task"], "truth"))
        if own and best:
            for name in (name for name in PREDICTORS if row[name]):
                found[name].append((float(row[name]), float(np.mean(own) - np.mean(best)), FAULTS.index(row["fault"])))
    return {name: np.array(points).reshape(-1, 3) for name, points in found.items()}


def interval(points: NDArray[np.float64]) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval over judges of Spearman's correlation of points, see `table`."""
    rng = np.random.default_rng(0)
    draws = [rank_correlation(*points[rng.integers(len(points), size=len(points)), :2].T) for _ in range(_RESAMPLES)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def left_out(rows: Sequence[dict[str, str]], column: str, name: str) -> tuple[float, float]:
    """Returns the smallest and largest correlation of a predictor if one value of `column` is left out."""
    found = []
    for value in sorted({row[column] for row in rows}):
        kept = [row for row in rows if row[column] != value or (column != "task" and row["judge"] == "truth")]
        points = table(kept)[name]
        found += [rank_correlation(*points[:, :2].T)] if len(points) > 2 else []
    return (min(found), max(found)) if found else (math.nan, math.nan)


def report(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Prints each predictor's correlation with the outcome, and draws predictors against outcomes."""
    tables = table(rows)
    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = figure.subplots(3, 4, sharey=True).ravel()
    axes = iter(panels)
    sys.stdout.write("predictor, judges, Spearman, 95 %, without one judge, one kind of fault, one task\n")
    for name in PREDICTORS:
        points = tables[name]
        if len(points) < 3:
            sys.stdout.write(f"{name}: {len(points)} judges\n")
            continue
        axis = next(axes)
        correlation = rank_correlation(*points[:, :2].T)
        axis.set_title(f"{PREDICTORS[name]} ({correlation:.2f})", fontsize="medium")
        for place, (fault, marker) in enumerate(zip(FAULTS, "osDv", strict=True)):
            axis.plot(*points[points[:, 2] == place, :2].T, marker, label=fault)
        low, high = interval(points)
        parts = ["{:.2f} to {:.2f}".format(*left_out(rows, column, name)) for column in ("judge", "fault", "task")]
        sys.stdout.write(f"{name}, {len(points)}, {correlation:.2f}, {low:.2f} to {high:.2f}, {', '.join(parts)}\n")
    for axis in axes:
        axis.set_axis_off()
    figure.supylabel("true success, less that with the truth")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(FAULTS))
    figure.savefig(path)


def main(settings: Settings) -> None:
    """Makes what is missing of the grid, one row after the other, a whole seed first."""
    if settings.report is not None:
        report(read(settings.out), settings.report)
        return
    began, done = time.time(), {(row["task"], row["judge"], row["kind"], row["seed"]) for row in read(settings.out)}
    if not settings.out.exists():
        settings.out.write_text(",".join(COLUMNS) + "\n")
    wanted = [("bench", 0), *(("run", seed) for seed in range(settings.seeds))]
    for kind, seed in wanted:
        for task in settings.only:
            for judge in settings.judges:
                is_known = task == "push_block" or judge not in _BLOCKS_ALONE
                if not is_known or (task, judge, kind, str(seed)) in done:
                    continue
                if time.time() - began > 3_600 * settings.hours:
                    sys.stdout.write(f"time is over before {kind} {seed} of {judge} on {task}\n")
                    return
                start = time.time()
                try:
                    if kind == "bench":
                        found: dict[str, Any] = bench(task, judge, settings.rehearse)
                    else:
                        found = train(task, judge, seed, shlex.split(settings.run))
                except RuntimeError as error:  # the next call tries it again
                    sys.stdout.write(f"no {kind} {seed} of {judge} on {task}: {error}\n")
                    continue
                row = {"task": task, "judge": judge, "fault": JUDGES[judge][1], "kind": kind, "seed": seed} | found
                row["seconds"] = round(time.time() - start)
                with settings.out.open("a", newline="") as file:
                    csv.writer(file).writerow([row.get(name, "") for name in COLUMNS])
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
