"""A small model of a judge's answers: an ensemble of networks in NumPy, fitted to scores or to comparisons.

It stands for the reward that a policy would follow, as a reward model or a critic does, and averages random errors
where a search on the judge itself would pick them out. NumPy alone: a bench needs no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray

Floats = NDArray[np.float32]
MEMBERS, HIDDEN = 4, 64
_STEPS, _BATCH = 500, 64
_LR, _DECAY = 3e-3, 0.03
_MAX_LEVELS = 8
"""Number of different whole numbers up to which a column of a snapshot counts as a kind, such as a colour."""
_MAX_PAIRED = 14
"""Number of columns up to which the distance of any two is a feature."""


@dataclass(frozen=True, slots=True)
class Features:
    """Features of an episode's end, given its first and last snapshot: positions, their differences, and kinds."""

    kinds: tuple[tuple[int, tuple[float, ...]], ...]
    """Columns that hold kinds, with their values."""
    columns: tuple[int, ...]
    """Columns that hold numbers and change."""
    centre: Floats
    scale: Floats
    landmarks: Callable[[FloatArray], FloatArray] | None
    """Positions of things [N, K, D] in snapshots, for envs that know them."""

    @classmethod
    def of(cls, ends: FloatArray, landmarks: Callable[[FloatArray], FloatArray] | None = None) -> "Features":
        """Returns the features that distinguish the snapshots `ends` [N, S]."""
        kinds, columns = [], []
        for column in range(ends.shape[1]):
            values = np.unique(ends[:, column])
            if len(values) < 2:
                continue
            if len(values) <= _MAX_LEVELS and (values == np.rint(values)).all():
                kinds.append((column, tuple(values.tolist())))
            else:
                columns.append(column)
        raw = cls._raw(ends, ends, tuple(kinds), tuple(columns), landmarks)
        return cls(tuple(kinds), tuple(columns), raw.mean(0), raw.std(0) + np.float32(1e-6), landmarks)

    @staticmethod
    def _raw(
        first: FloatArray,
        last: FloatArray,
        kinds: tuple[tuple[int, tuple[float, ...]], ...],
        columns: tuple[int, ...],
        landmarks: Callable[[FloatArray], FloatArray] | None,
    ) -> Floats:
        numbers = last[:, columns]
        parts = [numbers, numbers - first[:, columns]]
        parts += [(last[:, [column]] == np.array(values)).astype(np.float32) for column, values in kinds]
        if 1 < len(columns) <= _MAX_PAIRED:
            left, right = np.triu_indices(len(columns), 1)
            offsets = numbers[:, left] - numbers[:, right]
            parts += [offsets, np.abs(offsets)]
        elif landmarks is not None:
            things = landmarks(last)  # [N, K, D]
            left, right = np.triu_indices(things.shape[1], 1)
            offsets = things[:, left] - things[:, right]
            parts += [offsets.reshape(len(last), -1), np.linalg.norm(offsets, axis=2)]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def __call__(self, first: FloatArray, last: FloatArray) -> Floats:
        """Returns [N, F] features of episodes that began at `first` [N, S] and ended at `last` [N, S]."""
        raw = self._raw(first, last, self.kinds, self.columns, self.landmarks)
        return np.clip((raw - self.centre) / self.scale, -5, 5)


Weights = list[Floats]


@dataclass(frozen=True, slots=True)
class Ensemble:
    """`MEMBERS` networks of two hidden layers, all computed at once."""

    weights: Weights
    """Three matrices [M, in, out], each followed by its bias [M, 1, out]."""

    def __call__(self, features: Floats) -> Floats:
        """Returns [N], the mean prediction for features [N, F]."""
        return _forward(self.weights, np.broadcast_to(features, (MEMBERS, *features.shape)))[-1][..., 0].mean(0)


def _forward(weights: Weights, features: Floats) -> list[Floats]:
    """Returns the activations of each layer for features [M, N, F]; the last is the output [M, N, 1]."""
    layers = [features]
    for index in range(0, len(weights), 2):
        out = layers[-1] @ weights[index] + weights[index + 1]
        layers.append(np.maximum(out, 0) if index < len(weights) - 2 else out)
    return layers


def _backward(weights: Weights, layers: list[Floats], error: Floats) -> Weights:
    """Returns the gradients of `weights`, given the loss's gradient `error` [M, N, 1] by the output."""
    gradients: Weights = []
    for index in range(len(weights) - 2, -1, -2):
        below = layers[index // 2]
        gradients = [below.swapaxes(1, 2) @ error, error.sum(1, keepdims=True), *gradients]
        if index:
            error = (error @ weights[index].swapaxes(1, 2)) * (below > 0)
    return gradients


def fit_scores(features: Floats, scores: Floats, seed: int) -> Ensemble:
    """Returns an ensemble fitted to scores [N] of features [N, F] by squared error, scores scaled to [0, 1]."""
    low, high = float(scores.min()), float(scores.max())
    wanted = (scores - low) / (high - low + 1e-6)

    def gradient(weights: Weights, chosen: NDArray[np.int64]) -> Weights:
        layers = _forward(weights, features[chosen])
        error = 2 * (layers[-1] - wanted[chosen][..., None]) / chosen.shape[1]
        return _backward(weights, layers, error.astype(np.float32))

    return _fit(features.shape[1], len(features), gradient, seed)


def fit_pairs(left: Floats, right: Floats, p_right: Floats, seed: int) -> Ensemble:
    """Returns an ensemble fitted to comparisons of features `left` and `right`, [N, F] each.

    Args:
        left: features of the left sides.
        right: features of the right sides.
        p_right: [N] labels in [0, 1], 0.5 for no preference.
        seed: seed of weights and draws.

    Source: the Bradley-Terry model, Christiano et al. 2017, arXiv:1706.03741, sec. 2.2.3.
    """

    def gradient(weights: Weights, chosen: NDArray[np.int64]) -> Weights:
        both = [_forward(weights, sides[chosen]) for sides in (left, right)]
        margin = both[1][-1] - both[0][-1]  # [M, B, 1]
        # d/dm of softplus(m) - p m is sigmoid(m) - p
        error = ((1 / (1 + np.exp(-margin)) - p_right[chosen][..., None]) / chosen.shape[1]).astype(np.float32)
        parts = (_backward(weights, both[0], -error), _backward(weights, both[1], error))
        return [ours + theirs for ours, theirs in zip(*parts, strict=True)]

    return _fit(left.shape[1], len(left), gradient, seed)


def _fit(
    num_features: int, count: int, gradient: Callable[[Weights, NDArray[np.int64]], Weights], seed: int
) -> Ensemble:
    """Minimises a loss by AdamW, each member on a bootstrap draw of the data of its own.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    """
    rng = np.random.default_rng(seed)
    sizes = [num_features, HIDDEN, HIDDEN, 1]
    weights: Weights = []
    for below, above in zip(sizes, sizes[1:], strict=False):
        bound = 1 / np.sqrt(below)
        weights += [
            rng.uniform(-bound, bound, (MEMBERS, below, above)).astype(np.float32),
            rng.uniform(-bound, bound, (MEMBERS, 1, above)).astype(np.float32),
        ]
    drawn = rng.integers(count, size=(MEMBERS, count))
    means, squares = ([np.zeros_like(weight) for weight in weights] for _ in range(2))
    rows = np.arange(MEMBERS)[:, None]
    for step in range(1, _STEPS + 1):
        chosen = drawn[rows, rng.integers(count, size=(MEMBERS, _BATCH))]
        rate = _LR * (1 - step / (_STEPS + 1))
        for weight, slope, mean, square in zip(weights, gradient(weights, chosen), means, squares, strict=True):
            mean += 0.1 * (slope - mean)
            square += 0.001 * (slope**2 - square)
            change = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
            weight -= np.float32(rate) * (change + np.float32(_DECAY) * weight)
    return Ensemble(weights)
