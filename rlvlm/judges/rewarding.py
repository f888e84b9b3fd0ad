"""Rewards for somebody else's trainer, and what a missing answer is worth there; the adapters ask through this."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Status
from rlvlm.judges.client import Judge, Scores

WithoutAnswer = Literal["raise", "none", "neutral"]
"""Handling of an answer that could not be read or had. raise: JudgeUnavailable; none: no reward, which the trainer
has to understand; neutral: a reward that says nothing."""

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Asks a judge for rewards in [0, 1]: how much of its goal each clip reaches by its end."""

    judge: Judge
    """Judge to ask, or another object with its `score` and `score_async`."""
    goal: str = ""
    """Goal of all clips; empty if each has its own."""
    without_answer: WithoutAnswer = "raise"
    """Handling of missing answers, those of a server that was killed included."""
    neutral: float = 0.5
    """Reward for `without_answer neutral`, in [0, 1]."""
    allowed: Sequence[WithoutAnswer] = field(default=("raise", "none", "neutral"), repr=False)
    """What the trainer can do with a missing answer."""

    def __post_init__(self) -> None:
        if self.without_answer not in self.allowed:
            raise ValueError(f"without_answer must be {' or '.join(self.allowed)} here, got {self.without_answer!r}")
        if not 0 <= self.neutral <= 1:
            raise ValueError(f"neutral must be in [0, 1], got {self.neutral}")

    def ask(self, clips: Sequence[Any], goals: Sequence[str] | None = None) -> Scores:
        """Returns a reward and the judge's status for each clip; raises as `Judge.score`.

        Args:
            clips: [N] what `Judge.score` takes as clips; nothing is asked about none.
            goals: [N] goals; None takes `goal`.
        """
        try:
            return self._filled(self.judge.score(clips, self.goal if goals is None else goals))
        except JudgeUnavailable as error:
            return self._outage(error, len(clips))

    async def ask_async(self, clips: Sequence[Any], goals: Sequence[str] | None = None) -> Scores:
        """Returns what `ask` does, without blocking the caller's event loop."""
        try:
            return self._filled(await self.judge.score_async(clips, self.goal if goals is None else goals))
        except JudgeUnavailable as error:
            return self._outage(error, len(clips))

    def _outage(self, error: JudgeUnavailable, num: int) -> Scores:
        # a wrong key or a spent budget stays so: without rewards a run would only seem to learn
        if self.without_answer == "raise" or error.is_final:
            raise error
        _LOGGER.warning("no answer to %d questions, whose reward is %s: %s", num, self._substitute, error)
        return Scores([self._substitute] * num, [str(Status.FAILED)] * num)

    def _filled(self, scores: Scores) -> Scores:
        missing = [status for value, status in zip(*scores, strict=True) if value is None]
        if missing and self.without_answer == "raise":
            raise JudgeUnavailable(
                f"the judge gave no score for {len(missing)} of {len(scores.values)} clips: {missing[0]}",
                f"look at the judge, or choose without_answer {' or '.join(self.allowed[1:])}",
            )
        return Scores([self._substitute if value is None else value for value in scores.values], scores.statuses)

    @property
    def _substitute(self) -> float | None:
        return self.neutral if self.without_answer == "neutral" else None
