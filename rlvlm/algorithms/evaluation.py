"""Episodes of a policy on the true task, in an env and with a generator of their own: training does not notice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray

FIRST_SEED = 1_000_000
"""Evaluation episode i starts from seed FIRST_SEED + i, every time: two evaluations see the same starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedEpisode:
    """One episode of T steps (or turns, or chunks), whatever kind of env it was played in."""

    snapshots: FloatArray
    """[T, S] after each step; the env draws them."""
    env_rewards: FloatArray
    """[T] the true rewards."""
    learned_rewards: FloatArray
    """[T] by the reward source, for plots only; NaN where there is none to ask."""
    reward_name: str = "learned reward"
    """Name of `learned_rewards`, in words."""
    reward_range: tuple[float, float] | None = None
    """The least and the largest that `learned_rewards` can be; None where that is not known."""
    success: NDArray[np.bool_]
    """[T] the env's own test after each step."""
    progress: FloatArray
    """[T] in [0, 1], the simulator's."""
    captions: tuple[str, ...] = ()
    """[T] what the policy said before each step, untrusted; empty where it says nothing."""

    @property
    def is_success(self) -> bool:
        """Whether the env's own test held at any step."""
        return bool(self.success.any())

    @property
    def ends_in_success(self) -> bool:
        """Whether it held after the last step: success may have been lost again."""
        return bool(self.success[-1])

    def reaches(self, min_progress: float) -> bool:
        """Whether progress was at least so much after any step: how an env's milestones are counted."""
        return bool((self.progress >= np.float32(min_progress)).any())

    @property
    def env_return(self) -> float:
        """Sum of the true rewards."""
        return float(self.env_rewards.sum(dtype=np.float64))

    @property
    def learned_return(self) -> float:
        """Sum of the source's rewards; NaN where there is none to ask."""
        return float(self.learned_rewards.sum(dtype=np.float64))


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Result of an algorithm's evaluation."""

    episodes: Sequence[PlayedEpisode]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Whatever else was measured, by names of `rlvlm.core.metrics`, e.g. success under the other decoding."""
    has_success: bool = True
    """Whether the env can tell success; where it cannot, returns are what is compared."""


class Player(Protocol):
    """A policy in an env of its own: `rlvlm eval` and every evaluation during training play by it."""

    def play(self, seeds: Sequence[int]) -> list[PlayedEpisode]:
        """A whole episode from a reset with each seed, in their order."""
        ...


def num_distinct(episodes: Sequence[PlayedEpisode]) -> int:
    """How many of `episodes` differ.

    Those that are equal to the bit are one episode: a deterministic policy from one start plays it again and again, and
    that says nothing more. So an interval is that of as many episodes as are distinct.
    """
    return len({each.snapshots.tobytes() + each.env_rewards.tobytes() for each in episodes})


def evaluate(player: Player, num_episodes: int) -> list[PlayedEpisode]:
    """The first `num_episodes` episodes of every evaluation.

    Args:
        player: of the policy.
        num_episodes: >= 0.
    """
    return player.play(range(FIRST_SEED, FIRST_SEED + num_episodes))
