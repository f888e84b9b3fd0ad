"""Rewards for somebody else's trainer, and what a missing answer is worth there; the adapters ask through this."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Status
from rlvlm.judges.client import Clips, Judge, Scores

WithoutAnswer = Literal["raise"] | float | None
"""Handling of an answer that could not be read or had. raise: JudgeUnavailable; a number in [0, 1]: that reward; None:
no reward, which the trainer has to understand."""

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
    takes_none: bool = False
    """Whether the trainer understands that there is no reward."""

    def __post_init__(self) -> None:
        chosen = self.without_answer
        is_reward = isinstance(chosen, int | float) and 0 <= chosen <= 1
        if not (chosen == "raise" or is_reward or chosen is None and self.takes_none):
            none = ", or None" if self.takes_none else ""
            raise ValueError(f"without_answer is raise, or a reward in [0, 1]{none}; got {chosen!r}")

    def ask(self, clips: Clips, goals: Sequence[str] | None = None) -> Scores:
        """Returns a reward and the judge's status for each clip; raises as `Judge.score`.

        Args:
            clips: [N] what `Judge.score` takes as clips; nothing is asked about none.
            goals: [N] goals; None takes `goal`.
        """
        try:
            return self._filled(self.judge.score(clips, self.goal if goals is None else goals))
        except JudgeUnavailable as error:
            return self._filled(self._outage(error, len(clips)))

    async def ask_async(self, clips: Clips, goals: Sequence[str] | None = None) -> Scores:
        """Returns what `ask` does, without blocking the caller's event loop."""
        try:
            return self._filled(await self.judge.score_async(clips, self.goal if goals is None else goals))
        except JudgeUnavailable as error:
            return self._filled(self._outage(error, len(clips)))

    def _outage(self, error: JudgeUnavailable, num: int) -> Scores:
        # a wrong key or a spent budget stays so: without rewards a run would only seem to learn
        if self.without_answer == "raise" or error.is_final:
            raise error
        _LOGGER.warning("no answer to %d questions, whose reward is %s: %s", num, self.without_answer, error)
        return Scores([None] * num, [str(Status.FAILED)] * num)

    def _filled(self, scores: Scores) -> Scores:
        missing = [status for value, status in zip(*scores, strict=True) if value is None]
        if self.without_answer == "raise":
            if not missing:
                return scores
            what = f"the judge gave no score for {len(missing)} of {len(scores.values)} clips: {missing[0]}"
            raise JudgeUnavailable(what, "look at the judge, or name the reward that this is worth: without_answer=0.5")
        return Scores([self.without_answer if value is None else value for value in scores.values], scores.statuses)
