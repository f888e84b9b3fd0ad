"""How a judge's scores agree with the truth: pure functions of both. Used by monitors and evaluations."""

import math

import numpy as np
from numpy.typing import ArrayLike


def area_under_curve(scores: ArrayLike, truths: ArrayLike) -> float:
    """Chance that a true case drawn at random scores above a false one, equal scores counting half.

    Args:
        scores: [N].
        truths: [N] bool.

    Returns:
        In [0, 1], 0.5 for scores that know nothing; NaN where one of the two kinds is missing.

    Source: Hanley and McNeil 1982, Radiology 143(1): the area under the ROC curve is the Mann-Whitney statistic.
    """
    from scipy.stats import rankdata  # takes half a second

    values, is_true = np.asarray(scores, np.float64), np.asarray(truths, bool)
    num_true, num_false = int(is_true.sum()), int((~is_true).sum())
    if not num_true or not num_false:
        return math.nan
    # AUC = (R - n(n + 1)/2) / (n m): R the ranks of the n true cases among all, m the false ones
    return float((rankdata(values)[is_true].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))


def best_threshold(scores: ArrayLike, truths: ArrayLike) -> tuple[float, float]:
    """The threshold from which on a score is best called a success, and how many more of the true cases than of the
    false ones then are.

    Args:
        scores: [N].
        truths: [N] bool, of both kinds.

    Returns:
        A threshold halfway between two neighbouring scores, the lowest of those that do equally well; and the share of
        true cases above it less that of false ones, in [0, 1].

    Source: Youden 1950, Cancer 3(1): the index J.
    """
    values, is_true = np.asarray(scores, np.float64), np.asarray(truths, bool)
    distinct = np.unique(values)
    # halfway between scores: a score that moves by rounding stays on its side
    thresholds = np.append(distinct[:1], (distinct[1:] + distinct[:-1]) / 2)
    claims = values >= thresholds[:, None]
    index = claims[:, is_true].mean(axis=1) - claims[:, ~is_true].mean(axis=1)
    best = int(index.argmax())
    return float(thresholds[best]), float(index[best])


def calibration_error(scores: ArrayLike, truths: ArrayLike, num_bins: int = 10) -> float:
    """Mean distance of the scores from the share that is true, over bins of equal width, weighted by their counts.

    Args:
        scores: [N] in [0, 1], N >= 1.
        truths: [N] bool.
        num_bins: >= 1.

    Source: Naeini et al. 2015, "Obtaining Well Calibrated Probabilities Using Bayesian Binning" (expected calibration
    error).
    """
    values, is_true = np.asarray(scores, np.float64), np.asarray(truths, bool)
    bins = np.minimum((values * num_bins).astype(int), num_bins - 1)
    # |sum of (score - truth)| per bin is count times the distance of mean score and share
    gaps = np.bincount(bins, weights=values - is_true)
    return float(np.abs(gaps).sum()) / len(values)


def wilson_interval(hits: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Bounds of a share of `hits` among `count` >= 1 trials.

    Source: Wilson 1927, JASA 22, p. 209. Right near 0 and 1 too, where the normal interval has no width.
    """
    from scipy.stats import binomtest  # takes half a second

    bounds = binomtest(hits, count).proportion_ci(confidence, method="wilson")
    return float(bounds.low), float(bounds.high)
