"""What the pocket video judge is taught: frames with what there is to read in them, and questions about clips."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.pocket.scorer.dataset import Question

MOMENTS = 8
"""Frames kept of an episode, evenly spread, the first and the last among them."""
_P_WHOLE, _P_BACKWARDS, _P_OTHER_INSTRUCTION = 0.8, 0.15, 0.3
_P_SAME_SUITE = 0.8
"""Of the instructions of other tasks."""
_BINS, _REACH_M = 15, 0.45
"""Places along both sides of the table are read in so many bins between plus and minus this."""
_AT_M = 0.07
"""What is so near to a target, along both sides of the table, is at it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clips:
    """Episodes of all tasks, as `play` writes them."""

    frames: Frames
    """[N, MOMENTS, 144, 144, 3]."""
    places: FloatArray
    """[N, MOMENTS, K, 3] of each thing and each target, metres; NaN where a scene has no such thing."""
    things: tuple[str, ...]
    """K names."""
    targets: tuple[str, ...]
    """Those that something is wanted in or on."""
    tasks: tuple[str, ...]
    """N names, e.g. `libero_object/0`."""
    instructions: tuple[str, ...]
    """N of them."""
    success: NDArray[np.bool_]
    """[N] whether the last moment is one of success; no earlier one is."""

    def save(self, file: Path) -> None:
        """Writes the clips as npz."""
        np.savez_compressed(
            file,
            frames=self.frames,
            places=self.places,
            things=np.array(self.things),
            targets=np.array(self.targets),
            tasks=np.array(self.tasks),
            instructions=np.array(self.instructions),
            success=self.success,
        )

    def of_suite(self, suite: str) -> "Clips":
        """Those of one suite."""
        rows = [row for row, task in enumerate(self.tasks) if suite_of(task) == suite]
        return replace(
            self,
            frames=self.frames[rows],
            places=self.places[rows],
            tasks=tuple(self.tasks[row] for row in rows),
            instructions=tuple(self.instructions[row] for row in rows),
            success=self.success[rows],
        )

    @classmethod
    def load(cls, file: Path) -> "Clips":
        """What `save` wrote."""
        with np.load(file, allow_pickle=False) as told:
            return cls(
                frames=told["frames"],
                places=told["places"],
                things=tuple(told["things"].tolist()),
                targets=tuple(told["targets"].tolist()),
                tasks=tuple(told["tasks"].tolist()),
                instructions=tuple(told["instructions"].tolist()),
                success=told["success"],
            )


def readable(clips: Clips) -> NDArray[np.int64]:
    """[N, MOMENTS, 3 K] what there is to read in the frames.

    Of each thing the bins of its place along both sides of the table, and which target it is at (1: none, 2: the first,
    ...); 0 where a scene has no such thing.
    """
    across = clips.places[..., :2]
    is_there = np.isfinite(across[..., 0])
    share = (np.nan_to_num(across) + _REACH_M) / (2 * _REACH_M)
    bins = 1 + np.clip(share * _BINS, 0, _BINS - 1).astype(np.int64)
    columns = [clips.things.index(name) for name in clips.targets]
    apart = np.abs(across[..., :, None, :] - across[..., None, columns, :]).max(axis=-1)  # [N, MOMENTS, K, T]
    apart[..., columns, np.arange(len(columns))] = np.inf  # a target is not at itself
    apart = np.where(np.isfinite(apart), apart, np.inf)
    at = np.where(apart.min(axis=-1) < _AT_M, 2 + apart.argmin(axis=-1), 1)
    told = np.concatenate([bins, at[..., None]], axis=-1) * is_there[..., None]
    return told.reshape(*told.shape[:-2], -1)


def readable_sizes(clips: Clips) -> tuple[int, ...]:
    """How many values each column of `readable` may take."""
    return (_BINS + 1, _BINS + 1, len(clips.targets) + 2) * len(clips.things)


def draw_question(clips: Clips, num_frames: int, rng: np.random.Generator) -> Question:
    """A question about `num_frames` moments of an episode or of its beginning; some turned round, some about another
    task. Successes and failures come equally often.
    """
    row = int(rng.choice(np.flatnonzero(clips.success == (rng.random() < 0.5))))
    last = MOMENTS - 1 if rng.random() < _P_WHOLE else int(rng.integers(1, MOMENTS - 1))
    moments = np.linspace(0, last, num_frames).round().astype(int)
    if rng.random() < _P_BACKWARDS:
        moments = moments[::-1]
    goal = clips.instructions[row]
    if rng.random() < _P_OTHER_INSTRUCTION:
        goal = str(rng.choice(_others(clips, row, is_near=bool(rng.random() < _P_SAME_SUITE))))
    return question_of(clips, row, moments, goal)


def _others(clips: Clips, row: int, *, is_near: bool) -> list[str]:
    """Instructions of other tasks, of the same suite where there are any and it `is_near`."""
    own, suite = clips.instructions[row], suite_of(clips.tasks[row])
    told = sorted({(suite_of(task), goal) for task, goal in zip(clips.tasks, clips.instructions, strict=True)})
    others = [(of, goal) for of, goal in told if goal != own]
    near = [goal for of, goal in others if of == suite]
    return near if is_near and near else [goal for _, goal in others]


def suite_of(task: str) -> str:
    """`libero_object` of `libero_object/0`."""
    return task.partition("/")[0]


def question_of(clips: Clips, row: int, moments: NDArray[np.int64], goal: str) -> Question:
    """The question whether `goal` is reached at the last of `moments` of an episode."""
    is_reached = bool(clips.success[row]) and int(moments[-1]) == MOMENTS - 1 and goal == clips.instructions[row]
    images = tuple((row * MOMENTS + moments).tolist())
    return Question(mode="success", goal=goal, pictures=images, answer="yes" if is_reached else "no")
