"""Steps, episodes and parts of them, for envs that are stepped with a vector of numbers."""

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
    """[B, D] observations before the action."""
    actions: FloatArray
    """[B, A] actions in [-1, 1]."""
    next_obs: FloatArray
    """[B, D] observations after the action."""
    terminated: FloatArray
    """[B] 1 if the episode ended for good (a time limit is not an end)."""
    env_rewards: FloatArray
    """[B] the env's true rewards, for metrics and oracle teachers only."""
    success: FloatArray
    """[B] 1 if the env's own success test held after the action, for the source `success` only."""
    snapshots: FloatArray
    """[B, S] snapshots of the state after the action; a StepEnv can draw them."""

    def part(self, chosen: NDArray[np.bool_]) -> "Transitions":
        """Returns the steps for which `chosen` [B] is true."""
        return Transitions(**{column.name: getattr(self, column.name)[chosen] for column in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One episode of T steps. Row t of every array belongs to step t; snapshots show the state *after* the step."""

    obs: FloatArray
    """[T, D] observations before each action."""
    actions: FloatArray
    """[T, A] actions."""
    next_obs: FloatArray
    """[T, D] observations after each action."""
    env_rewards: FloatArray
    """[T] true rewards."""
    snapshots: FloatArray
    """[T, S] snapshots."""
    progress: FloatArray
    """[T] the simulator's progress towards the goal in [0, 1]: the truth that labels are checked against."""
    success: NDArray[np.bool_]
    """[T] results of the env's own success test."""
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
        """Returns `num_steps` steps from `start` on, with `path_moments` moments for the path of the hand."""
        # copied, as a view of 50 steps would keep all arrays of the episode in memory as long as its query
        steps = slice(start, start + num_steps)
        names = [column.name for column in fields(Segment) if column.name != "path"]
        own = {name: getattr(self, name)[steps].copy() for name in names}
        if path_moments:
            way = spread(self.snapshots[: start + num_steps], path_moments)
            # segments are stacked, so all have equally many: the first moment replaces missing ones
            own["path"] = np.concatenate([way[:1].repeat(path_moments - len(way), axis=0), way])
        return Segment(**own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """L consecutive steps of one episode."""

    obs: FloatArray
    """[L, D] observations before each action."""
    actions: FloatArray
    """[L, A] actions."""
    next_obs: FloatArray
    """[L, D] observations after each action."""
    snapshots: FloatArray
    """[L, S] snapshots after each action."""
    env_rewards: FloatArray
    """[L] true rewards."""
    progress: FloatArray
    """[L] true progress, in [0, 1]."""
    path: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """[P, S] moments of the episode up to the segment's last, evenly spread, along which the hand's path is drawn
    for a judge; P = 0 for no path."""

    def __len__(self) -> int:
        return len(self.env_rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two segments of equal length for a teacher to compare."""

    left: Segment
    right: Segment

    def __post_init__(self) -> None:
        if len(self.left) != len(self.right):
            raise ValueError(f"both segments need the same length, got {len(self.left)} and {len(self.right)}")


def spread(moments: Moments, most: int) -> Moments:
    """Returns at most `most` rows of `moments` [N, ...], evenly spread, including the first and the last."""
    if len(moments) <= most:
        return moments
    # rounded to indices of the rows themselves: nothing is interpolated
    chosen: Any = moments[np.linspace(0, len(moments) - 1, most).round().astype(int)]
    return chosen
