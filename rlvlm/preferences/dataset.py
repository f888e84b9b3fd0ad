"""The labels of a run: comparisons, or frames with scores. Filled by the loop, read by the reward model."""

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
    """[N, A]."""
    next_obs: FloatArray
    """[N, D] after the action."""
    snapshots: FloatArray
    """[N, S] after the action."""

    @classmethod
    def of(cls, transitions: Transitions) -> "Steps":
        """The steps of a batch of transitions."""
        return cls(actions=transitions.actions, next_obs=transitions.next_obs, snapshots=transitions.snapshots)

    @classmethod
    def of_segments(cls, segments: Sequence[Segment]) -> "Steps":
        """The steps of segments, one after the other."""
        columns = {name: [getattr(segment, name) for segment in segments] for name in _STEP_COLUMNS}
        return cls(**{name: np.concatenate(parts) for name, parts in columns.items()})

    def __len__(self) -> int:
        return len(self.actions)


Example = tuple[tuple[Segment, ...], float]
"""Segments, and what was said about them."""


def sides_of(question: Pair | Segment) -> tuple[Segment, ...]:
    """The segments of a question: left and right, or the one to be scored."""
    return (question.left, question.right) if isinstance(question, Pair) else (question,)


def decided(pairs: Sequence[Pair], verdicts: Sequence[Verdict], ties: Literal["drop", "equal"]) -> list[Example]:
    """The pairs whose labels train, left before right, each with the probability that right is better: 0 or 1.

    Ties are dropped or train as one half; unread and missing answers never train.
    """
    # p_right of the Bradley-Terry loss: what was said, not how sure the teacher was
    labels: dict[Label | None, float] = {Label.LEFT: 0.0, Label.RIGHT: 1.0}
    if ties == "equal":
        labels[Label.TIE] = 0.5
    answered = zip(pairs, verdicts, strict=True)
    return [((pair.left, pair.right), labels[verdict.label]) for pair, verdict in answered if verdict.label in labels]


def scored(segments: Sequence[Segment], scores: Sequence[Score]) -> list[Example]:
    """The segments whose scores in [0, 1] train; unread and missing answers never do."""
    # 0 is a score: what is left out is what has none
    answered = zip(segments, scores, strict=True)
    return [((segment,), score.value) for segment, score in answered if score.value is not None]


class Examples:
    """Segments with what was said about them: comparisons of two, or scores of one.

    Args:
        num_sides: S, segments per example.
    """

    def __init__(self, num_sides: int) -> None:
        self.num_sides = num_sides
        self._sides: dict[str, GrowingArray] = {}
        self._targets = GrowingArray(())

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def targets(self) -> FloatArray:
        """[N] what was said, in [0, 1]."""
        return self._targets.rows

    @property
    def segment_steps(self) -> int:
        """L; the set must not be empty."""
        return self._sides["actions"].rows.shape[2]

    def add(self, examples: Sequence[Example]) -> int:
        """Takes examples of S segments of equal length; returns how many these are."""
        if examples:
            for name in _STEP_COLUMNS:
                self._append(name, np.array([[getattr(side, name) for side in sides] for sides, _ in examples]))
            self._targets.append(np.array([target for _, target in examples], np.float32))
        return len(examples)

    def steps(self) -> Steps:
        """All steps of all sides, `[N * S * L]`: example by example, side by side, in time's order."""
        return Steps(**{name: sides.rows.reshape(-1, sides.rows.shape[-1]) for name, sides in self._sides.items()})

    def get_state(self) -> dict[str, Any]:
        """Copies of the arrays."""
        state: dict[str, Any] = {name: sides.rows.copy() for name, sides in self._sides.items()}
        return {"sides": state, "targets": self.targets.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._sides, self._targets = {}, GrowingArray(())
        for name, sides in state["sides"].items():
            self._append(name, sides)
        self._targets.append(state["targets"])

    def _append(self, name: str, sides: NDArray[np.float32]) -> None:
        """Adds `[M, S, L, ...]`; the first call fixes the shape."""
        # shapes are known with the first examples only
        if name not in self._sides:
            self._sides[name] = GrowingArray(sides.shape[1:])
        self._sides[name].append(sides)
