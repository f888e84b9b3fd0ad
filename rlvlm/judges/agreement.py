"""Agreement between a judge's answers and the truth, as pure functions of both; all such statistics stand here.

Used by the judge bench, the judge report, a run's records and monitor, and evaluations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
ALIKE = 0.01
"""Scores that differ by no more than this count as equal."""
_MAX_SLACK = 0.1
"""Largest loss in Youden's J that a threshold may have against the best one."""
MIN_GAP = 1e-6
"""Largest gap in true progress that counts as a tie: rounding of positions gives gaps of 1e-7 without a movement."""


def average_ranks(values: ArrayLike) -> Floats:
    """Returns the [N] ranks of `values` [N] from 1, equal values sharing their mean rank; all NaN if any value is NaN.

    Same result as `scipy.stats.rankdata`, which is several times slower for a hundred values; bootstraps rank thousands
    of times.
    """
    found = np.asarray(values, np.float64)
    if np.isnan(found).any():
        return np.full(len(found), np.nan)
    order = found.argsort()
    rising = found[order]
    # first index of each run of equal values, and the end of the last run
    bounds = np.flatnonzero(np.concatenate([[True], rising[1:] != rising[:-1], [True]]))
    ranks = np.empty(len(found))
    ranks[order] = np.repeat((bounds[:-1] + 1 + bounds[1:]) / 2, np.diff(bounds))
    return ranks


def area_under_curve(scores: ArrayLike, truths: ArrayLike) -> float:
    """Returns the probability that a true case drawn at random scores above a false one; equal scores count half.

    Args:
        scores: [N].
        truths: [N] bool.

    Returns:
        In [0, 1], 0.5 for uninformative scores; NaN if either class is missing.

    Source: Hanley and McNeil 1982, Radiology 143(1): the area under the ROC curve is the Mann-Whitney statistic.
    """
    values, is_true = np.asarray(scores, np.float64), np.asarray(truths, bool)
    num_true, num_false = int(is_true.sum()), int((~is_true).sum())
    if not num_true or not num_false:
        return math.nan
    # AUC = (R - n(n + 1)/2) / (n m): R the ranks of the n true cases among all, m the false ones
    return float((average_ranks(values)[is_true].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))


def area_interval(area: float, num_true: int, num_false: int, confidence: float = 0.95) -> tuple[float, float]:
    """Returns the confidence bounds, in [0, 1], of an area under the ROC curve.

    Args:
        area: the area, in [0, 1].
        num_true: number of true cases, >= 1.
        num_false: number of false cases, >= 1.
        confidence: coverage of the interval, in (0, 1).

    Source: Hanley and McNeil 1982, eq. 1, evaluated at most half a case below a perfect area, whose error would be 0.
    """
    bounded = min(max(area, 1 - area), 1 - 0.5 / max(num_true, num_false))
    # A(1-A) + (n-1)(Q1-A^2) + (m-1)(Q2-A^2), over n m; Q1 = A / (2-A), Q2 = 2 A^2 / (1+A)
    both_higher, both_lower = bounded / (2 - bounded), 2 * bounded**2 / (1 + bounded)
    variance = bounded * (1 - bounded)
    variance += (num_true - 1) * (both_higher - bounded**2) + (num_false - 1) * (both_lower - bounded**2)
    reach = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(variance / (num_true * num_false))
    return max(area - reach, 0.0), min(area + reach, 1.0)


def kept_leads(scores: ArrayLike, controls: ArrayLike, ordinary: ArrayLike) -> tuple[int, int]:
    """Returns how many controls keep at least half of their original's lead, and how many originals have a lead.

    The lead is the original's score above the ordinary one; an original that scores no more than the ordinary has none.
    A policy is rewarded for scores above the ordinary, so neither scale nor threshold matters here.

    Args:
        scores: [N] scores of the originals, e.g. of successes.
        controls: [N] scores of the control made from each original, which should be lower.
        ordinary: [N] ordinary score in each original's setting.
    """
    usual = np.asarray(ordinary, np.float64)
    leads = np.asarray(scores, np.float64) - usual
    has_lead = leads > ALIKE
    is_kept = np.asarray(controls, np.float64) - usual >= leads / 2
    return int((has_lead & is_kept).sum()), int(has_lead.sum())


def best_threshold(scores: ArrayLike, truths: ArrayLike) -> tuple[float, float]:
    """Returns the score threshold that best separates true from false cases, and Youden's J there.

    Args:
        scores: [N].
        truths: [N] bool; both classes must occur.

    Returns:
        The middle of the adjacent thresholds that do as well as the best one up to one answer; and J, the share of true
        cases above the best threshold minus the share of false ones, in [0, 1].

    Source: Youden 1950, Cancer 3(1): the index J.
    """
    values, is_true = np.asarray(scores, np.float64), np.asarray(truths, bool)
    distinct = np.unique(values)
    # halfway between scores: a score that moves by rounding stays on its side
    thresholds = np.append(distinct[:1], (distinct[1:] + distinct[:-1]) / 2)
    claims = values >= thresholds[:, None]
    index = claims[:, is_true].mean(axis=1) - claims[:, ~is_true].mean(axis=1)
    best = int(index.argmax())
    # One success at 0.004 among many near 1 would put the threshold below 0.004, among the noise of the failures
    slack = min(1 / min(is_true.sum(), (~is_true).sum()), _MAX_SLACK) + 1e-9
    does_well = index >= index[best] - slack
    first, last = best, best
    while first > 0 and does_well[first - 1]:
        first -= 1
    while last + 1 < len(thresholds) and does_well[last + 1]:
        last += 1
    return float((thresholds[first] + thresholds[last]) / 2), float(index[best])


@dataclass(frozen=True, kw_only=True, slots=True)
class Reliability:
    """Reliability diagram: mean score against share of true cases, in bins of equal width; empty bins are NaN."""

    sure: Floats
    """[bins] mean score in the bin."""
    true: Floats
    """[bins] share of true cases in the bin."""
    counts: NDArray[np.int64]
    """[bins] number of scores in the bin."""


def reliability(scores: ArrayLike, truths: ArrayLike, num_bins: int = 10, lowest: float = 0.0) -> Reliability:
    """Returns the reliability diagram of `scores` [N] in [lowest, 1] against `truths` [N] bool."""
    values, is_true = np.asarray(scores, np.float64), np.asarray(truths, bool)
    bins = np.clip(((values - lowest) / (1 - lowest) * num_bins).astype(int), 0, num_bins - 1)
    counts = np.bincount(bins, minlength=num_bins)
    n = np.where(counts > 0, counts, np.nan)
    return Reliability(
        sure=np.bincount(bins, values, num_bins) / n, true=np.bincount(bins, is_true, num_bins) / n, counts=counts
    )


def calibration_error(scores: ArrayLike, truths: ArrayLike, lowest: float = 0.0) -> float:
    """Returns the expected calibration error: mean |score - share true| over bins of equal width, weighted by counts.

    Args:
        scores: [N] in [lowest, 1], N >= 1.
        truths: [N] bool.
        lowest: lower end of the first bin; 0.5 for the probability of the chosen side against the other.

    Source: Naeini et al. 2015, "Obtaining Well Calibrated Probabilities Using Bayesian Binning" (expected calibration
    error); Guo et al. 2017, arXiv:1706.04599.
    """
    found = reliability(scores, truths, lowest=lowest)
    return float(np.nansum(found.counts * np.abs(found.sure - found.true)) / found.counts.sum())


def label_outcome(label: str, gain: float) -> str:
    """Returns the outcome of an answer to a pair whose right side has `gain` more true progress than its left one.

    Args:
        label: left, right or tie; empty if the answer could not be read.
        gain: difference in true progress; NaN if unknown.

    Returns:
        right or wrong; tie if the truth is one; unknown if the truth is; undecided if the label is a tie; unread.
    """
    if label == "tie":
        return "undecided"
    if label not in ("left", "right"):
        return "unread"
    if math.isnan(gain):
        return "unknown"
    if abs(gain) <= MIN_GAP:
        return "tie"
    return "right" if (gain > 0) == (label == "right") else "wrong"


def cohens_kappa(first: Sequence[str], second: Sequence[str]) -> float | None:
    """Returns Cohen's kappa of two raters on N items: 1 for full agreement, 0 for chance, below 0 for less than chance.

    None if N = 0, or if both always give the same single answer, since chance agreement is then 1.

    Source: Cohen 1960, Educational and Psychological Measurement 20(1).
    """
    one, other = np.asarray(first), np.asarray(second)
    if not len(one):
        return None
    # kappa = (p_o - p_e) / (1 - p_e): p_o the observed agreement, p_e that of two independent raters
    observed = float((one == other).mean())
    expected = sum(float((one == label).mean() * (other == label).mean()) for label in np.union1d(one, other))
    return (observed - expected) / (1 - expected) if expected < 1 else None


def confidence(p_left: float, p_right: float) -> float:
    """Returns the probability of the likelier side, max(p_left, p_right) / (p_left + p_right), in [0.5, 1].

    The probability of a tie says nothing about which side is nearer. NaN if both sides have probability 0.
    """
    both = p_left + p_right
    return max(p_left, p_right) / both if both > 0 else math.nan


def wilson_interval(hits: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Returns the confidence bounds of the share `hits` / `count`, for `count` >= 1 trials.

    Source: Wilson 1927, JASA 22, p. 209. Correct near 0 and 1 too, where the normal interval has no width.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = hits / count, 1 / (1 + z**2 / count)
    middle = weight * (share + z**2 / (2 * count))
    reach = weight * z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    # rounding must not leave a share of 0 or 1 outside
    return (middle - reach if hits else 0.0), (middle + reach if hits < count else 1.0)


def has_risen(now: tuple[int, int], before: tuple[int, int], confidence: float = 0.95) -> bool:
    """Returns whether a share surely lies above an earlier one: the interval of their difference lies above 0.

    Args:
        now: hits and trials, at least one trial.
        before: likewise, of the earlier share.
        confidence: coverage of the interval, in (0, 1).

    Source: Newcombe 1998, Statistics in Medicine 17(8), p. 873, method 10: Wilson's intervals of the two shares joined.
    """
    low, high = wilson_interval(*now, confidence)[0], wilson_interval(*before, confidence)[1]
    share, earlier = now[0] / now[1], before[0] / before[1]
    return share - earlier > math.hypot(share - low, high - earlier)
