"""Labels of a run: comparisons, or frames with scores. Filled by the loop, read by the reward model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.judging import Label, Score, Verdict
from rlvlm.core.steps import FloatArray, Pair, Segment, Transitions
from rlvlm.rewards.growing import GrowingArray

_STEP_COLUMNS = ("actions", "next_obs", "snapshots")


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Inputs of a reward model for each of N steps. True rewards are left out on purpose."""

    actions: FloatArray
    """[N, A] actions."""
    next_obs: FloatArray
    """[N, D] observations after the action."""
    snapshots: FloatArray
    """[N, S] snapshots after the action."""

    @classmethod
    def of(cls, transitions: Transitions) -> "Steps":
        """Returns the steps of a batch of transitions."""
        return cls(actions=transitions.actions, next_obs=transitions.next_obs, snapshots=transitions.snapshots)

    @classmethod
    def of_segments(cls, segments: Sequence[Segment]) -> "Steps":
        """Returns the steps of segments, end to end."""
        columns = {name: [getattr(segment, name) for segment in segments] for name in _STEP_COLUMNS}
        return cls(**{name: np.concatenate(parts) for name, parts in columns.items()})

    def __len__(self) -> int:
        return len(self.actions)


Example = tuple[tuple[Segment, ...], float]
"""Segments, and the answer about them as a number in [0, 1]."""


def sides_of(question: Pair | Segment) -> tuple[Segment, ...]:
    """Returns the segments of a question: left and right, or the one to score."""
    return (question.left, question.right) if isinstance(question, Pair) else (question,)


def decided(pairs: Sequence[Pair], verdicts: Sequence[Verdict], ties: Literal["drop", "equal"]) -> list[Example]:
    """Returns the pairs with labels to train on, left before right, each with P(right is better): 0 or 1.

    Ties are dropped or count as one half; unreadable and missing answers are never trained on.
    """
    # p_right of the Bradley-Terry loss: the answer itself, not the teacher's confidence
    labels: dict[Label | None, float] = {Label.LEFT: 0.0, Label.RIGHT: 1.0}
    if ties == "equal":
        labels[Label.TIE] = 0.5
    answered = zip(pairs, verdicts, strict=True)
    return [((pair.left, pair.right), labels[verdict.label]) for pair, verdict in answered if verdict.label in labels]


def scored(segments: Sequence[Segment], scores: Sequence[Score]) -> list[Example]:
    """Returns the segments with scores in [0, 1] to train on, without unreadable and missing answers."""
    # 0 is a score: only None is left out
    answered = zip(segments, scores, strict=True)
    return [((segment,), score.value) for segment, score in answered if score.value is not None]


class Examples:
    """Segments with answers about them: comparisons of two, or scores of one.

    Args:
        num_sides: number S of segments per example.
    """

    def __init__(self, num_sides: int) -> None:
        self.num_sides = num_sides
        self._sides: dict[str, GrowingArray] = {}
        self._targets = GrowingArray(())

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def targets(self) -> FloatArray:
        """[N] answers, in [0, 1]."""
        return self._targets.rows

    @property
    def segment_steps(self) -> int:
        """Number L of steps per segment; the set must not be empty."""
        return self._sides["actions"].rows.shape[2]

    def add(self, examples: Sequence[Example]) -> int:
        """Adds examples of S segments of equal length, and returns their number."""
        if examples:
            for name in _STEP_COLUMNS:
                self._append(name, np.array([[getattr(side, name) for side in sides] for sides, _ in examples]))
            self._targets.append(np.array([target for _, target in examples], np.float32))
        return len(examples)

    def steps(self) -> Steps:
        """Returns all steps of all sides, [N * S * L]: example by example, side by side, in order of time."""
        return Steps(**{name: sides.rows.reshape(-1, sides.rows.shape[-1]) for name, sides in self._sides.items()})

    def get_state(self) -> dict[str, Any]:
        """Returns copies of the arrays."""
        state: dict[str, Any] = {name: sides.rows.copy() for name, sides in self._sides.items()}
        return {"sides": state, "targets": self.targets.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._sides, self._targets = {}, GrowingArray(())
        for name, sides in state["sides"].items():
            self._append(name, sides)
        self._targets.append(state["targets"])

    def _append(self, name: str, sides: NDArray[np.float32]) -> None:
        """Adds [M, S, L, ...]; the first call fixes the shape."""
        # shapes are known only with the first examples
        if name not in self._sides:
            self._sides[name] = GrowingArray(sides.shape[1:])
        self._sides[name].append(sides)
