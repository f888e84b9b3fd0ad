"""Steps, episodes and parts of them, of envs that are stepped with a vector of numbers."""

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
Frames = NDArray[np.uint8]
"""Images, [N, H, W, 3] RGB."""
Moments = TypeVar("Moments", bound=NDArray[Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Transitions:
    """A batch of single steps."""

    obs: FloatArray
    """[B, D] before the action."""
    actions: FloatArray
    """[B, A] in [-1, 1]."""
    next_obs: FloatArray
    """[B, D] after the action."""
    terminated: FloatArray
    """[B] 1 where the episode ended for good (a time limit is not an end)."""
    env_rewards: FloatArray
    """[B] the env's true reward. For metrics and oracle teachers only."""
    success: FloatArray
    """[B] 1 where the env's own success test held after the action. For the source `success` only."""
    snapshots: FloatArray
    """[B, S] of the state after the action; a StepEnv can draw it."""

    def part(self, chosen: NDArray[np.bool_]) -> "Transitions":
        """Those steps where `chosen` `[B]` is true."""
        return Transitions(**{column.name: getattr(self, column.name)[chosen] for column in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One episode of T steps. Row t of every array belongs to step t; snapshots show the state *after* the step."""

    obs: FloatArray
    """[T, D] before each action."""
    actions: FloatArray
    """[T, A]."""
    next_obs: FloatArray
    """[T, D] after each action."""
    env_rewards: FloatArray
    """[T]."""
    snapshots: FloatArray
    """[T, S]."""
    progress: FloatArray
    """[T] the simulator's progress towards the goal in [0, 1]: the truth that labels are checked against."""
    success: NDArray[np.bool_]
    """[T] the env's own success test."""
    terminated: bool
    """Whether the last step ended the episode for good."""

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name))
            for name in ("obs", "actions", "next_obs", "env_rewards", "snapshots", "progress", "success")
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"all arrays of a trajectory need the same number of steps, got {lengths}")

    def __len__(self) -> int:
        return len(self.env_rewards)

    def segment(self, start: int, num_steps: int, path_moments: int = 0) -> "Segment":
        """The `num_steps` steps from `start` on, with so many moments of the way there."""
        # copied, as a view of 50 steps would keep all arrays of the episode in memory for as long as its query is kept
        steps = slice(start, start + num_steps)
        names = [column.name for column in fields(Segment) if column.name != "path"]
        own = {name: getattr(self, name)[steps].copy() for name in names}
        if path_moments:
            way = spread(self.snapshots[: start + num_steps], path_moments)
            # segments are stacked, so all have as many: the first moment stands for those that are missing
            own["path"] = np.concatenate([way[:1].repeat(path_moments - len(way), axis=0), way])
        return Segment(**own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """L consecutive steps of one episode."""

    obs: FloatArray
    """[L, D]."""
    actions: FloatArray
    """[L, A]."""
    next_obs: FloatArray
    """[L, D]."""
    snapshots: FloatArray
    """[L, S]."""
    env_rewards: FloatArray
    """[L]."""
    progress: FloatArray
    """[L]."""
    path: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """[P, S] moments of the episode up to the segment's last, spread evenly, along which a judge is shown the path of
    the hand; P is 0 where it is shown none."""

    def __len__(self) -> int:
        return len(self.env_rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two segments of equal length that a teacher is asked to compare."""

    left: Segment
    right: Segment

    def __post_init__(self) -> None:
        if len(self.left) != len(self.right):
            raise ValueError(f"both segments need the same length, got {len(self.left)} and {len(self.right)}")


def spread(moments: Moments, most: int) -> Moments:
    """At most `most` of the rows of `moments` `[N, ...]`, evenly spread, the first and the last among them."""
    if len(moments) <= most:
        return moments
    # rounded to places of the rows themselves: nothing is interpolated
    chosen: Any = moments[np.linspace(0, len(moments) - 1, most).round().astype(int)]
    return chosen
