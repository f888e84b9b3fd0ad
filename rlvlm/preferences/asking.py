"""Asks a teacher: sessions are answered at once, while the agent learns, or by a person when there is time. Used by the
loop.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from rlvlm.core.judging import Score, Verdict
from rlvlm.core.steps import Pair, Segment
from rlvlm.preferences.dataset import sides_of
from rlvlm.preferences.teachers import Deferred, Teacher


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Questions asked at one point of the run, or some of them, with the teacher's answers."""

    number: int
    """Index of the session, from 0."""
    env_steps: int
    """Env steps done when the questions were drawn."""
    questions: Sequence[Pair | Segment]
    """Pairs to compare, or segments to score."""
    num_look_alike: int
    """Number of questions that were drawn but not asked, since their sides look alike."""
    answers: Sequence[Verdict | Score | Deferred] = field(default_factory=list)
    """One verdict per pair or score per segment, in order, or `Deferred`; empty before the session is answered."""
    wait_s: float = 0.0
    """Time that the agent waited for the answers, in seconds."""
    indices: list[int] | None = None
    """Indices of the questions within the session if this is a part of it; None for all, in order."""
    by_person: bool = False
    """Whether a person answers these questions."""

    def part(self, positions: Sequence[int], answers: Sequence[Verdict | Score | Deferred] = ()) -> "Session":
        """Returns some of the questions with these answers; counts for the whole session are reset."""
        indices = range(len(self.questions)) if self.indices is None else self.indices
        return replace(
            self,
            questions=[self.questions[position] for position in positions],
            answers=list(answers),
            indices=[indices[position] for position in positions],
            num_look_alike=0,
            wait_s=0.0,
        )


@dataclass(kw_only=True, slots=True)
class _Open:
    """Questions of one session that were put to a person."""

    session: Session
    find: Callable[[], Sequence[Verdict | Score | None]]
    """Returns the answers that have come, and None for the others."""
    answers: Sequence[Verdict | Score | None]
    """Latest result of `find`."""
    used: set[int] = field(default_factory=set)
    """Indices of answers that were handed back."""

    @property
    def ready(self) -> list[int]:
        """Indices of answers that were not handed back yet."""
        return [index for index, answer in enumerate(self.answers) if answer is not None and index not in self.used]

    @property
    def rest(self) -> Session:
        """Questions whose answers were not handed back."""
        return self.session.part([index for index in range(len(self.answers)) if index not in self.used])


class TeacherQueue:
    """Puts sessions to a teacher and waits for the answers, either before the agent's next step or while it learns.

    Images are drawn at once, in the thread that owns the renderer. With `ahead`, only the wait for a judge moves to
    another thread, and a session is handed back when the next one is put. Answers are used at a fixed step, whenever
    they came, so a run does not depend on the judge's speed.

    The run does not wait for a person: deferred questions stay open over any number of sessions, and `take` hands back
    the answers that have come.

    Args:
        teacher: teacher to ask.
        ahead: whether the agent learns while the teacher answers.
    """

    def __init__(self, teacher: Teacher, *, ahead: bool) -> None:
        self._teacher = teacher
        self._ahead = ahead
        self._state_before = teacher.get_state()
        self._pending: tuple[Session, Future[Sequence[Verdict | Score | Deferred]]] | None = None
        self._open: list[_Open] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="teacher")

    @property
    def num_pending(self) -> int:
        """Number of queries asked and not handed back yet."""
        return self.num_open + (0 if self._pending is None else len(self._pending[0].questions))

    @property
    def num_open(self) -> int:
        """Number of queries put to a person and not handed back yet."""
        return sum(len(each.answers) - len(each.used) for each in self._open)

    @property
    def num_ready(self) -> int:
        """Number of queries that a person has answered and that were not handed back; checks for new answers."""
        for each in self._open:
            each.answers = each.find()
        return sum(len(each.ready) for each in self._open)

    def put(self, session: Session) -> list[Session]:
        """Asks a session, and returns the sessions that are answered now.

        This is the session itself, possibly with `Deferred` answers, or with `ahead` the one before it.

        Raises:
            JudgeUnavailable: the teacher gave no answer at all.
        """
        answered = self.finish()
        started = time.perf_counter()
        # a checkpoint made while the teacher answers holds this state and the questions, which are then asked again
        self._state_before = self._teacher.get_state()
        # drawing needs the renderer of this thread; only the wait may move to another one
        prepared = self._teacher.prepare(session.questions) if session.questions else lambda: []
        if not self._ahead:
            answers = prepared()
            if deferred := [index for index, answer in enumerate(answers) if isinstance(answer, Deferred)]:
                self._follow(session.part(deferred))
            return [replace(session, answers=answers, wait_s=time.perf_counter() - started)]
        self._pending = session, self._thread.submit(prepared)
        return answered

    def finish(self) -> list[Session]:
        """Returns the pending session once it is answered; empty without one. Raises as `put` does."""
        if self._pending is None:
            return []
        session, future = self._pending
        started = time.perf_counter()
        answers = future.result()
        self._pending = None
        return [replace(session, answers=answers, wait_s=time.perf_counter() - started)]

    def take(self) -> list[Session]:
        """Returns a person's answers that were not handed back yet; checks for new ones."""
        handed_back = []
        if self.num_ready:
            for each in self._open:
                if ready := each.ready:
                    answers = [answer for index in ready if (answer := each.answers[index]) is not None]
                    self._teacher.note_used(answers)
                    handed_back.append(each.session.part(ready, answers))
                    each.used.update(ready)
            self._open = [each for each in self._open if len(each.used) < len(each.answers)]
        return handed_back

    def _follow(self, session: Session) -> None:
        """Puts the questions of `session` to the person."""
        find = self._teacher.follow(session.questions)
        session = replace(session, by_person=True)
        self._open.append(_Open(session=session, find=find, answers=[None] * len(session.questions)))

    def get_state(self) -> dict[str, Any]:
        """Returns the teacher's state before the pending questions, these questions, and those open for a person.

        Their segments are arrays [N, S, L, ...] of N questions with S sides.
        """
        is_pending = self._pending is not None
        return {
            "teacher": self._state_before if is_pending else self._teacher.get_state(),
            "pending": [_pack(self._pending[0])] if self._pending is not None else [],
            "open": [_pack(each.rest) for each in self._open],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; pending questions are asked again."""
        if self._pending is not None:  # a teacher that still answers would draw from the restored state
            wait([self._pending[1]])
        self._teacher.set_state(state["teacher"])
        self._pending, self._open = None, []
        for packed in state["pending"]:
            self.put(_unpack(packed))
        for packed in state.get("open", []):  # missing in checkpoints from before there were people
            self._follow(_unpack(packed))


def _pack(session: Session) -> dict[str, Any]:
    """Converts a session without answers to numbers and arrays."""
    return {
        "number": session.number,
        "env_steps": session.env_steps,
        "num_look_alike": session.num_look_alike,
        "num_questions": len(session.questions),
        "indices": list(range(len(session.questions)) if session.indices is None else session.indices),
        "sides": {
            column.name: np.array([[getattr(side, column.name) for side in sides_of(q)] for q in session.questions])
            for column in fields(Segment)
        },
    }


def _unpack(packed: dict[str, Any]) -> Session:
    """Restores the session from the result of `_pack`."""
    questions: list[Pair | Segment] = []
    for index in range(packed["num_questions"]):
        columns = {name: column[index] for name, column in packed["sides"].items()}
        num_sides = len(columns["obs"])
        sides = [Segment(**{name: each[side] for name, each in columns.items()}) for side in range(num_sides)]
        questions.append(sides[0] if num_sides == 1 else Pair(left=sides[0], right=sides[1]))
    about = {name: packed[name] for name in ("number", "env_steps", "num_look_alike")}
    return Session(**about, questions=questions, indices=packed.get("indices"))
