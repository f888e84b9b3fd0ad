"""Evaluation episodes of a policy on the true task, with their own env and generator, independent of training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames

Draw = Callable[[FloatArray, int], Frames]
"""Function from snapshots [N, S] and a side in pixels to images [N, H, W, 3]."""

FIRST_SEED = 1_000_000
"""Seed of the first evaluation episode; episode i starts from this plus i, so that all evaluations have equal
starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedEpisode:
    """One episode of T steps (or turns, or chunks), in any kind of env."""

    snapshots: FloatArray
    """[T, S] snapshots after each step."""
    env_rewards: FloatArray
    """[T] the true rewards."""
    learned_rewards: FloatArray
    """[T] rewards of the reward source, only for plots; NaN if there is no source to ask."""
    reward_name: str = "learned reward"
    """Name of `learned_rewards`, in words."""
    reward_range: tuple[float, float] | None = None
    """Minimum and maximum of `learned_rewards`; None if unknown."""
    success: NDArray[np.bool_]
    """[T] result of the env's own test after each step."""
    progress: FloatArray
    """[T] true progress in [0, 1] after each step."""
    captions: tuple[str, ...] = ()
    """[T] text of the policy before each step, untrusted; empty if it writes none."""

    @property
    def is_success(self) -> bool:
        """Whether the env's own test held after any step."""
        return bool(self.success.any())

    @property
    def ends_in_success(self) -> bool:
        """Whether the env's own test held after the last step: success may be lost again."""
        return bool(self.success[-1])

    def reaches(self, min_progress: float) -> bool:
        """Returns whether progress was at least `min_progress` after any step, as for an env's milestones."""
        return bool((self.progress >= np.float32(min_progress)).any())

    @property
    def env_return(self) -> float:
        """Sum of the true rewards."""
        return float(self.env_rewards.sum(dtype=np.float64))

    @property
    def learned_return(self) -> float:
        """Sum of the reward source's rewards; NaN if there is no source to ask."""
        return float(self.learned_rewards.sum(dtype=np.float64))


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Result of an algorithm's evaluation."""

    episodes: Sequence[PlayedEpisode]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics by names in `rlvlm.core.metrics`, e.g. success under the other decoding."""
    has_success: bool = True
    """Whether the env can tell success; if not, runs are compared by return."""


class Player(Protocol):
    """A policy in an env of its own, used by `rlvlm eval` and every evaluation during training."""

    def play(self, seeds: Sequence[int]) -> list[PlayedEpisode]:
        """Plays a whole episode from each seed, in their order."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Players:
    """The players of `rlvlm eval`; none of them needs Ray or the judge."""

    own: Player
    """Player of a checkpoint's policy."""
    name: str = "policy"
    """Name of `own` among the others."""
    draw: Draw
    """Draws the snapshots of its episodes."""
    others: Mapping[str, Player] = field(default_factory=dict)
    """Players it is compared with, by display name: another decoding, the policy before its training, baselines."""
    has_success: bool = True
    """Whether the env can tell success."""
    milestones: Mapping[str, float] = field(default_factory=dict)
    """Milestones on the way to success, by name, and the progress at which it is reached."""


def num_distinct(episodes: Sequence[PlayedEpisode]) -> int:
    """Returns the number of distinct episodes.

    Episodes that are equal to the bit count once: a deterministic policy repeats the episode of a start, which adds no
    information. So confidence intervals use the number of distinct episodes.
    """
    return len({each.snapshots.tobytes() + each.env_rewards.tobytes() for each in episodes})


def evaluate(player: Player, num_episodes: int) -> list[PlayedEpisode]:
    """Plays the first `num_episodes` episodes of every evaluation.

    Args:
        player: player of the policy.
        num_episodes: >= 0.
    """
    return player.play(range(FIRST_SEED, FIRST_SEED + num_episodes))
