"""Novelty: how far a state lies from those visited before. Rewards exploration before the first labels come."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Transitions
from rlvlm.rewards.growing import GrowingArray
from rlvlm.rewards.source import Labelling, RewardSource, SourceContext

_ROWS_AT_ONCE = 512
"""Bounds the memory of all distances: 4 KB for each state visited so far."""


def neighbour_distances(points: NDArray[np.float64], states: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Euclidean distance of each point to its k-th nearest neighbour among `states`, the nearest one not counted.

    A point that is itself among the states is its own nearest, so this is the k-th other one.

    Args:
        points: [B, D].
        states: [N, D], N >= 1; where N <= k the farthest state is taken.
        k: >= 1.

    Returns:
        [B] distances.
    """
    # |a|^2 + |b|^2 - 2ab needs one matrix product for all distances. The subtraction cancels digits; in float64, at
    # coordinates of order one, what is left is right to 1e-7.
    squared = (-2 * points) @ states.T  # [B, N]
    squared += np.einsum("nd,nd->n", states, states)  # short of |point|^2, which is the same along a row
    # a point is itself among the states: the nearest, of rank 0, is not counted
    rank = min(k, len(states) - 1)
    # only the k-th smallest is needed: partition is linear where a sort is not
    squared.partition(rank, axis=1)
    return np.sqrt(np.maximum(squared[:, rank] + np.einsum("bd,bd->b", points, points), 0.0))


class RunningSpread:
    """Standard deviation of all numbers seen so far.

    Source: Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance", the rule for joining two sets.
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0

    @property
    def std(self) -> float:
        """Population standard deviation; 0 before the second number."""
        return float(np.sqrt(self._squares / self._count)) if self._count else 0.0

    def add(self, values: NDArray[np.float64]) -> None:
        """Takes in `[M]` numbers, M >= 1."""
        # M2 = M2_a + M2_b + d^2 n_a n_b / (n_a + n_b), d the difference of the means
        shift = float(values.mean()) - self._mean
        total = self._count + len(values)
        self._squares += float(((values - values.mean()) ** 2).sum()) + shift**2 * self._count * len(values) / total
        self._mean += shift * len(values) / total
        self._count = total

    def get_state(self) -> dict[str, Any]:
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def set_state(self, state: dict[str, Any]) -> None:
        self._count, self._mean, self._squares = int(state["count"]), float(state["mean"]), float(state["squares"])


class NoveltyReward(RewardSource):
    """State entropy as reward: distance to the k-th nearest neighbour among all visited states, over its running std.

    Source: Lee et al. 2021 (PEBBLE), arXiv:2106.05091, sec. 4.1. Departures: the distance itself and not its
    logarithm, divided by its running standard deviation, as in the authors' experiments.

    Args:
        k: which neighbour, >= 1.
        obs_size: D.
    """

    labelling = Labelling.ON_DRAW

    def __init__(self, k: int, obs_size: int) -> None:
        if k < 1:
            raise ValueError(f"k must be >= 1, got {k}; the 0-th neighbour of a state is itself")
        self._k = k
        self._states = GrowingArray((obs_size,), np.float64)
        self._spread = RunningSpread()
        self._version = 0

    @classmethod
    def build(cls, context: SourceContext) -> Self:
        """Of the task's observations."""
        return cls(context.novelty_neighbour, context.env.observation_space.shape[0])

    @property
    def version(self) -> int:
        return self._version

    def observe(self, obs: FloatArray) -> None:
        """Remembers visited states `[N, D]`."""
        self._states.append(obs)
        self._version += 1

    def forget(self) -> None:
        """Forgets the states, whose memory grows with every step."""
        self._states = GrowingArray(self._states.rows.shape[1:], np.float64)

    def label(self, transitions: Transitions) -> FloatArray:
        """Rewards `[B]` for being in `transitions.obs`, >= 0.

        Raises:
            ValueError: no state was observed yet.
        """
        if not len(self._states):
            raise ValueError("novelty is measured against observed states, and there are none; call `observe` first")
        obs = transitions.obs.astype(np.float64)
        # the distances of a large batch to all states at once would take gigabytes
        parts = (obs[first : first + _ROWS_AT_ONCE] for first in range(0, len(obs), _ROWS_AT_ONCE))
        distances = np.concatenate([neighbour_distances(part, self._states.rows, self._k) for part in parts])
        # before the division, so that the very first batch has a scale
        self._spread.add(distances)
        return (distances / (self._spread.std or 1.0)).astype(np.float32)

    def get_state(self) -> dict[str, Any]:
        """Everything that `set_state` needs to go on exactly: numbers and arrays."""
        return {
            # as the env gave them: float64 is for the differences, and would double the checkpoint
            "states": self._states.rows.astype(np.float32),
            "spread": self._spread.get_state(),
            "version": self._version,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self._states = GrowingArray(state["states"].shape[1:], np.float64)
        self._states.append(state["states"])
        self._spread.set_state(state["spread"])
        self._version = int(state["version"])
