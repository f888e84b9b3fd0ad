"""What the pocket video judge is taught: frames with what there is to read in them, and questions about clips."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlvlm.pocket.scorer.dataset import Question
from rlvlm.types.steps import FloatArray, Frames

MOMENTS = 8
"""Frames kept of an episode, evenly spread, the first and the last among them."""
_P_WHOLE, _P_BACKWARDS, _P_OTHER_INSTRUCTION = 0.8, 0.15, 0.3
_BINS, _REACH_M = 15, 0.45
"""Offsets from the basket are read in so many bins between plus and minus this."""
_INSIDE_M = 0.07


@dataclass(frozen=True, kw_only=True, slots=True)
class Clips:
    """Episodes of all tasks, as `play` writes them."""

    frames: Frames
    """[N, MOMENTS, 144, 144, 3]."""
    offsets: FloatArray
    """[N, MOMENTS, K, 3] of each thing from the basket, metres; NaN where a scene has no such thing."""
    things: tuple[str, ...]
    """K names."""
    instructions: tuple[str, ...]
    """N of them."""
    success: NDArray[np.bool_]
    """[N] whether the last moment is one of success; no earlier one is."""

    def save(self, file: Path) -> None:
        """Writes the clips as npz."""
        np.savez_compressed(
            file,
            frames=self.frames,
            offsets=self.offsets,
            things=np.array(self.things),
            instructions=np.array(self.instructions),
            success=self.success,
        )

    @classmethod
    def load(cls, file: Path) -> "Clips":
        """What `save` wrote."""
        with np.load(file, allow_pickle=False) as told:
            return cls(
                frames=told["frames"],
                offsets=told["offsets"],
                things=tuple(told["things"].tolist()),
                instructions=tuple(told["instructions"].tolist()),
                success=told["success"],
            )


def readable(offsets: FloatArray) -> NDArray[np.int64]:
    """[..., 3 K] what there is to read in frames with things at `offsets` [..., K, 3].

    Bins of the offset along both sides of the table, and whether it lies in the basket (1: no, 2: yes); 0 where a scene
    has no such thing.
    """
    is_there = np.isfinite(offsets[..., 0])
    safe = np.nan_to_num(offsets)
    bins = 1 + np.clip((safe[..., :2] + _REACH_M) / (2 * _REACH_M) * _BINS, 0, _BINS - 1).astype(np.int64)
    inside = 1 + (np.abs(safe[..., :2]).max(axis=-1) < _INSIDE_M)
    told = np.concatenate([bins, inside[..., None]], axis=-1) * is_there[..., None]
    return told.reshape(*told.shape[:-2], -1)


def readable_sizes(num_things: int) -> tuple[int, ...]:
    """How many values each column of `readable` may take."""
    return (_BINS + 1, _BINS + 1, 3) * num_things


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
        goal = str(rng.choice([one for one in sorted(set(clips.instructions)) if one != goal]))
    return question_of(clips, row, moments, goal)


def question_of(clips: Clips, row: int, moments: NDArray[np.int64], goal: str) -> Question:
    """The question whether `goal` is reached at the last of `moments` of an episode."""
    is_reached = bool(clips.success[row]) and int(moments[-1]) == MOMENTS - 1 and goal == clips.instructions[row]
    pictures = tuple((row * MOMENTS + moments).tolist())
    return Question(mode="success", goal=goal, pictures=pictures, answer="yes" if is_reached else "no")
