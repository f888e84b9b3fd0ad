"""Robust means with confidence intervals, and the ranking of sources by them, in plain sentences.

Source: Agarwal et al. 2021, arXiv:2108.13264, sec. 4: interquartile means with stratified bootstrap intervals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from rlvlm.reports.results import Results
from rlvlm.runs.files.scores import Floats

RESAMPLES = 5_000
CONFIDENCE = 0.95
FEW_SEEDS = 3
"""Number of finished runs per task and source below which an interval supports no conclusion."""
SEED = 0
"""Seed of the bootstrap, so that a report never changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number with its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.low > 0 or self.high < 0


def interquartile_mean(values: ArrayLike, axis: int = -1) -> Floats:
    """Returns the mean of the middle half of the values along an axis; the outermost ones count partially.

    Args:
        values: [..., N, ...] with N >= 1 along `axis`.
        axis: axis of the values.

    Returns:
        Means, in the values' shape without `axis`.

    Source: Agarwal et al. 2021, arXiv:2108.13264, sec. 4.3.
    """
    # the k-th of N sorted values covers [k, k + 1]; its weight is the length of this within [N / 4, 3 N / 4]
    ordered = np.sort(np.moveaxis(np.asarray(values, np.float64), axis, -1), axis=-1)
    count = ordered.shape[-1]
    edges = np.arange(count + 1)
    weights = np.clip(np.minimum(edges[1:], 0.75 * count) - np.maximum(edges[:-1], 0.25 * count), 0, None)
    return (ordered * weights).sum(-1) / weights.sum()


def resampled_means(strata: Sequence[Floats], rng: np.random.Generator, resamples: int = RESAMPLES) -> Floats:
    """Returns [R, ...] interquartile means of runs resampled with replacement, each stratum in its own size.

    Args:
        strata: for each task, the runs' values [N, ...]; the trailing axes (e.g. env steps) are equal in all, and a run
            keeps its whole row.
        rng: source of the draws.
        resamples: number R of resamples.
    """
    # runs are exchangeable within a task, never across tasks
    drawn = [runs[rng.integers(len(runs), size=(resamples, len(runs)))] for runs in strata]
    return interquartile_mean(np.concatenate(drawn, axis=1), axis=1)


def estimate(strata: Sequence[Floats], rng: np.random.Generator) -> Estimate:
    """Returns the interquartile mean over all runs [N] of all strata, with its stratified bootstrap interval."""
    low, high = percentiles(resampled_means(strata, rng))
    return Estimate(value=float(interquartile_mean(np.concatenate(strata))), low=float(low), high=float(high))


def estimated_lead(strata: Sequence[Floats], others: Sequence[Floats], rng: np.random.Generator) -> Estimate:
    """Returns the difference of two sources' interquartile means, with its interval.

    Args:
        strata: for each task, the scores [N] of the source's runs.
        others: for each task, the scores of the other source's runs.
        rng: source of the draws, which are independent for the two sources.
    """
    # the sources' runs are independent, so their draws are too: pairing them would distort the interval
    low, high = percentiles(resampled_means(strata, rng) - resampled_means(others, rng))
    lead = interquartile_mean(np.concatenate(strata)) - interquartile_mean(np.concatenate(others))
    return Estimate(value=float(lead), low=float(low), high=float(high))


def percentiles(samples: Floats) -> Floats:
    """Returns the [2, ...] bounds of the middle `CONFIDENCE` of the samples [R, ...]."""
    return np.percentile(samples, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)], axis=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedSource:
    """A source in a ranking, best first."""

    source: str
    score: Estimate
    behind: Estimate | None
    """Lead of the best source over this one; None for the best itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of a comparison."""

    text: str
    ranking: list[RankedSource]


def find(results: Results, tasks: Sequence[str]) -> Finding:
    """Compares the finished runs on `tasks`, over all of them together.

    Args:
        results: the runs to compare.
        tasks: tasks to compare on; a source without a finished run on one of them is left out.
    """
    finals = {
        source: [np.array([run.final for run in results.finished(task, source)]) for task in tasks]
        for source in results.sources
    }
    # a source without runs on some tasks might be compared on easier ones
    strata = {source: each for source, each in finals.items() if each and all(len(runs) for runs in each)}
    if not strata:
        return Finding(text="No run is finished yet, so there is nothing to compare.", ranking=[])
    ranking = rank(strata)
    num_seeds = min(len(runs) for each in strata.values() for runs in each)
    return Finding(text=_sentences(results, ranking, num_seeds), ranking=ranking)


def rank(strata: dict[str, list[Floats]]) -> list[RankedSource]:
    """Returns the sources by their score, best first.

    Args:
        strata: per source and task, the final scores [N] of its runs.
    """
    rng = np.random.default_rng(SEED)
    scores = {source: estimate(each, rng) for source, each in strata.items()}
    # sorted by score, and stable for equal scores: a report never changes
    best, *others = sorted(scores, key=lambda source: -scores[source].value)
    leads = {source: estimated_lead(strata[best], strata[source], rng) for source in others}
    return [RankedSource(source=source, score=scores[source], behind=leads.get(source)) for source in (best, *others)]


def _sentences(results: Results, ranking: Sequence[RankedSource], num_seeds: int) -> str:
    """Returns which source leads, by how much, and whether the runs support it; below `FEW_SEEDS` they do not."""
    best, *others = ranking
    name = results.sources[best.source]
    if not others:
        return f"There is nothing to compare {name} with: its score is {_scored(best.score)}."
    second = others[0]
    assert second.behind is not None
    behind = second.behind
    # one digit more than scores, to show whether the interval contains zero
    interval = f" ({behind.low:.3f} to {behind.high:.3f})" if behind.low < behind.high else ""
    other = results.sources[second.source]
    lead = f"{name}: {_scored(best.score)}; {other}: {_scored(second.score)}; difference {behind.value:.3f}{interval}."
    if num_seeds < FEW_SEEDS:
        seeds = "one finished run" if num_seeds == 1 else f"{num_seeds} finished runs"
        place = f"{name} is ahead of {other}." if behind.value > 0 else f"{name} and {other} are level."
        return f"{place} {lead} With {seeds} per task and source this is a first look: it supports no conclusion."
    # each difference is judged by its own interval: overlapping intervals of two scores say little about the difference
    beaten = [other for other in others if other.behind is not None and other.behind.excludes_zero]
    level = [other for other in others if other not in beaten]
    if not level:
        what = "The interval of the difference excludes zero"
        if len(others) > 1:
            what = f"The intervals of its differences to all {len(others)} others exclude zero"
        return f"Winner: {lead} {what}, so the runs support it."
    if not beaten:
        return f"No winner: {lead} Every difference may be zero, so the runs do not distinguish the sources."
    return (
        f"No single winner: {lead} {_names(results, [best, *level])} cannot be distinguished; that {name} beats "
        f"{_names(results, beaten)} is supported: the intervals of those differences exclude zero."
    )


def _scored(score: Estimate) -> str:
    """Formats a score with its interval, which is left out for one run or equal runs."""
    if score.low == score.high == score.value:
        return f"{score.value:.2f}"
    return f"{score.value:.2f} ({100 * CONFIDENCE:.0f} % interval {score.low:.2f} to {score.high:.2f})"


def _names(results: Results, ranking: Sequence[RankedSource]) -> str:
    names = [results.sources[ranked.source] for ranked in ranking]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
