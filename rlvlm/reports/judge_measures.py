"""What a judge's answers are worth, as pure functions of columns."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlvlm.judges.agreement import wilson_interval
from rlvlm.reports.judge_answers import Answers, Floats
from rlvlm.reports.results import mean_known

NUM_BINS = 10
"""Difficulty bins: equal parts of the gap in truth; the first has the hardest pairs."""
CONFIDENCE_BINS = 10
"""Equal parts of [0.5, 1]."""
OUTCOMES = ("correct", "incorrect", "truth ties", "not checked", "no preference", "invalid", "failed")
"""What can become of an answer. Not checked: decided, and nobody knows the truth."""
TRUTHS = ("left", "right", "tie", "unknown")
GIVEN = ("left", "right", "no preference", "invalid", "failed")
_SMALLEST_GAP = 1e-6
_SWAP = {"left": "right", "right": "left", "tie": "tie"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How sure a judge is where it decides, against how often it is right. Empty bins are NaN."""

    confidence: Floats
    """[10] mean probability of the chosen side, against the other."""
    accuracy: Floats
    """[10] share of these answers that are right."""
    counts: NDArray[np.int64]
    """[10]."""
    ece: float
    """Expected calibration error: mean distance of the two, weighted by counts; NaN without probabilities."""


def truth_sides(truth: Floats) -> NDArray[np.str_]:
    """[N] left, right, tie or unknown: which side of `truth` [N, 2] is the larger."""
    gain = truth[:, 1] - truth[:, 0]
    return np.select([np.isnan(gain), np.abs(gain) <= _SMALLEST_GAP, gain < 0], ["unknown", "tie", "left"], "right")


def outcomes(answers: Answers) -> NDArray[np.str_]:
    """[N] what became of each answer, as in `OUTCOMES`."""
    truth = truth_sides(answers.truth)
    decided = answers.status == "ok"
    return np.select(
        [~decided, truth == "unknown", truth == "tie", answers.label == truth],
        [np.char.replace(answers.status, "_", " "), "not checked", "truth ties", "correct"],
        "incorrect",
    )


def difficulty_bins(answers: Answers) -> NDArray[np.int64]:
    """[N] the bin of each answer's gap in truth, 0 the hardest; -1 where the truth is unknown."""
    gaps = np.abs(answers.truth[:, 1] - answers.truth[:, 0]) / answers.scale
    known = np.isfinite(gaps)
    return np.where(known, np.minimum(np.nan_to_num(gaps) * NUM_BINS, NUM_BINS - 1).astype(int), -1)


def by_bin(answers: Answers) -> dict[str, NDArray[np.int64]]:
    """[10] counts of each outcome, by difficulty."""
    bins, found = difficulty_bins(answers), outcomes(answers)
    return {name: np.bincount(bins[(found == name) & (bins >= 0)], minlength=NUM_BINS) for name in OUTCOMES}


def wilson(hits: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
    """Share, lower and upper end of its 95 % interval, NaN where nothing was counted."""
    nothing = (np.nan, np.nan)
    ends = [wilson_interval(*pair) if pair[1] else nothing for pair in zip(hits.tolist(), counts.tolist(), strict=True)]
    low, high = np.array(ends, float).reshape(-1, 2).T
    return hits / np.where(counts > 0, counts, np.nan), low, high


def confusion(answers: Answers) -> NDArray[np.int64]:
    """[4, 5] counts: the truth (`TRUTHS`) against what was given (`GIVEN`)."""
    truth = truth_sides(answers.truth)
    given = np.where(answers.status == "ok", answers.label, np.char.replace(answers.status, "_", " "))
    return np.array([[int(((truth == row) & (given == column)).sum()) for column in GIVEN] for row in TRUTHS])


def calibration(answers: Answers) -> Calibration:
    """Reliability of decided answers whose truth is known, over ten bins of confidence.

    Source: Guo et al. 2017, arXiv:1706.04599, for the error. Departure: a comparison has two sides, so confidence is
    the probability of the chosen one against the other, without the tie's, and the bins cover [0.5, 1].
    """
    found = outcomes(answers)
    sides = answers.p[:, :2]
    used = np.isin(found, ("correct", "incorrect")) & np.isfinite(sides).all(1) & (sides.sum(1) > 0)
    confidence = sides[used].max(1) / sides[used].sum(1)
    is_right = found[used] == "correct"
    bins = np.minimum(((confidence - 0.5) * 2 * CONFIDENCE_BINS).astype(int), CONFIDENCE_BINS - 1)
    counts = np.bincount(bins, minlength=CONFIDENCE_BINS)
    n = np.where(counts > 0, counts, np.nan)
    mean = np.bincount(bins, confidence, CONFIDENCE_BINS) / n
    accuracy = np.bincount(bins, is_right, CONFIDENCE_BINS) / n
    ece = float(np.nansum(counts * np.abs(mean - accuracy)) / counts.sum()) if counts.sum() else np.nan
    return Calibration(confidence=mean, accuracy=accuracy, counts=counts, ece=ece)


def swap_consistency(answers: Answers) -> tuple[int, int]:
    """How many answers were also asked in the other order, and in how many of them the label swapped with it."""
    asked = (answers.swapped != "") & (answers.label != "")
    mirrored = np.array([_SWAP.get(label, "") for label in answers.label], dtype=answers.swapped.dtype.type)
    return int(asked.sum()), int((asked & (mirrored == answers.swapped)).sum())


def summarise(answers: Answers) -> dict[str, float | int | str | None]:
    """One row of figures, as in `judge_report.json`; None where nothing can be said."""
    found = outcomes(answers)
    count = {name: int((found == name).sum()) for name in OUTCOMES}
    checked = count["correct"] + count["incorrect"]
    share, low, high = wilson(np.array([count["correct"]]), np.array([checked]))
    decided = answers.status == "ok"
    pairs, mirrored = swap_consistency(answers)
    latency = answers.latency_s[(answers.latency_s > 0) & (answers.status != "failed")]
    return {
        "source": answers.name,
        "about": answers.about,
        "answers": len(answers),
        **{name.replace(" ", "_"): number for name, number in count.items()},
        "accuracy": mean_known(share),
        "accuracy_low": mean_known(low),
        "accuracy_high": mean_known(high),
        "ece": mean_known([calibration(answers).ece]),
        "said_left": mean_known(answers.label[decided] == "left"),
        "asked_both_ways": pairs,
        "swap_consistency": mirrored / pairs if pairs else None,
        "latency_p50_s": float(np.median(latency)) if len(latency) else None,
        "latency_p95_s": float(np.quantile(latency, 0.95)) if len(latency) else None,
        "tokens_per_answer": mean_known(answers.tokens),
        "usd_per_1000_answers": mean_known(1_000 * answers.cost_usd),
    }
