"""The truth made as coarse as a judge: the control of a rehearsal."""

from dataclasses import dataclass

import numpy as np

from rlvlm.judge_bench.rehearsal.fitted import Floats
from rlvlm.judge_bench.rehearsal.plans import Ends
from rlvlm.judges.agreement import MIN_GAP

_SUCCESS = 2.0
"""Place of a success on the scale of the truth, above all progress."""


@dataclass(frozen=True, slots=True)
class CoarseScores:
    """Scores that follow the truth as far as a judge's do, and are wrong at random as often.

    Attributes:
        places: [N] truths, rising.
        levels: [N] the judge's mean score there, as far as it rises with the truth: a judge of two levels has two.
        errors: [M] differences between the judge's scores of two neighbours, moments of one episode one step apart.
            A judge that always errs alike, say on the hand and not the block, gives neighbours the same.
    """

    places: Floats
    levels: Floats
    errors: Floats

    @classmethod
    def of(cls, ends: Ends, scores: Floats) -> "CoarseScores":
        """Measures a judge by its `scores` [N] of ends that no search has chosen, NaN where there is none.

        Neighbours follow each other and share their first snapshot.
        """
        from scipy.optimize import isotonic_regression  # takes half a second

        known = np.isfinite(scores)
        truths = np.where(ends.success, _SUCCESS, ends.progress)[known]
        order = np.argsort(truths, kind="stable")
        places, points = np.unique(truths[order], return_inverse=True)
        counts = np.bincount(points)
        means = np.bincount(points, scores[known][order]) / counts
        levels = isotonic_regression(means, weights=counts).x
        fitted = np.interp(np.where(ends.success, _SUCCESS, ends.progress), places, levels)
        pairs = [
            place
            for place in range(len(ends) - 1)
            if known[place]
            and known[place + 1]
            and np.array_equal(ends.first[place], ends.first[place + 1])
            and len(ends.shown[place + 1]) == len(ends.shown[place]) + 1
        ]
        gaps = np.array([scores[p + 1] - scores[p] - (fitted[p + 1] - fitted[p]) for p in pairs], np.float32)
        return cls(places.astype(np.float32), levels.astype(np.float32), gaps)

    @property
    def noise(self) -> float:
        """Standard deviation of a score's random error: a difference has the errors of both."""
        return float(np.sqrt((self.errors**2).mean() / 2)) if len(self.errors) else 0.0

    def __call__(self, ends: Ends, rng: np.random.Generator) -> Floats:
        """Returns [N] scores of ends."""
        levels = np.interp(np.where(ends.success, _SUCCESS, ends.progress), self.places, self.levels)
        return (levels + self.noise * rng.normal(size=len(ends))).astype(np.float32)


_GAPS = (0.05, 0.1, 0.2, 0.4)
"""Bounds of the bins of differences in truth in which labels are counted."""
_MIN_IN_BIN = 5


@dataclass(frozen=True, slots=True)
class CoarseLabels:
    """Labels of pairs that follow the truth as often as a judge's do at such a gap, and are wrong at random else.

    Attributes:
        by_gap: for each bin of gaps the judge's labels, 1 for the side with more progress.
    """

    by_gap: tuple[Floats, ...]

    @classmethod
    def of(cls, left: Ends, right: Ends, labels: Floats) -> "CoarseLabels":
        """Measures a judge by its `labels` [N] of pairs that no search has chosen, NaN where there is none."""
        gaps = right.worth - left.worth
        known = np.isfinite(labels) & (np.abs(gaps) > MIN_GAP)
        toward = np.where(gaps > 0, labels, 1 - labels)[known]
        bins = np.digitize(np.abs(gaps[known]), _GAPS)
        parts = [toward[bins == index] for index in range(len(_GAPS) + 1)]
        # where no such pair was met, the labels of all stand in
        return cls(tuple(part if len(part) >= _MIN_IN_BIN else toward for part in parts))

    @property
    def wrong(self) -> float:
        """Share of labels for the wrong side, the bins counting alike."""
        return float(np.mean([1 - part.mean() for part in self.by_gap]))

    def __call__(self, left: Ends, right: Ends, rng: np.random.Generator) -> Floats:
        """Returns [N] labels of pairs of ends."""
        gaps = right.worth - left.worth
        bins = np.digitize(np.abs(gaps), _GAPS)
        toward = np.array([rng.choice(self.by_gap[index]) for index in bins.tolist()], np.float32)
        labels = np.where(gaps > 0, toward, 1 - toward)
        return np.where(np.abs(gaps) > MIN_GAP, labels, 0.5).astype(np.float32)
