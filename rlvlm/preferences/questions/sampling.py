"""Which of many candidates are worth asking about, by what the reward model makes of them. Used by the subjects.

Sources: Lee et al. 2021 (PEBBLE), arXiv:2106.05091, sec. 4.2, and its code in Lee et al. 2021 (B-Pref),
arXiv:2111.03026: disagreement, entropy and k-center over ten times as many candidates as there are questions.
Departures: they work on images as well, and k-center runs in the space of the model's features where it looks at
images, of its scaled inputs where it looks at states.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Segment
from rlvlm.preferences.config import Sampling
from rlvlm.preferences.dataset import Examples, Steps
from rlvlm.preferences.model.ensemble import Ensemble

Values = NDArray[np.float64]
Places = NDArray[np.int64]


def p_right_of(returns: FloatArray) -> Values:
    """[K, N] each member's probability that the right side is better, of returns [K, N, 2], by Bradley-Terry."""
    margin = (returns[..., 1] - returns[..., 0]).astype(np.float64)
    return 0.5 * (1 + np.tanh(margin / 2))  # the logistic function, which cannot overflow in this form


def disagreement(returns: FloatArray) -> Values:
    """How far the members are apart about each candidate.

    Args:
        returns: [K, N, S] predicted returns of its sides.

    Returns:
        [N] standard deviation over the members, of P(right is better) for pairs and of the reward for single segments.
    """
    return (p_right_of(returns) if returns.shape[-1] == 2 else returns[..., 0].astype(np.float64)).std(axis=0)


def entropy(returns: FloatArray) -> Values:
    """[N] how unsure the members are about each pair, nats: the mean of their entropies; `returns` are [K, N, 2]."""
    p = np.clip(p_right_of(returns), 1e-12, 1 - 1e-12)
    return -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean(axis=0)


def largest(values: Values, num: int) -> Places:
    """[num] where the largest of `values` [N] are, ascending; among equals the earlier ones."""
    return np.sort(np.argsort(-values, kind="stable")[:num])


def farthest_first(points: FloatArray, centres: FloatArray, num: int) -> Places:
    """A greedy k-center: one after the other the point that is farthest from everything chosen so far.

    Args:
        points: [N, E] candidates.
        centres: [M, E] chosen before; M may be 0, then the first point comes first.
        num: <= N.

    Returns:
        [num] places in `points`, ascending.

    Source: Sener and Savarese 2018, arXiv:1708.00489, algorithm 1.
    """
    nearest = np.full(len(points), np.inf)
    for centre in centres:
        nearest = np.minimum(nearest, _squared_distances(points, centre))
    chosen: list[int] = []
    for _ in range(num):
        chosen.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, _squared_distances(points, points[chosen[-1]]))
        nearest[chosen] = -1.0  # never twice, not even where points coincide
    return np.sort(np.array(chosen, np.int64))


def choose(
    candidates: Sequence[tuple[Segment, ...]], num: int, *, sampling: Sampling, ensemble: Ensemble, known: Examples
) -> Places:
    """Which `num` of the candidates to ask about, in the order in which they were drawn.

    Args:
        candidates: N of S segments each, all of one length; N >= num.
        num: >= 1.
        sampling: not uniform.
        ensemble: fitted at least once; each distinct image is read once.
        known: what was answered before.
    """
    steps = Steps.of_segments([segment for sides in candidates for segment in sides])
    shape = len(candidates), len(candidates[0])
    if sampling == "k_center":
        return farthest_first(
            _embed(ensemble, steps, *shape), _embed(ensemble, known.steps(), len(known), shape[1]), num
        )
    returns = ensemble.predict(steps)
    returns = returns.reshape(len(returns), *shape, -1).sum(axis=-1)
    return largest({"disagreement": disagreement, "entropy": entropy}[sampling](returns), num)


def _embed(ensemble: Ensemble, steps: Steps, num: int, num_sides: int) -> FloatArray:
    """[N, S * E] a point per question: the mean features of the steps of each side, side by side."""
    features = ensemble.features(steps)
    return features.reshape(num, num_sides, -1, features.shape[-1]).mean(axis=2).reshape(num, -1)


def _squared_distances(points: FloatArray, centre: FloatArray) -> Values:
    return np.square(points - centre).sum(axis=1, dtype=np.float64)
