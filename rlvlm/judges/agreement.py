"""How a judge's answers agree with the truth: pure functions of both, and the only ones.

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
"""Scores that differ by no more are the same answer."""
_MAX_SLACK = 0.1
"""Difference in Youden's J by which a threshold may do worse than the best one."""
MIN_GAP = 1e-6
"""Gaps in truth up to this are ties: rounding of positions makes some of 1e-7 where nothing moved."""


def average_ranks(values: ArrayLike) -> Floats:
    """[N] ranks of `values` [N] from 1 on, the mean of their places for equal ones; all NaN where one value is.

    As `scipy.stats.rankdata`, which takes several times as long for a hundred values: bootstraps rank them thousands of
    times.
    """
    found = np.asarray(values, np.float64)
    if np.isnan(found).any():
        return np.full(len(found), np.nan)
    order = found.argsort()
    rising = found[order]
    # where each run of equal values begins and the next one does
    bounds = np.flatnonzero(np.concatenate([[True], rising[1:] != rising[:-1], [True]]))
    ranks = np.empty(len(found))
    ranks[order] = np.repeat((bounds[:-1] + 1 + bounds[1:]) / 2, np.diff(bounds))
    return ranks


def area_under_curve(scores: ArrayLike, truths: ArrayLike) -> float:
    """Chance that a true case drawn at random scores above a false one, equal scores counting half.

    Args:
        scores: [N].
        truths: [N] bool.

    Returns:
        In [0, 1], 0.5 for scores that know nothing; NaN where one of the two kinds is missing.

    Source: Hanley and McNeil 1982, Radiology 143(1): the area under the ROC curve is the Mann-Whitney statistic.
    """
    values, is_true = np.asarray(scores, np.float64), np.asarray(truths, bool)
    num_true, num_false = int(is_true.sum()), int((~is_true).sum())
    if not num_true or not num_false:
        return math.nan
    # AUC = (R - n(n + 1)/2) / (n m): R the ranks of the n true cases among all, m the false ones
    return float((average_ranks(values)[is_true].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))


def area_interval(area: float, num_true: int, num_false: int, confidence: float = 0.95) -> tuple[float, float]:
    """Bounds, in [0, 1], of an area under the curve of so many true and false cases, both >= 1.

    Source: Hanley and McNeil 1982, eq. 1, for at most one mistake less than perfect: the error of a perfect one would
    be 0.
    """
    bounded = min(max(area, 1 - area), 1 - 0.5 / max(num_true, num_false))
    # A(1-A) + (n-1)(Q1-A^2) + (m-1)(Q2-A^2), over n m; Q1 = A / (2-A), Q2 = 2 A^2 / (1+A)
    both_higher, both_lower = bounded / (2 - bounded), 2 * bounded**2 / (1 + bounded)
    variance = bounded * (1 - bounded)
    variance += (num_true - 1) * (both_higher - bounded**2) + (num_false - 1) * (both_lower - bounded**2)
    reach = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(variance / (num_true * num_false))
    return max(area - reach, 0.0), min(area + reach, 1.0)


def kept_leads(scores: ArrayLike, controls: ArrayLike, ordinary: ArrayLike) -> tuple[int, int]:
    """How many controls keep at least half of what lifts their original above the ordinary score, and of how many that
    can be said: an original that scores no more than the ordinary has no lead to keep.

    A policy is paid for what scores above the ordinary, so no scale and no threshold matters here.

    Args:
        scores: [N] of the originals, e.g. of successes.
        controls: [N] of what was made of each and must score less.
        ordinary: [N] what scores about there.
    """
    usual = np.asarray(ordinary, np.float64)
    leads = np.asarray(scores, np.float64) - usual
    has_lead = leads > ALIKE
    is_kept = np.asarray(controls, np.float64) - usual >= leads / 2
    return int((has_lead & is_kept).sum()), int(has_lead.sum())


def best_threshold(scores: ArrayLike, truths: ArrayLike) -> tuple[float, float]:
    """The threshold from which on a score is best called a success, and how many more of the true cases than of the
    false ones then are.

    Args:
        scores: [N].
        truths: [N] bool, of both kinds.

    Returns:
        A threshold, the middle of those next to the best one that do as well but for one answer; and the best share of
        true cases above a threshold less that of false ones, in [0, 1].

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
    """How sure a judge is against how often it is right, over bins of equal width; empty bins are NaN."""

    sure: Floats
    """[bins] mean score."""
    true: Floats
    """[bins] share of these that are true."""
    counts: NDArray[np.int64]
    """[bins]."""


def reliability(scores: ArrayLike, truths: ArrayLike, num_bins: int = 10, lowest: float = 0.0) -> Reliability:
    """The reliability diagram of `scores` [N] in [lowest, 1] against `truths` [N] bool."""
    values, is_true = np.asarray(scores, np.float64), np.asarray(truths, bool)
    bins = np.clip(((values - lowest) / (1 - lowest) * num_bins).astype(int), 0, num_bins - 1)
    counts = np.bincount(bins, minlength=num_bins)
    n = np.where(counts > 0, counts, np.nan)
    return Reliability(
        sure=np.bincount(bins, values, num_bins) / n, true=np.bincount(bins, is_true, num_bins) / n, counts=counts
    )


def calibration_error(scores: ArrayLike, truths: ArrayLike, num_bins: int = 10, lowest: float = 0.0) -> float:
    """Mean distance of the scores from the share that is true, over bins of equal width, weighted by their counts.

    Args:
        scores: [N] in [lowest, 1], N >= 1.
        truths: [N] bool.
        num_bins: >= 1.
        lowest: where the first bin begins; 0.5 for the probability of the chosen of two sides against the other.

    Source: Naeini et al. 2015, "Obtaining Well Calibrated Probabilities Using Bayesian Binning" (expected calibration
    error); Guo et al. 2017, arXiv:1706.04599.
    """
    found = reliability(scores, truths, num_bins, lowest)
    return float(np.nansum(found.counts * np.abs(found.sure - found.true)) / found.counts.sum())


def label_outcome(label: str, gain: float) -> str:
    """The outcome of the answer to a pair whose right side has `gain` more true progress than its left one.

    Args:
        label: left, right or tie; empty where there is none that could be read.
        gain: NaN where it is unknown.

    Returns:
        right, wrong; tie: the truth is one; unknown: so is the truth; undecided; unread.
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
    """How far two agree beyond chance about N items: 1 always, 0 as often as chance would, below 0 less often.

    None where there is no item, or both always say the same one thing, so that nothing is beyond chance.

    Source: Cohen 1960, Educational and Psychological Measurement 20(1).
    """
    one, other = np.asarray(first), np.asarray(second)
    if not len(one):
        return None
    # kappa = (p_o - p_e) / (1 - p_e): the share that agrees, less what it would be if both drew at random
    observed = float((one == other).mean())
    expected = sum(float((one == label).mean() * (other == label).mean()) for label in np.union1d(one, other))
    return (observed - expected) / (1 - expected) if expected < 1 else None


def confidence(p_left: float, p_right: float) -> float:
    """How sure a judge is of the side that it finds likelier: p(it) / (p(left) + p(right)), in [0.5, 1].

    The tie's share says nothing about which side is nearer. NaN where neither has a probability.
    """
    both = p_left + p_right
    return max(p_left, p_right) / both if both > 0 else math.nan


def wilson_interval(hits: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Bounds of a share of `hits` among `count` >= 1 trials.

    Source: Wilson 1927, JASA 22, p. 209. Right near 0 and 1 too, where the normal interval has no width.
    """
    from scipy.stats import binomtest  # takes half a second

    bounds = binomtest(hits, count).proportion_ci(confidence, method="wilson")
    return float(bounds.low), float(bounds.high)
