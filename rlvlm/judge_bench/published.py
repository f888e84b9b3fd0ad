"""Figures of other benches, by their definitions, from scores of whole episodes of known quality.

RoboReward: a score in [0, 1] is the rating 1 + 4 score, and the error counts in ratings. Robometer: share of pairs of
episodes of a task in which the better one scores higher. Value-order correlation (GVL) is `voc` of `score_figures`.
"""

from collections.abc import Sequence

import numpy as np

from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.figures import Figures, Floats, outcome_of, resampled
from rlvlm.judge_bench.items import CASES, Item

_NUM_RATINGS = 5
_THIRDS = 3


def published_figures(items: Sequence[Item], answers: Sequence[Answer]) -> Figures:
    """Returns figures from the `answers` [N] to `items` [N] that are about whole episodes and pairs.

    Returns:
        `mae`: mean absolute error of the rating, in [0, 4]. `confusion`: [5, 5] counts by true rating and by the
        judge's. `kendall_tau`: see `ranking_tau`. `preference`: see `preference_accuracy`. `compared`: among all
        answers to pairs, the share for the better side, a tie counting half. None if nothing was asked. Empty if no
        episode was scored and no pair asked about.
    """
    rows = [
        (item.goal, item.truth[0], answer.value)
        for item, answer in zip(items, answers, strict=True)
        if item.is_video and item.case in CASES and np.isfinite(answer.value)
    ]
    outcomes = [outcome_of(item, answer) for item, answer in zip(items, answers, strict=True) if item.case == "pair"]
    outcomes = [outcome for outcome in outcomes if outcome not in ("tie", "unknown")]
    if not rows and not outcomes:
        return {}
    goals, table = [goal for goal, _, _ in rows], np.array([row[1:] for row in rows], float).reshape(-1, 2)
    rated = ratings(table)
    compared = np.array([{"right": 1.0, "undecided": 0.5}.get(outcome, 0.0) for outcome in outcomes])
    return {
        "mae": resampled(rated, lambda drawn: float(np.abs(drawn[:, 0] - drawn[:, 1]).mean())),
        "confusion": confusion(rated).tolist() if rows else None,
        "kendall_tau": ranking_tau(goals, table),
        "preference": preference_accuracy(goals, table),
        "compared": resampled(compared, lambda drawn: float(drawn.mean())),
    }


def ratings(shares: Floats) -> Floats:
    """Returns ratings 1 to 5 of shares in [0, 1]; halves round to even, as in Robometer (0.125 is 1 and 0.375 is 3).

    Source: RoboReward scores (rating - 1) / 4; Robometer's evaluation rounds 4 times the score by numpy's rule.
    """
    return 1 + np.round((_NUM_RATINGS - 1) * shares)


def confusion(rated: Floats) -> Floats:
    """Returns [5, 5] counts of given ratings (columns) by true ones (rows), from `rated` [N, 2] true and given."""
    counts = np.zeros((_NUM_RATINGS, _NUM_RATINGS), int)
    np.add.at(counts, tuple(rated.astype(int).T - 1), 1)
    return counts


def ranking_tau(goals: Sequence[str], table: Floats) -> float | None:
    """Returns Kendall's tau between scores and qualities of episodes, the mean over tasks.

    It is tau-a: the mean over pairs of different quality of +1 in order, -1 out of order and 0 for equal scores. If
    qualities are failure, suboptimal and successful (0, 0.5 and 1), it is that of every tuple with one episode of each
    of the task's qualities; finer qualities are cut into thirds, and it is that of the thirds' mean scores.

    Args:
        goals: [N] tasks of the episodes.
        table: [N, 2] true quality in [0, 1], and score.

    Returns:
        In [-1, 1]; None if no task has two qualities.

    Source: Robometer's policy ranking.
    """
    is_labelled = set(table[:, 0].tolist()) <= {0.0, 0.5, 1.0}
    taus = []
    for goal in dict.fromkeys(goals):
        own = table[[place for place, other in enumerate(goals) if other == goal]]
        levels = np.round(2 * own[:, 0]) if is_labelled else np.minimum((own[:, 0] * _THIRDS).astype(int), _THIRDS - 1)
        scores = [own[levels == level, 1] for level in np.unique(levels)]
        if len(scores) < 2:
            continue
        ranked = scores if is_labelled else [part.mean(keepdims=True) for part in scores]
        # the mean over all tuples equals that over all pairs of two qualities, however many tuples there are
        signs = [
            np.sign(ranked[high][:, None] - ranked[low]).mean() for high in range(len(ranked)) for low in range(high)
        ]
        taus.append(float(np.mean(signs)))
    return float(np.mean(taus)) if taus else None


def preference_accuracy(goals: Sequence[str], table: Floats) -> float | None:
    """Returns the share of pairs of episodes of one task with different quality in which the better one scores higher.

    Takes the arguments of `ranking_tau`; counts pairs of all tasks together; None if there is none.

    Source: Robometer's preference evaluation. Departure: equal scores count half; there the order of the pair decides.
    """
    hits = count = 0.0
    for goal in dict.fromkeys(goals):
        quality, score = table[[place for place, other in enumerate(goals) if other == goal]].T
        better = quality[:, None] > quality
        margins = np.sign(score[:, None] - score)[better]
        hits, count = hits + float((margins + 1).sum() / 2), count + len(margins)
    return hits / count if count else None
