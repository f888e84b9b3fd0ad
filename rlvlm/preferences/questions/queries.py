"""Questions drawn from trajectories, and which are worth asking: pure functions. Used by the subjects."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import Pair, Segment, Trajectory
from rlvlm.envs.images import FrameStore

Question = TypeVar("Question", Pair, Segment)

_ROUNDS = 100
"""How often questions that are not worth asking are replaced."""


def draw_segments(lengths: Sequence[int], num: int, segment_steps: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Segments drawn uniformly, with replacement, from all there are; each episode's last frame included.

    Args:
        lengths: steps of each episode.
        num: segments to draw.
        segment_steps: L, >= 1.
        rng: drawn from once.

    Returns:
        [num, 2] index of the episode and first step of each segment.

    Raises:
        ValueError: no episode is as long as a segment.
    """
    starts = np.maximum(np.asarray(lengths, np.int64) - segment_steps + 1, 0)
    ends = starts.cumsum()
    if not starts.sum():
        raise ValueError(f"need an episode of at least {segment_steps} steps to draw a segment from, got {lengths}")
    drawn = rng.integers(ends[-1], size=num)
    episodes = ends.searchsorted(drawn, side="right")
    return np.stack([episodes, drawn - (ends - starts)[episodes]], axis=1)


def cut(trajectory: Trajectory, start: int, segment_steps: int) -> Segment:
    """A copy of the L steps from `start` on; the trajectory itself can then be forgotten."""
    steps = slice(start, start + segment_steps)
    return Segment(
        obs=trajectory.obs[steps].copy(),
        actions=trajectory.actions[steps].copy(),
        next_obs=trajectory.next_obs[steps].copy(),
        snapshots=trajectory.snapshots[steps].copy(),
        env_rewards=trajectory.env_rewards[steps].copy(),
        progress=trajectory.progress[steps].copy(),
    )


def draw_pairs(
    trajectories: Sequence[Trajectory], num: int, segment_steps: int, rng: np.random.Generator
) -> list[Pair]:
    """Pairs whose two sides are independent uniform draws from all segments of `trajectories`.

    Raises:
        ValueError: no trajectory is as long as a segment.

    Source: Lee et al. 2021 (PEBBLE), arXiv:2106.05091, sec. 4.2, uniform sampling. Departures from the code of
    RL-VLM-F: each frame is equally likely, the last one of an episode too, and not first an episode, then a frame.
    """
    drawn = draw_segments([len(trajectory) for trajectory in trajectories], 2 * num, segment_steps, rng)
    sides = [cut(trajectories[episode], start, segment_steps) for episode, start in drawn]
    return [Pair(left=left, right=right) for left, right in zip(sides[:num], sides[num:], strict=True)]


def draw_until(
    num: int, draw: Callable[[int], list[Question]], is_dull: Callable[[list[Question]], NDArray[np.bool_]]
) -> tuple[list[Question], int]:
    """Up to `num` questions that are not dull, and how many were dull on the way.

    Args:
        num: wanted.
        draw: gives that many more.
        is_dull: tells which of them are not worth asking.
    """
    kept: list[Question] = []
    num_drawn = 0
    for _ in range(_ROUNDS):
        drawn = draw(num - len(kept))
        num_drawn += len(drawn)
        kept += [question for question, dull in zip(drawn, is_dull(drawn), strict=True) if not dull]
        if len(kept) == num:
            break
    return kept, num_drawn - len(kept)


def look_alike(pairs: Sequence[Pair], frames: FrameStore) -> NDArray[np.bool_]:
    """[N] whether left and right of each pair show the same images, step by step: nothing there to compare."""
    if not pairs:
        return np.zeros(0, np.bool_)
    sides = [(pair.left.snapshots, pair.right.snapshots) for pair in pairs]
    snapshots = np.array(sides)  # [N, 2, L, S]
    _, image = frames.distinct(snapshots.reshape(-1, snapshots.shape[-1]))
    left, right = image.reshape(snapshots.shape[:3]).swapaxes(0, 1)
    return (left == right).all(axis=1)
