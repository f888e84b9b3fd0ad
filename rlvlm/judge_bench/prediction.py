"""From how well a judge answers to how far training with it gets: a curve through runs that simulated judges taught.

The runs are rows of a CSV that `benchmarks/judge_quality.py` writes. What answers are worth is one number, the bits of
truth in an answer, so that mistakes, silence and a preference for a side count by what they take away.
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
from rlvlm.judge_bench.figures import Floats

CURVE_FILE = Path(__file__).with_name("quality.csv")
"""The runs that ship; absent until they have been made."""
COLUMNS = ("task", "kind", "accuracy", "undecided", "left", "false_positives", "misses", "bits", "seed", "success")
"""Of the CSV. `kind` is pairs or scores; what a kind has not is empty."""
NEAR = 0.1
"""Runs whose bits are farther away than this say nothing about a judge."""
FEWEST = 3
"""Runs near a judge below which nothing is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedSuccess:
    """The success to expect of training one task with a judge."""

    task: str
    kind: str
    """pairs or scores: what the judge was asked there."""
    bits: float
    """Of the judge, see `bits_of`."""
    success: float | None
    """In [0, 1]; None where the curve has no data near."""
    low: float | None
    high: float | None
    """Between the two lie nine of ten runs near the judge; with few runs, all."""
    count: int
    """Runs near the judge."""

    def __str__(self) -> str:
        about = f"{self.task}, by {self.kind} ({self.bits:.2f} bits an answer)"
        if self.success is None:
            return f"{about}: no data, {self.count} runs within {NEAR} bits"
        return f"{about}: success {self.success:.2f} ({self.low:.2f} to {self.high:.2f} in {self.count} runs near it)"


def bits_of(counts: ArrayLike) -> float:
    """Mutual information of truth and answer, in bits: 1 of a judge that is always right, 0 of one that knows nothing.

    Args:
        counts: [2, A] how often each answer was given where the truth is the one or the other; the two count alike.

    Returns:
        In [0, 1]; 0 where one of the two was never asked.
    """
    table = np.asarray(counts, float)
    if not table.sum(1).all():
        return 0.0
    joint = table / table.sum(1, keepdims=True) / 2  # p(truth, answer) with p(truth) = 1/2
    answers = joint.sum(0)
    used = joint > 0
    # I = sum p(t, a) log2(p(t, a) / (p(t) p(a)))
    return float((joint[used] * np.log2(joint[used] / (np.broadcast_to(answers, joint.shape)[used] / 2))).sum())


def bits_of_pairs(pairs: ArrayLike) -> float:
    """Bits in an answer to a pair, of a teacher table [10, 2, 3] (`figures.teacher_table`), all difficulties alike."""
    right, wrong, undecided = np.asarray(pairs, float).sum(0).T  # each by the nearer side: left, right
    return bits_of([[right[0], wrong[0], undecided[0]], [wrong[1], right[1], undecided[1]]])


def bits_of_scores(scores: Sequence[Sequence[float]]) -> float:
    """Bits in whether a score says success, at the best threshold, of a teacher table [11] (lists by progress)."""
    from rlvlm.judges.agreement import best_threshold

    failures, successes = [score for row in scores[:-1] for score in row], list(scores[-1])
    if not failures or not successes:
        return 0.0
    truths = [False] * len(failures) + [True] * len(successes)
    threshold, _ = best_threshold([*failures, *successes], truths)
    claims = [sum(score >= threshold for score in side) for side in (failures, successes)]
    return bits_of([[claims[0], len(failures) - claims[0]], [claims[1], len(successes) - claims[1]]])


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
            numbers = float(row["bits"]), float(row["success"])
            if not row["task"] or row["kind"] not in ("pairs", "scores") or not np.isfinite(numbers).all():
                raise ValueError(f"a row {row}")
    except (OSError, KeyError, TypeError, ValueError, csv.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no table of runs: {error}", "benchmarks/judge_quality.py writes one") from error
    return rows


def rising(values: Floats) -> Floats:
    """[N] the nearest values, in least squares, that never fall (isotonic regression by pooling neighbours).

    Source: Ayer et al. 1955, Annals of Mathematical Statistics 26(4).
    """
    blocks: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, count = value, 1
        while blocks and blocks[-1][0] >= mean:
            before, weight = blocks.pop()
            mean, count = (before * weight + mean * count) / (weight + count), weight + count
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def predict(teacher: Mapping[str, Any], curve: Sequence[Mapping[str, str]]) -> list[ExpectedSuccess]:
    """What to expect of training each task of the curve with a judge.

    Args:
        teacher: the judge's tables by task, and of `all`; a task that was not asked takes the latter.
        curve: rows of `read_curve`.
    """
    found = []
    for task, kind in dict.fromkeys((row["task"], row["kind"]) for row in curve):
        table = next((one[kind] for one in (teacher.get(task, {}), teacher["all"]) if kind in one), None)
        if table is None:
            continue
        bits = {"pairs": bits_of_pairs, "scores": bits_of_scores}[kind](table)
        rows = sorted(
            (float(row["bits"]), float(row["success"])) for row in curve if (row["task"], row["kind"]) == (task, kind)
        )
        places, successes = np.array(rows).T
        fitted = rising(successes)
        near = np.abs(places - bits) <= NEAR
        about = {"task": task, "kind": kind, "bits": bits, "count": int(near.sum())}
        if near.sum() < FEWEST:
            found.append(ExpectedSuccess(success=None, low=None, high=None, **about))
            continue
        # the spread is that of the runs about the curve, moved to where the curve is at the judge's place
        expected = float(np.interp(bits, places, fitted))
        low, high = expected + np.quantile(successes[near] - fitted[near], [0.05, 0.95])
        ends = (math.floor(100 * max(0.0, low)) / 100, math.ceil(100 * min(1.0, high)) / 100)
        found.append(ExpectedSuccess(success=expected, low=ends[0], high=ends[1], **about))
    return found
