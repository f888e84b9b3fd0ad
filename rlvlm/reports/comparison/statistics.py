"""Means that outliers do not move, and how far they can be trusted. Arrays in, arrays out.

Source: Agarwal et al. 2021, arXiv:2108.13264, sec. 4: interquartile means with stratified bootstrap intervals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from rlvlm.runs.scores import Floats

RESAMPLES = 5_000
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number and the interval around it."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.low > 0 or self.high < 0


def interquartile_mean(values: ArrayLike, axis: int = -1) -> Floats:
    """Mean of the middle half of the values along an axis, the outermost kept ones by their share.

    Args:
        values: [..., N, ...] with N >= 1 along `axis`.
        axis: along which the values lie.

    Returns:
        The values' shape without `axis`.

    Source: Agarwal et al. 2021, arXiv:2108.13264, sec. 4.3.
    """
    ordered = np.sort(np.moveaxis(np.asarray(values, np.float64), axis, -1), axis=-1)
    count = ordered.shape[-1]
    edges = np.arange(count + 1)
    weights = np.clip(np.minimum(edges[1:], 0.75 * count) - np.maximum(edges[:-1], 0.25 * count), 0, None)
    return (ordered * weights).sum(-1) / weights.sum()


def resampled_means(strata: Sequence[Floats], rng: np.random.Generator, resamples: int = RESAMPLES) -> Floats:
    """[R, ...] interquartile means of runs drawn again with replacement, from each stratum as many as it has.

    Args:
        strata: of each task, the runs' values [N, ...]; the trailing axes (e.g. env steps) are alike in all, and a run
            keeps its whole row.
        rng: of the draws.
        resamples: R.
    """
    drawn = [runs[rng.integers(len(runs), size=(resamples, len(runs)))] for runs in strata]
    return interquartile_mean(np.concatenate(drawn, axis=1), axis=1)


def estimate(strata: Sequence[Floats], rng: np.random.Generator) -> Estimate:
    """The interquartile mean over all runs [N] of all strata, with its stratified bootstrap interval."""
    low, high = percentiles(resampled_means(strata, rng))
    return Estimate(value=float(interquartile_mean(np.concatenate(strata))), low=float(low), high=float(high))


def estimated_lead(strata: Sequence[Floats], others: Sequence[Floats], rng: np.random.Generator) -> Estimate:
    """By how much one source's interquartile mean exceeds another's, with the interval of the difference.

    Args:
        strata: of each task, the scores [N] of the source's runs.
        others: likewise of the other source.
        rng: of the draws, which are made independently for the two.
    """
    low, high = percentiles(resampled_means(strata, rng) - resampled_means(others, rng))
    lead = interquartile_mean(np.concatenate(strata)) - interquartile_mean(np.concatenate(others))
    return Estimate(value=float(lead), low=float(low), high=float(high))


def percentiles(samples: Floats) -> Floats:
    """[2, ...] ends of the middle `CONFIDENCE` of the samples [R, ...]."""
    return np.percentile(samples, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)], axis=0)
