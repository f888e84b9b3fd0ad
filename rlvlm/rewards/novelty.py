"""Novelty: distance of a state from those visited before. Rewards exploration before the first labels come."""

from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray, Transitions
from rlvlm.rewards.growing import GrowingArray
from rlvlm.rewards.source import Labelling, RewardSource, SourceContext

if TYPE_CHECKING:
    from scipy.spatial import KDTree

_LEAST_RECENT = 512
"""Number of new states from which the large tree may be rebuilt."""


class VisitedStates:
    """Visited states [N, D] with nearest-neighbour distances, by two k-d trees (a run asks about all states so far).

    Building a tree over all states takes a hundred times as long as a query, so recent states have their own tree until
    they are a tenth of all. Distances do not depend on the split, so checkpoints do not change a run's rewards.

    Args:
        size: number D of components.
    """

    def __init__(self, size: int) -> None:
        self._rows = GrowingArray((size,), np.float64)
        # one of the two may be missing: the older before there are enough states, the recent one just after a rebuild
        self._trees: tuple[KDTree | None, KDTree | None] = (None, None)
        """Trees of the older and of the more recent states."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> NDArray[np.float64]:
        return self._rows.rows

    def append(self, rows: FloatArray) -> None:
        from scipy.spatial import KDTree  # slow to import, and most sources need no neighbours

        self._rows.append(rows)
        old = self._trees[0]
        num_old = 0 if old is None else old.n
        # rebuilt when the states have grown by a tenth: all rebuilds together cost eleven times the last one
        num_recent = len(self) - num_old
        if num_recent >= max(_LEAST_RECENT, num_old // 10):
            self._trees = (KDTree(self.rows), None)
        else:
            self._trees = (old, KDTree(self.rows[num_old:]))

    def distances(self, points: NDArray[np.float64], k: int) -> NDArray[np.float64]:
        """Returns the Euclidean distance of each point to its k-th nearest neighbour, without the nearest one.

        A point that is itself among the states is its own nearest, so this is the k-th other one.

        Args:
            points: [B, D].
            k: neighbour, >= 1; if N <= k the farthest state is used.

        Returns:
            [B] distances.
        """
        rank = min(k, len(self) - 1)
        # the nearest rank + 1 of each tree contain those of both together
        found = [
            np.reshape(tree.query(points, rank + 1)[0], (len(points), -1)) for tree in self._trees if tree is not None
        ]
        return np.partition(np.concatenate(found, axis=1), rank, axis=1)[:, rank]


class RunningSpread(Stateful):
    """Running standard deviation of all numbers seen so far.

    Source: Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance", the rule for joining two sets.
    """

    STATE = ("_count", "_mean", "_squares")

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0

    @property
    def std(self) -> float:
        """Population standard deviation; 0 before the second number."""
        return float(np.sqrt(self._squares / self._count)) if self._count else 0.0

    def add(self, values: NDArray[np.float64]) -> None:
        """Adds numbers [M], M >= 1."""
        # M2 = M2_a + M2_b + d^2 n_a n_b / (n_a + n_b), d the difference of the means
        shift = float(values.mean()) - self._mean
        total = self._count + len(values)
        self._squares += float(((values - values.mean()) ** 2).sum()) + shift**2 * self._count * len(values) / total
        self._mean += shift * len(values) / total
        self._count = total


class NoveltyReward(RewardSource):
    """Reward by state entropy: distance to the k-th nearest neighbour among all visited states, over its running std.

    Source: Lee et al. 2021 (PEBBLE), arXiv:2106.05091, sec. 4.1. Departures: the distance itself and not its logarithm,
    divided by its running standard deviation, as in the authors' experiments.

    Args:
        k: index of the neighbour, >= 1.
        obs_size: size D of an observation.
    """

    labelling = Labelling.ON_DRAW

    def __init__(self, k: int, obs_size: int) -> None:
        if k < 1:
            raise ValueError(f"k must be >= 1, got {k}; the 0-th neighbour of a state is itself")
        self._k = k
        self._states = VisitedStates(obs_size)
        self._spread = RunningSpread()
        self._version = 0

    @classmethod
    def build(cls, context: SourceContext) -> Self:
        return cls(context.novelty_neighbour, context.env.observation_space.shape[0])

    @property
    def version(self) -> int:
        return self._version

    def observe(self, obs: FloatArray) -> None:
        """Adds visited states [N, D]."""
        self._states.append(obs)
        self._version += 1

    def forget(self) -> None:
        """Drops the states, whose memory grows with every step."""
        self._states = VisitedStates(self._states.rows.shape[1])

    def label(self, transitions: Transitions) -> FloatArray:
        """Returns rewards [B] for being in `transitions.obs`, >= 0.

        Raises:
            ValueError: no state was observed yet.
        """
        if not len(self._states):
            raise ValueError("novelty is measured against observed states, and there are none; call `observe` first")
        distances = self._states.distances(transitions.obs.astype(np.float64), self._k)
        # before the division, so that the very first batch has a scale
        self._spread.add(distances)
        return (distances / (self._spread.std or 1.0)).astype(np.float32)

    def get_state(self) -> dict[str, Any]:
        """Returns everything that `set_state` needs to continue exactly: numbers and arrays."""
        return {
            # in the env's own precision: float64 is for the differences, and would double the checkpoint
            "states": self._states.rows.astype(np.float32),
            "spread": self._spread.get_state(),
            "version": self._version,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._states = VisitedStates(state["states"].shape[1])
        self._states.append(state["states"])
        self._spread.set_state(state["spread"])
        self._version = int(state["version"])
