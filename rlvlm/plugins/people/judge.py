"""A person as a judge: questions wait in a label store until they are answered on the page of `rlvlm labels ask`."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeVar

from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.guests import section_of
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.judges.config import Abilities, JudgeConfig
from rlvlm.judges.prompts import problem_of
from rlvlm.labels.records import Question, describe
from rlvlm.labels.store import LabelStore
from rlvlm.plugins.people.config import HumanConfig
from rlvlm.plugins.people.queue import PeopleQueue, swap_choice, to_answer

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Interval between two polls for answers, in seconds."""
REMIND_S = 600.0
"""Interval between two reminders in the log about waiting questions, in seconds."""

Item = TypeVar("Item", Query, Clip)
Answer = TypeVar("Answer", Verdict, Score)


def build(config: JudgeConfig) -> "HumanJudge":
    """Returns the people who answer through the label store that `config` names.

    Raises:
        JudgeUnavailable: it names none, or what is no store.
    """
    if not config.store:
        raise JudgeUnavailable(
            "judge.backend human keeps questions and answers in a label store, and none is named",
            "--judge.store DIR, and answer with: rlvlm labels ask DIR",
        )
    try:
        return HumanJudge(config, LabelStore(Path(config.store).expanduser()))
    except UsageError as error:
        raise JudgeUnavailable(str(error), error.fix) from error


class HumanJudge:
    """Asks people, and waits for their answers, however long that takes.

    The store is its memory: a question that was answered once, in either order, is not asked again, and one that was
    waiting when a run died keeps waiting. So it needs no `CachedJudge` around it. The store keeps each person's own
    answer under `human:NAME`; this judge returns the agreed answer under its own stamp. A question that people skip is
    `invalid`.

    Args:
        config: `human.agreement` people answer each question.
        store: keeps questions, images and answers.
        where: tells the user how to answer, e.g. `rlvlm labels ask RUN`.
        each_order: whether a pair in the other order is another question, as a bench needs it; otherwise one answer
            holds for both, since the page draws the sides at random.
        is_stopped: polled while waiting; once it returns True, unanswered questions fail.
    """

    def __init__(
        self,
        config: JudgeConfig,
        store: LabelStore,
        *,
        where: str = "",
        each_order: bool = False,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.where = where or f"rlvlm labels ask {store.folder}"
        self._agreement = section_of(config, HumanConfig).agreement
        self._queue = PeopleQueue(store)
        self._each_order = each_order
        self._is_stopped = is_stopped
        self._attending: IO[bytes] | None = None
        self._reminded = -REMIND_S

    @property
    def stamp(self) -> Stamp:
        """Stamp of every person's answers; the store knows who answered."""
        return Stamp(judge="human", revision="", prompt="page/1", decoding=f"agreement={self._agreement}")

    def waiting(self) -> int:
        """Returns the number of questions in the store that wait for a person."""
        self._queue.refresh()
        return self._queue.waiting()

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        failed = Verdict(status=Status.FAILED, label=None, stamp=self.stamp)
        return self._answer(queries, failed)

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """Returns one score per clip, in order, once people have answered: 1 to 5 on the page, 0 to 1 here."""
        failed = Score(status=Status.FAILED, value=None, stamp=self.stamp)
        return [
            replace(score, num_frames=0 if score.status is Status.FAILED else len(clip.frames))
            for clip, score in zip(clips, self._answer(clips, failed), strict=True)
        ]

    def ask(self, items: Sequence[Query | Clip]) -> None:
        """Posts questions and returns at once; `compare` and `score` find the answers later.

        Raises:
            OSError: the disk cannot be written.
        """
        described = [describe(item) for item in items if problem_of(item, Abilities()) is None]
        if not described:
            return
        if self._attending is None:  # while this process lives, the page shows that somebody waits
            self._attending = self._queue.attend()
        self._queue.store.keep_images([image for _, images in described for image in images])
        questions = [question for question, _ in described]
        self._queue.ask(questions, agreement=self._agreement, each_order=self._each_order)

    def answered(self, items: Sequence[Item]) -> list[bool]:
        """Returns whether each question is answered, in order; a question that cannot be asked counts as answered."""
        self._queue.refresh()
        return [problem_of(item, Abilities()) is not None or self._is_agreed(describe(item)[0]) for item in items]

    def find(self, questions: Sequence[Question]) -> list[Verdict | None]:
        """Returns the verdicts on earlier comparisons, in order; None for those that people have not answered yet."""
        self._queue.refresh()
        failed = Verdict(status=Status.FAILED, label=None, stamp=self.stamp)
        return [self._found(question, failed, False) if self._is_agreed(question) else None for question in questions]

    def said(self, clips: Sequence[Clip]) -> list[Score | None]:
        """Returns what people say of clips, in order, also if it can still be taken back; None without an answer."""
        self._queue.refresh()
        failed = Score(status=Status.FAILED, value=None, stamp=self.stamp)
        found = [self._found(describe(clip)[0], failed, is_final=True) for clip in clips]
        return [None if score.status is Status.FAILED else score for score in found]

    def _is_agreed(self, question: Question) -> bool:
        found = self._queue.find(question)
        return found is not None and found[0].agreed() is not None

    def _answer(self, items: Sequence[Item], failed: Answer) -> list[Answer]:
        problems = [problem_of(item, Abilities()) for item in items]
        questions = [describe(item)[0] for item in items]
        fair = [question for question, problem in zip(questions, problems, strict=True) if problem is None]
        self.ask(items)
        is_final = False
        while missing := [question for question in fair if not self._is_agreed(question)]:
            if self._is_stopped():
                is_final = True  # answers of a moment ago count: nobody can undo them any more
                break
            if time.monotonic() - self._reminded >= REMIND_S:
                self._reminded = time.monotonic()
                logger.info("%d questions wait for a person; answer them with: %s", len(missing), self.where)
            time.sleep(POLL_S)
            self._queue.refresh()
        return [
            self._found(question, failed, is_final) if problem is None else replace(failed, text=problem)
            for question, problem in zip(questions, problems, strict=True)
        ]

    def _found(self, question: Question, failed: Answer, is_final: bool) -> Answer:
        found = self._queue.find(question)
        if found is None or (choice := found[0].agreed(is_final=is_final)) is None:
            return replace(failed, text=f"not answered yet: {self.where}", question=question.id)
        asked, is_swapped = found
        seconds = max(said.seconds for said in asked.answers.values())
        answer = to_answer(question.kind, swap_choice(choice) if is_swapped else choice, self.stamp, seconds)
        assert isinstance(answer, type(failed))
        return replace(answer, question=question.id)
