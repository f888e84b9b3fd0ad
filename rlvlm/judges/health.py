"""Decides when to give up a judge that does not answer or cannot be understood. Used by all repeated callers."""

from collections import deque
from collections.abc import Iterable, Sequence

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.finite import check_finite
from rlvlm.core.judging import Score, Status, Verdict

_WINDOW = 200
_MIN_ANSWERS = 50
"""A judge is given up once over half of its last `_WINDOW` answers, at least `_MIN_ANSWERS`, cannot be read."""


class JudgeHealth:
    """Status of a judge's latest answers."""

    def __init__(self) -> None:
        self._recent: deque[Status] = deque(maxlen=_WINDOW)

    def note(self, answers: Iterable[Verdict | Score]) -> None:
        """Records answers, oldest first.

        Raises:
            NumericsError: an answer holds NaN or infinity.
        """
        for answer in answers:
            # NaN passes every comparison below and would be learned from for hours before a loss shows it
            numbers = (answer.value,) if isinstance(answer, Score) else answer.probabilities
            given = [number for number in numbers or () if number is not None]
            check_finite(
                f"the judge {answer.stamp.judge} answered {answer.text[:80]!r}",
                "choose another judge, then start the run anew",
                {"scores" if isinstance(answer, Score) else "probabilities": given},
            )
            self._recent.append(answer.status)

    def check(self, answers: Sequence[Verdict | Score]) -> None:
        """Checks that the judge still gives usable answers; `answers` are the newest, already noted.

        Raises:
            JudgeUnavailable: all of `answers` failed, or most of the latest cannot be read.
        """
        # an outage: a run must not go on without labels
        if answers and all(answer.status is Status.FAILED for answer in answers):
            raise JudgeUnavailable(
                f"none of {len(answers)} queries was answered: {answers[0].text or 'no reason given'}",
                "check that the judge is up (`rlvlm doctor`), then go on with `rlvlm resume`",
            )
        # over many calls: a session of eight answers may be unreadable by bad luck
        num_invalid = self._recent.count(Status.INVALID)
        if len(self._recent) >= _MIN_ANSWERS and 2 * num_invalid > len(self._recent):
            of = len(self._recent)
            self._recent.clear()  # a run that goes on with another judge starts with a clean slate
            samples = [answer.text[:80] for answer in answers if answer.status is Status.INVALID][:3]
            raise JudgeUnavailable(
                f"{num_invalid} of the last {of} answers could not be read, such as {samples}",
                "choose another --judge.prompt, --judge.score or --judge.model; a truncated answer needs a larger "
                "--judge.max-new-tokens",
            )

    def get_state(self) -> list[str]:
        return [str(status) for status in self._recent]

    def set_state(self, state: Sequence[str]) -> None:
        self._recent = deque(map(Status, state), maxlen=_WINDOW)
