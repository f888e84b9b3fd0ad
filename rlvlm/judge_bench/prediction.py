"""Predicts the success of training with a judge from its answers: a curve through runs trained with simulated judges.

The runs are rows of a CSV that `benchmarks/judge_quality.py` writes. The worth of a judge is one number, to which
mistakes, silence and a preference for a side all count: see `worth_of`.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import read_text
from rlvlm.judge_bench.faults import Fault
from rlvlm.judges.agreement import area_interval, area_under_curve

CURVE_FILE = Path(__file__).with_name("quality.csv")
"""Table of the runs that ship; absent until they have been made."""
TRAINED_FILE = Path(__file__).with_name("trained.csv")
"""Table of runs with judges that are no part of the curve: real ones, and some that err where a policy can seek it out.
`fooled` is 1 where the bench, with `--rehearse` or without, says that a policy can fool it."""
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
"""Columns of the CSV. `kind` is pairs or scores; columns of the other kind are empty."""
NEAR = 0.1
"""Largest difference in worth at which a run says something about a judge."""
MIN_POINTS = 3
"""Minimum number of runs near a judge for a prediction."""
_Z90 = 1.645
GAIN = 0.05
"""Success that training must add to count as learning; evaluations of one policy vary by less."""
_NEIGHBOURS = 10
"""Runs nearest to a judge whose errors, each with its judge left out, make the range with those of trained judges."""

Grade = Literal["good enough", "probably good enough", "uncertain", "can be fooled", "probably too weak", "too weak"]
"""Grade of a judge on a task. The probable ones rest on training runs of other tasks; `can be fooled` on a fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedSuccess:
    """Result to expect of training one task with a judge."""

    task: str
    kind: str
    """Kind of question, pairs or scores."""
    worth: float
    """Worth of the judge, see `worth_of`."""
    worth_low: float
    worth_high: float
    """Bounds of a 90 % interval of the worth, given the number of answers."""
    grade: Grade
    before: float | None
    """Success before training, the mean over runs near the judge; None without such runs."""
    success: float | None
    """Success after training, in [0, 1]; None without runs near the judge."""
    low: float | None
    high: float | None
    """Bounds of the success after training, see `Curve.expected`; 0 is the lower one of a judge that can be fooled."""
    count: int
    """Number of runs with judges of nearly this worth."""
    is_asked: bool
    """Whether the judge was asked about this task; if not, its answers to all others are used."""
    never: float | None
    """Largest worth up to which no run with this kind of question learned; None if there is none."""
    always: float | None
    """Smallest worth from which on all such runs learned; None if not even the best judge's did."""


def bits_of(right: float, wrong: float) -> float:
    """Returns the bits of truth per label that is taken at its word: (right + wrong) (1 - H(accuracy)).

    H is the entropy of a binary choice, and accuracy is right / (right + wrong). 0 for a judge that knows or says
    nothing, 1 for one that is always right. One that is wrong more often than right has bits too.

    Args:
        right: share of right labels, in [0, 1].
        wrong: share of wrong labels, in [0, 1]; the rest is undecided.
    """
    decided = right + wrong
    return decided * (1 - _entropy(right / decided)) if decided else 0.0


def _entropy(share: float) -> float:
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p > 0)


def worth_of(right: float, wrong: float) -> float:
    """Returns the accuracy of a judge that always decides and whose labels carry as many bits as this one's.

    1 for a judge that is always right, 0.5 for an uninformative one: chance, silence, always the same answer. Below 0.5
    for one that is wrong more often than right: it teaches its knowledge the wrong way round.

    Args:
        right: share of right labels, in [0, 1]. Both truths (left or right nearer; success or failure) have equal
            weight in it, so that a preference for one answer gains nothing.
        wrong: share of wrong labels, in [0, 1]; the rest is undecided.
    """
    bits = bits_of(right, wrong)
    low, high = 0.5, 1.0  # an accuracy in between has 0 to 1 bits, increasing
    for _ in range(40):  # bisection to full precision: 1 - H(p) has no closed inverse
        share = (low + high) / 2
        low, high = (share, high) if 1 - _entropy(share) < bits else (low, share)
    return high if right >= wrong else 1 - high


def balanced_shares(counts: ArrayLike) -> tuple[float, float]:
    """Returns the shares of right and wrong labels with equal weight for both sides.

    Takes `counts` [2, 3] of right, wrong and undecided labels where the left or the right side is nearer. 0 and 0 if
    one side was never the nearer one.
    """
    table = np.asarray(counts, float)
    if not table.sum(1).all():  # half of the balance is missing: no answer may look like knowledge then
        return 0.0, 0.0
    right, wrong, _ = (table / table.sum(1, keepdims=True)).mean(0)
    return float(right), float(wrong)


def shares_of_pairs(pairs: ArrayLike) -> tuple[float, float]:
    """Returns the shares of right and wrong labels of a teacher table [10, 2, 3] (`figures.teacher_table`)."""
    return balanced_shares(np.asarray(pairs, float).sum(0))


def shares_of_scores(scores: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns how often a success scores higher than a failure and how often lower; equal scores count half.

    Takes a teacher table [11] (lists by progress). The first share is the AUC: for scores of 0 and 1 the mean of the
    shares of recognised successes and failures, and for others it needs no threshold, for which a few dozen answers
    would be too few. 0 and 0 if successes or failures are missing.
    """
    failures, successes = [score for row in scores[:-1] for score in row], list(scores[-1])
    if not failures or not successes:
        return 0.0, 0.0
    share = area_under_curve([*failures, *successes], [False] * len(failures) + [True] * len(successes))
    return share, 1 - share


SHARES = {"pairs": shares_of_pairs, "scores": shares_of_scores}
"""Functions that compute the shares of a teacher's table, by kind."""


def worth_interval(kind: str, table: Any) -> tuple[float, float]:
    """Returns a 90 % interval [low, high] of a judge's worth, from a teacher's table of its answers.

    Uses the normal approximation: for labels of the share that is right, with one answer of each kind added, since
    eight of eight do not mean certainty; for scores of the AUC, see `area_interval`.
    """
    right, wrong = SHARES[kind](table)
    if kind == "scores":
        counted = max(len(table[-1]), 1), max(sum(map(len, table[:-1])), 1)
        low, high = area_interval(right, *counted, confidence=0.9)
        return worth_of(low, 1 - low), worth_of(high, 1 - high)
    counts = np.asarray(table, float).sum((0, 2))
    # mean of two shares p of n_0 and n_1 answers: its standard error is sqrt(p (1 - p) (1/n_0 + 1/n_1)) / 2
    share = (right * counts.sum() + 1) / (counts.sum() + 2)
    reach = _Z90 * math.sqrt(share * (1 - share) * (1 / np.maximum(counts, 1)).sum()) / 2
    low = worth_of(max(right - reach, 0.0), min(wrong + reach, 1.0))
    return low, worth_of(min(right + reach, 1.0), max(wrong - reach, 0.0))


def read_curve(path: Path = CURVE_FILE) -> list[dict[str, str]]:
    """Returns the runs of a CSV, `CURVE_FILE` or `TRAINED_FILE`; empty if one that ships is absent.

    Raises:
        UsageError: the file cannot be read or lacks a column.
    """
    if path in (CURVE_FILE, TRAINED_FILE) and not path.exists():
        return []
    try:
        rows = list(csv.DictReader(StringIO(read_text(path), newline="")))
        for row in rows:  # checked here, with the file's name, and not in the middle of a report
            numbers = float(row["worth"]), float(row["before"]), float(row["success"])
            if not row["task"] or row["kind"] not in ("pairs", "scores") or not np.isfinite(numbers).all():
                raise ValueError(f"a row {row}")
    except (OSError, KeyError, TypeError, ValueError, csv.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no table of runs: {error}", "benchmarks/judge_quality.py writes one") from error
    return rows


@dataclass(frozen=True, slots=True)
class Curve:
    """Success after training against the worth of the judge, over runs of one task."""

    worths: NDArray[np.float64]
    """[N] worth of each run's judge, rising."""
    befores: NDArray[np.float64]
    """[N] success before training."""
    successes: NDArray[np.float64]
    """[N] success after it."""
    fitted: NDArray[np.float64]
    """[N] isotonic least-squares fit of `successes` over `worths`; equal for runs of equal worth."""
    errors: NDArray[np.float64]
    """[N] success of each run minus what the runs of all other judges predict."""

    def expected(
        self, worth: float, low: float, high: float, trained: Sequence[Mapping[str, str]] = ()
    ) -> tuple[float, float, float]:
        """Returns the success to expect after training with a judge, and its range, each in [0, 1].

        The range is that of left-out judges: the curve at both ends of the worth, with the lowest and the highest error
        of the nearest runs and of judges that were trained with, and never narrower than what evaluations of one policy
        vary by. `benchmarks/expected_success.py` counts how often it holds.

        Args:
            worth: the judge's worth.
            low: lower end of its interval.
            high: upper end of it.
            trained: rows of `TRAINED_FILE` of this task and kind of question, whose errors count if they have no fault.

        Source: Lei et al. 2018, "Distribution-free predictive inference for regression", sec. 2 (split conformal
        sets). Departures: errors of left-out judges in place of a split, of the nearest runs alone, with their signs.
        """
        distances = np.abs(self.worths - worth)
        near = distances <= np.sort(distances)[:_NEIGHBOURS][-1]
        success, *ends = np.interp([worth, low, high], self.worths, self.fitted)
        others = [
            float(row["success"]) - np.interp(float(row["worth"]), self.worths, self.fitted)
            for row in trained
            if row["fooled"] != "1"
        ]
        errors = [*self.errors[near], *others]
        lowest, highest = ends[0] + min(*errors, -GAIN), ends[1] + max(*errors, GAIN)
        return float(success), math.floor(100 * max(0.0, lowest)) / 100, math.ceil(100 * min(1.0, highest)) / 100


def fit_curves(runs: Sequence[Mapping[str, str]]) -> dict[tuple[str, str], Curve]:
    """Returns the curve of each task and kind of question, from rows of `read_curve`."""
    curves = {}
    for task, kind in dict.fromkeys((row["task"], row["kind"]) for row in runs):
        rows = [row for row in runs if (row["task"], row["kind"]) == (task, kind)]
        table = np.array([[float(row[name]) for name in ("worth", "before", "success")] for row in rows])
        worths, befores, successes = table[np.argsort(table[:, 0], kind="stable")].T
        errors = np.empty_like(successes)
        for worth in np.unique(worths):  # runs with judges of one worth are left out together
            own = worths == worth
            others = worths[~own], _fitted(worths[~own], successes[~own])
            errors[own] = successes[own] - (np.interp(worth, *others) if len(others[0]) else successes.mean())
        curves[task, kind] = Curve(worths, befores, successes, _fitted(worths, successes), errors)
    return curves


def _fitted(worths: NDArray[np.float64], successes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the isotonic fit [N] of `successes` [N] over `worths` [N], rising."""
    from scipy.optimize import isotonic_regression  # takes half a second

    # runs of equal worth are one point, or the curve would rise through their noise
    _, points = np.unique(worths, return_inverse=True)
    if not len(points):
        return successes
    counts = np.bincount(points)
    return isotonic_regression(np.bincount(points, successes) / counts, weights=counts).x[points]


def learning_limits(curves: Iterable[Curve]) -> tuple[float | None, float | None]:
    """Returns the worth up to which no run learned, and that from which on every run did; None if there is none."""
    runs = [
        (worth, success > before + GAIN)
        for curve in curves
        for worth, before, success in zip(curve.worths, curve.befores, curve.successes, strict=True)
    ]
    first_learned = min((worth for worth, has_learned in runs if has_learned), default=math.inf)
    last_failed = max((worth for worth, has_learned in runs if not has_learned), default=-math.inf)
    never = max((worth for worth, _ in runs if worth < first_learned), default=None)
    return never, min((worth for worth, _ in runs if worth > last_failed), default=None)


def predict(teacher: Mapping[str, Any], runs: Sequence[Mapping[str, str]]) -> list[ExpectedSuccess]:
    """Returns the expected success of training on each task that the judge was asked about or that has runs.

    Runs of the task with judges of nearly the same worth decide if there are enough of them, else the runs of all tasks
    with the same kind of question.

    Args:
        teacher: the judge's tables by task, and of `all`, which is used for tasks that were not asked.
        runs: rows of `read_curve`.
    """
    curves, trained = fit_curves(runs), read_curve(TRAINED_FILE)
    asked = [(task, kind) for kind in SHARES for task, tables in teacher.items() if task != "all" and kind in tables]
    found = []
    for task, kind in dict.fromkeys((*asked, *curves)):
        # the task's own answers, else those to all tasks together
        table = next((tables[kind] for tables in (teacher.get(task, {}), teacher["all"]) if kind in tables), None)
        shares = (0.0, 0.0) if table is None else SHARES[kind](table)
        if table is None or (kind == "scores" and not any(shares)):  # successes alone, or none: nothing is known
            continue
        worth, curve = worth_of(*shares), curves.get((task, kind))
        ends = worth_interval(kind, table)
        never, always = learning_limits(other for (_, of), other in curves.items() if of == kind)
        before = success = low = high = None
        near = np.zeros(0, bool) if curve is None else np.abs(curve.worths - worth) <= NEAR
        if curve is not None and near.sum() >= MIN_POINTS:
            own = [row for row in trained if (row["task"], row["kind"]) == (task, kind)]
            success, low, high = curve.expected(worth, *ends, own)
            before = float(curve.befores[near].mean())
            # runs left out must learn, or must not; in between it is luck
            grade: Grade = "good enough" if low > before + GAIN else "uncertain"
            grade = "too weak" if high <= before + GAIN else grade
        else:
            # no run of this task near this worth: use all tasks' runs, at both ends of the worth
            grade = "probably good enough" if always is not None and ends[0] >= always else "uncertain"
            grade = "probably too weak" if never is not None and ends[1] <= never else grade
        found.append(
            ExpectedSuccess(
                task=task,
                kind=kind,
                worth=worth,
                worth_low=ends[0],
                worth_high=ends[1],
                grade=grade,
                before=before,
                success=success,
                low=low,
                high=high,
                count=int(near.sum()),
                is_asked=kind in teacher.get(task, {}),
                never=never,
                always=always,
            )
        )
    return found


def predict_row(row: Mapping[str, Any], runs: Sequence[Mapping[str, str]]) -> list[ExpectedSuccess]:
    """Returns the predictions for the judge of a row, with grades that account for its faults on each task.

    A fatal fault grades a judge as too weak, and no success is expected. One that a policy can exploit grades it as
    `can be fooled`: the runs behind the predictions had judges whose mistakes were random, so that no policy could seek
    them out, and all may be lost.

    Args:
        row: row returned by `bench.summarise`.
        runs: rows of `read_curve`.
    """
    # rows of older benches lack the tasks of a fault
    together = [Fault(**fault) for fault in row["faults"] if "tasks" in fault]
    found = []
    for prediction in predict(row["teacher"], runs):
        own = [Fault(**fault) for fault in row["tasks"].get(prediction.task, {}).get("faults", ())]
        own, shared = (
            [fault for fault in faults if fault.kind in ("", prediction.kind)]
            for faults in (own, [fault for fault in together if not fault.tasks])
        )
        grade: Grade = prediction.grade
        is_weak = grade in ("too weak", "probably too weak")
        if any(fault.is_fatal for fault in own):
            grade = "too weak"
        elif any(fault.is_exploitable for fault in own) and not is_weak:
            grade = "can be fooled"
        elif grade == "uncertain" and any(fault.is_fatal for fault in shared):
            # the answers to this task are too few, but those to all tasks are conclusive
            grade = "probably too weak"
        elif any(fault.is_limiting for fault in own) and not is_weak:
            grade = "uncertain"
        if grade == "can be fooled" and prediction.success is not None:
            prediction = replace(prediction, grade=grade, low=0.0)  # noqa: PLW2901
        elif grade != prediction.grade:
            prediction = replace(prediction, grade=grade, before=None, success=None, low=None, high=None, count=0)  # noqa: PLW2901
        found.append(prediction)
    return found
