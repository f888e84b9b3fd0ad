"""Who scores single segments: a judge that looks at pictures, one who knows the truth, a die. Used by the loop."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from rlvlm.envs.pictures import FrameStore
from rlvlm.judges.judge import Judge
from rlvlm.types.judging import Clip, Score, Stamp, Status
from rlvlm.types.steps import Segment


class Scorer(Protocol):
    """Says how far segments are from the goal."""

    def answer(self, segments: Sequence[Segment]) -> list[Score]:
        """One score per segment, in order."""
        ...

    def get_state(self) -> dict[str, Any]:
        """What a restored scorer needs to give the same answers from here on."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        ...


class JudgeScorer:
    """Draws each segment and asks a judge for its score.

    Args:
        judge: local or served.
        frames: draws and remembers pictures at the judge's size.
        goal: what the judge is told.
    """

    def __init__(self, judge: Judge, frames: FrameStore, goal: str) -> None:
        self._judge = judge
        self._frames = frames
        self._goal = goal

    def answer(self, segments: Sequence[Segment]) -> list[Score]:
        """One score per segment, in order.

        Raises:
            JudgeUnavailable: the judge answers nothing at all.
        """
        return self.prepare(segments)()

    def prepare(self, segments: Sequence[Segment]) -> Callable[[], list[Score]]:
        """Draws the pictures now, in the thread that owns the renderer; what it returns asks the judge."""
        snapshots = np.array([segment.snapshots for segment in segments])  # [N, L, S]
        frames = self._frames.frames(snapshots.reshape(-1, snapshots.shape[-1]))
        clips = [Clip(goal=self._goal, frames=clip) for clip in frames.reshape(*snapshots.shape[:2], *frames.shape[1:])]
        return partial(self._judge.score, clips)

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        assert not state, "a judge keeps no state"


class ProgressScorer:
    """Gives the simulator's true progress at a segment's end: what a perfect judge would say."""

    _STAMP = Stamp(judge="oracle", revision="", prompt="", decoding="")

    def answer(self, segments: Sequence[Segment]) -> list[Score]:
        """One score per segment, in order."""
        return [_score(float(segment.progress[-1]), self._STAMP) for segment in segments]

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        assert not state, "an oracle keeps no state"


class RandomScorer:
    """Gives any score in [0, 1): the control that must not teach anything."""

    _STAMP = Stamp(judge="die", revision="", prompt="", decoding="")

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def answer(self, segments: Sequence[Segment]) -> list[Score]:
        """One score per segment, in order."""
        return [_score(float(value), self._STAMP) for value in self._rng.random(len(segments))]

    def get_state(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]


def _score(value: float, stamp: Stamp) -> Score:
    return Score(status=Status.OK, value=value, stamp=stamp)


def build_scorer(kind: str, *, judge: Judge | None, frames: FrameStore, goal: str, seed: int) -> Scorer:
    """The scorer that `RewardConfig.teacher` names.

    Args:
        kind: judge, oracle or random.
        judge: who looks; only a judge scorer needs one.
        frames: draws pictures at the judge's size.
        goal: what the judge is told.
        seed: of the die.

    Raises:
        ValueError: a judge scorer without a judge.
    """
    if kind == "oracle":
        return ProgressScorer()
    if kind == "random":
        return RandomScorer(seed)
    if judge is None:
        raise ValueError("a judge scorer needs a judge, got none; pass one, or choose teacher oracle or random")
    return JudgeScorer(judge, frames, goal)
