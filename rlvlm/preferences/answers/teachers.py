"""Who answers: a judge that looks at images, teachers who know the truth, chance. Used by the loop.

A question is a pair to be compared, which is answered with a verdict, or a segment to be scored, with a score. All
questions of one call are of one kind.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.core.steps import FloatArray, Pair, Segment, Trajectory
from rlvlm.envs.images import FrameStore
from rlvlm.judges.judge import Judge
from rlvlm.preferences.answers.measured import SHARES, MeasuredTeacher, read_shares
from rlvlm.preferences.answers.simulated import SimulatedTeacher
from rlvlm.preferences.config import FeedbackConfig, published_name, simulated_config


class Teacher(Protocol):
    """Answers questions."""

    def answer(self, questions: Sequence[Any], /) -> list[Any]:
        """One verdict per pair, or one score per segment, in order."""
        ...

    def get_state(self) -> dict[str, Any]:
        """What a restored teacher needs to give the same answers from here on."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        ...


@runtime_checkable
class PatientTeacher(Teacher, Protocol):
    """A teacher that can be waited for in another thread."""

    def prepare(self, questions: Sequence[Any], /) -> Callable[[], list[Any]]:
        """Does now what only this thread may do; what it returns gives one answer per question, in any thread."""
        ...


@runtime_checkable
class InformedTeacher(Teacher, Protocol):
    """A teacher whose answers depend on how good the agent is by now."""

    def inform(self, recent: Sequence[Trajectory]) -> None:
        """Looks at the newest finished episodes, oldest first; called before every session."""
        ...


def sides_of(question: Pair | Segment) -> tuple[Segment, ...]:
    """The segments of a question: left and right, or the one to be scored."""
    return (question.left, question.right) if isinstance(question, Pair) else (question,)


class JudgeTeacher:
    """Draws what is asked about, and asks a judge: which side is closer to the goal, or how close one segment is.

    Args:
        judge: local or served.
        frames: draws and remembers images at the judge's size.
        goal: what the judge is told.
    """

    def __init__(self, judge: Judge, frames: FrameStore, goal: str) -> None:
        self._judge = judge
        self._frames = frames
        self._goal = goal

    def answer(self, questions: Sequence[Any]) -> list[Any]:
        """One answer per question, in order.

        Raises:
            JudgeUnavailable: the judge answers nothing at all.
        """
        return self.prepare(questions)()

    def prepare(self, questions: Sequence[Any]) -> Callable[[], list[Any]]:
        """Draws the images now, in the thread that owns the renderer; what it returns asks the judge."""
        snapshots = np.array([[side.snapshots for side in sides_of(question)] for question in questions])
        frames = self._frames.frames(snapshots.reshape(-1, snapshots.shape[-1]))
        sides = frames.reshape(*snapshots.shape[:3], *frames.shape[1:])  # [N, S, L, H, W, 3] of S sides
        if sides.shape[1] == 1:
            return partial(self._judge.score, [Clip(goal=self._goal, frames=clip) for clip in sides[:, 0]])
        queries = [Query(goal=self._goal, left=left, right=right) for left, right in sides]
        return partial(self._judge.compare, queries)

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        assert not state, "a judge keeps no state"


def true_returns(pairs: Sequence[Pair]) -> tuple[FloatArray, FloatArray]:
    """Undiscounted sums of the env's rewards, `[N]` of the left sides and `[N]` of the right sides."""
    left = np.array([pair.left.env_rewards.sum() for pair in pairs], np.float32)
    right = np.array([pair.right.env_rewards.sum() for pair in pairs], np.float32)
    return left, right


class OracleTeacher:
    """Prefers the side with the larger true return; gives a segment the true progress at its end.

    Source: Lee et al. 2021 (B-Pref), arXiv:2111.03026, sec. 3.1, the oracle. Departure: exactly equal returns are no
    preference, and not called left.

    Args:
        by_progress: compares the true progress at the end, as a perfect judge of images would. The two are different
            truths: a return also counts what no image shows.
    """

    _STAMP = Stamp(judge="oracle", revision="", prompt="", decoding="")

    def __init__(self, by_progress: bool = False) -> None:
        self._by_progress = by_progress

    def answer(self, questions: Sequence[Any]) -> list[Any]:
        """One answer per question, in order."""
        if questions and isinstance(questions[0], Segment):
            progress = [float(segment.progress[-1]) for segment in questions]
            return [Score(status=Status.OK, value=value, stamp=self._STAMP) for value in progress]
        if self._by_progress:
            left, right = np.array([[one.left.progress[-1], one.right.progress[-1]] for one in questions]).T
        else:
            left, right = true_returns(questions)
        labels = np.select([left > right, left < right], [Label.LEFT, Label.RIGHT], Label.TIE)
        return [
            Verdict(
                status=Status.NO_PREFERENCE if label == Label.TIE else Status.OK, label=Label(label), stamp=self._STAMP
            )
            for label in labels
        ]

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        assert not state, "an oracle keeps no state"


class RandomTeacher:
    """Left or right by a fair coin, any score in [0, 1) by a die: the control that must not teach anything."""

    _COIN = Stamp(judge="coin", revision="", prompt="", decoding="")
    _DIE = Stamp(judge="die", revision="", prompt="", decoding="")

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def answer(self, questions: Sequence[Any]) -> list[Any]:
        """One answer per question, in order."""
        drawn = self._rng.random(len(questions))
        if questions and isinstance(questions[0], Segment):
            return [Score(status=Status.OK, value=float(value), stamp=self._DIE) for value in drawn]
        labels = [Label.RIGHT if value < 0.5 else Label.LEFT for value in drawn]
        return [Verdict(status=Status.OK, label=label, stamp=self._COIN) for label in labels]

    def get_state(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]


def build_teacher(
    kind: str,
    *,
    judge: Judge | None,
    frames: FrameStore,
    goal: str,
    seed: int,
    task: str = "",
    feedback: FeedbackConfig | None = None,
) -> Teacher:
    """The teacher that `RewardConfig.teacher` names.

    Args:
        kind: which.
        judge: who looks; only a judge teacher needs one.
        frames: draws images at the judge's size.
        goal: what the judge is told.
        seed: of chance and of simulated weaknesses.
        task: whose published table is meant.
        feedback: weaknesses of a simulated teacher, table of a measured one; None takes the defaults.

    Raises:
        ValueError: a judge teacher without a judge, a table that cannot be read, a task that was not published.
    """
    feedback = feedback or FeedbackConfig()
    simulated = simulated_config(kind, feedback)
    if simulated is not None:
        return SimulatedTeacher(simulated, seed)
    if kind == "published":
        return MeasuredTeacher(SHARES[published_name(task)], seed, task)
    if kind == "measured":
        return MeasuredTeacher(read_shares(Path(feedback.measured)), seed, feedback.measured)
    if kind in ("oracle", "progress"):
        return OracleTeacher(by_progress=kind == "progress")
    if kind == "random":
        return RandomTeacher(seed)
    if judge is None:
        raise ValueError("a judge teacher needs a judge, got none; pass one, or choose teacher oracle or random")
    return JudgeTeacher(judge, frames, goal)
