"""From how well a judge answers to how far training with it gets: a curve through runs that simulated judges taught.

The runs are rows of a CSV that `benchmarks/judge_quality.py` writes. What answers are worth is one number, so that
mistakes, silence and a preference for a side count by what they take away: see `worth_of`.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rlvlm.core.errors import UsageError

CURVE_FILE = Path(__file__).with_name("quality.csv")
"""The runs that ship; absent until they have been made."""
COLUMNS = (
    "task",
    "kind",
    "accuracy",
    "undecided",
    "left",
    "false_positives",
    "misses",
    "worth",
    "seed",
    "before",
    "success",
)
"""Of the CSV. `kind` is pairs or scores; columns of the other kind are empty."""
NEAR = 0.05
"""Runs whose judge is worth more or less by more than this say nothing about a judge."""
FEWEST = 3
"""Runs near a judge below which nothing is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedSuccess:
    """The success to expect of training one task with a judge."""

    task: str
    kind: str
    """pairs or scores: what the judge was asked there."""
    worth: float
    """Of the judge, see `worth_of`."""
    before: float | None
    """Success before training, the mean over runs near the judge; None where there are no data near."""
    success: float | None
    """After training, in [0, 1]; None where there are no data near."""
    low: float | None
    high: float | None
    """Between the two lie nine of ten runs near the judge; with few runs, all."""
    count: int
    """Runs near the judge."""

    def __str__(self) -> str:
        about = f"{self.task}, by {self.kind} (worth those of a judge that is right in {100 * self.worth:.0f} %)"
        if self.success is None:
            return f"{about}: no data, {self.count} training runs near it"
        spread = f"{self.low:.2f} to {self.high:.2f} in {self.count} training runs near it"
        return f"{about}: success {self.success:.2f} ({spread}), from {self.before:.2f} before training"


def worth_of(counts: ArrayLike) -> float:
    """How often a judge is right that always decides, favours no side and says as much with an answer as this one.

    With I bits of truth in an answer (the mutual information of truth and answer), the share a for which
    1 - H(a) = I, H the entropy of one choice of two. 1 for a judge that is always right, 0.5 for one that knows
    nothing: chance, silence, always the same answer. Below 0.5 for one that is wrong more often than right: what it
    knows, it teaches the wrong way round.

    Args:
        counts: [2, A >= 2] how often each answer was given where the truth is the one or the other. The two truths
            count alike; the first two answers are the truths' names.

    Returns:
        In [0, 1]; 0.5 where one of the two was never asked.
    """
    table = np.asarray(counts, float)
    if not table.sum(1).all():
        return 0.5
    given = table / table.sum(1, keepdims=True)  # p(answer | truth)
    joint = given / 2
    used = joint > 0
    # I = sum p(t, a) log2(p(t, a) / (p(t) p(a)))
    independent = np.broadcast_to(joint.sum(0) / 2, joint.shape)
    bits = float((joint[used] * np.log2(joint[used] / independent[used])).sum())
    low, high = 0.5, 1.0  # 1 - H rises from 0 to 1 in between
    for _ in range(40):
        share = (low + high) / 2
        entropy = -sum(p * math.log2(p) for p in (share, 1 - share) if p > 0)
        low, high = (share, high) if 1 - entropy < bits else (low, share)
    is_wrong = given[0, 0] + given[1, 1] < given[0, 1] + given[1, 0]
    return 1 - high if is_wrong else high


def worth_of_pairs(pairs: ArrayLike) -> float:
    """`worth_of` a teacher table of pairs [10, 2, 3] (`figures.teacher_table`), all difficulties alike."""
    right, wrong, undecided = np.asarray(pairs, float).sum(0).T  # each by the nearer side: left, right
    return worth_of([[right[0], wrong[0], undecided[0]], [wrong[1], right[1], undecided[1]]])


def worth_of_scores(scores: Sequence[Sequence[float]]) -> float:
    """`worth_of` a teacher table of scores [11] (lists by progress), where a score says success from the best
    threshold on.
    """
    from rlvlm.judges.agreement import best_threshold

    failures, successes = [score for row in scores[:-1] for score in row], list(scores[-1])
    if not failures or not successes:
        return 0.5
    truths = [False] * len(failures) + [True] * len(successes)
    # where failures score higher, the scores are turned round, and so is what they are worth
    sign = 1 if np.mean(successes) >= np.mean(failures) else -1
    threshold, _ = best_threshold([sign * score for score in (*failures, *successes)], truths)
    claims = [sum(sign * score >= threshold for score in side) for side in (failures, successes)]
    worth = worth_of([[len(failures) - claims[0], claims[0]], [len(successes) - claims[1], claims[1]]])
    return worth if sign > 0 else 1 - worth


def read_curve(path: Path = CURVE_FILE) -> list[dict[str, str]]:
    """The runs of a CSV; none where the one that ships is absent.

    Raises:
        UsageError: the file cannot be read or lacks a column.
    """
    if path == CURVE_FILE and not path.exists():
        return []
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            numbers = float(row["worth"]), float(row["before"]), float(row["success"])
            if not row["task"] or row["kind"] not in ("pairs", "scores") or not np.isfinite(numbers).all():
                raise ValueError(f"a row {row}")
    except (OSError, KeyError, TypeError, ValueError, csv.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no table of runs: {error}", "benchmarks/judge_quality.py writes one") from error
    return rows


def predict(teacher: Mapping[str, Any], curve: Sequence[Mapping[str, str]]) -> list[ExpectedSuccess]:
    """What to expect of training each task of the curve with a judge.

    Args:
        teacher: the judge's tables by task, and of `all`; a task that was not asked takes the latter.
        curve: rows of `read_curve`.
    """
    from scipy.optimize import isotonic_regression  # takes half a second

    found = []
    for task, kind in dict.fromkeys((row["task"], row["kind"]) for row in curve):
        table = next((one[kind] for one in (teacher.get(task, {}), teacher["all"]) if kind in one), None)
        if table is None:
            continue
        worth = {"pairs": worth_of_pairs, "scores": worth_of_scores}[kind](table)
        runs = [row for row in curve if (row["task"], row["kind"]) == (task, kind)]
        worths, before, successes = (
            np.array([float(row[name]) for row in runs]) for name in ("worth", "before", "success")
        )
        near = np.abs(worths - worth) <= NEAR
        about = {"task": task, "kind": kind, "worth": worth, "count": int(near.sum())}
        if near.sum() < FEWEST:
            found.append(ExpectedSuccess(before=None, success=None, low=None, high=None, **about))
            continue
        # runs of one worth are one point of the curve, or it would rise through their noise
        places, points = np.unique(worths, return_inverse=True)
        counts = np.bincount(points)
        # success never falls with worth: isotonic regression
        curve_of = isotonic_regression(np.bincount(points, successes) / counts, weights=counts).x
        expected = float(np.interp(worth, places, curve_of))
        # the spread is that of the runs about the curve, moved to where the curve is at the judge's place
        low, high = expected + np.quantile((successes - curve_of[points])[near], [0.05, 0.95])
        ends = (math.floor(100 * max(0.0, low)) / 100, math.ceil(100 * min(1.0, high)) / 100)
        found.append(ExpectedSuccess(before=before[near].mean(), success=expected, low=ends[0], high=ends[1], **about))
    return found
