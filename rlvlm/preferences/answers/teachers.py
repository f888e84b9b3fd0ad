"""Who answers queries: a judge that looks at pictures, teachers who know the truth, a coin. Used by the loop."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlvlm.envs.pictures import FrameStore
from rlvlm.judges.judge import Judge
from rlvlm.preferences.answers.simulated import SimulatedTeacher
from rlvlm.preferences.config import SimulatedTeacherConfig
from rlvlm.types.judging import Label, Query, Stamp, Status, Verdict
from rlvlm.types.steps import FloatArray, Pair, Trajectory


class Teacher(Protocol):
    """Answers comparisons."""

    def answer(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict per pair, in order."""
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

    def prepare(self, pairs: Sequence[Pair]) -> Callable[[], list[Verdict]]:
        """Does now what only this thread may do; what it returns gives one verdict per pair, in any thread."""
        ...


@runtime_checkable
class InformedTeacher(Teacher, Protocol):
    """A teacher whose answers depend on how good the agent is by now."""

    def inform(self, recent: Sequence[Trajectory]) -> None:
        """Looks at the newest finished episodes, oldest first; called before every session."""
        ...


class JudgeTeacher:
    """Draws both sides of each pair and asks a judge which one is closer to the goal.

    Args:
        judge: local or served.
        frames: draws and remembers pictures at the judge's size.
        goal: fills the slot of the prompt.
    """

    def __init__(self, judge: Judge, frames: FrameStore, goal: str) -> None:
        self._judge = judge
        self._frames = frames
        self._goal = goal

    def answer(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict per pair, in order.

        Raises:
            JudgeUnavailable: the judge answers nothing at all.
        """
        return self.prepare(pairs)()

    def prepare(self, pairs: Sequence[Pair]) -> Callable[[], list[Verdict]]:
        """Draws the pictures now, in the thread that owns the renderer; what it returns asks the judge."""
        snapshots = np.array([(pair.left.snapshots, pair.right.snapshots) for pair in pairs])  # [N, 2, L, S]
        frames = self._frames.frames(snapshots.reshape(-1, snapshots.shape[-1]))
        sides = frames.reshape(*snapshots.shape[:3], *frames.shape[1:])  # [N, 2, L, H, W, 3]
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


def _verdict(label: Label, stamp: Stamp) -> Verdict:
    status = Status.NO_PREFERENCE if label is Label.TIE else Status.OK
    return Verdict(status=status, label=label, stamp=stamp)


class OracleTeacher:
    """Prefers the side with the larger true return; exactly equal returns are no preference.

    Source: Lee et al. 2021 (B-Pref), arXiv:2111.03026, sec. 3.1, the oracle. Departure: ties are not called left.
    """

    _STAMP = Stamp(judge="oracle", revision="", prompt="", decoding="")

    def answer(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict per pair, in order."""
        left, right = true_returns(pairs)
        labels = np.select([left > right, left < right], [Label.LEFT, Label.RIGHT], Label.TIE)
        return [_verdict(Label(label), self._STAMP) for label in labels]

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        assert not state, "an oracle keeps no state"


class RandomTeacher:
    """Answers left or right by a fair coin: the control that must not teach anything."""

    _STAMP = Stamp(judge="coin", revision="", prompt="", decoding="")

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def answer(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict per pair, in order."""
        heads = self._rng.random(len(pairs)) < 0.5
        return [_verdict(Label.RIGHT if head else Label.LEFT, self._STAMP) for head in heads]

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
    simulated: SimulatedTeacherConfig | None = None,
) -> Teacher:
    """The teacher that `RewardConfig.teacher` names.

    Args:
        kind: which.
        judge: who looks; only a judge teacher needs one.
        frames: draws pictures at the judge's size.
        goal: fills the slot of the prompt.
        seed: of the coin and of simulated weaknesses.
        simulated: from `config.simulated_config`; None for the teachers that are not simulated.

    Raises:
        ValueError: a judge teacher without a judge.
    """
    if simulated is not None:
        return SimulatedTeacher(simulated, seed)
    if kind == "oracle":
        return OracleTeacher()
    if kind == "random":
        return RandomTeacher(seed)
    if judge is None:
        raise ValueError("a judge teacher needs a judge, got none; pass one, or choose teacher oracle or random")
    return JudgeTeacher(judge, frames, goal)
