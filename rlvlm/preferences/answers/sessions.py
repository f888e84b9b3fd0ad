"""How a session's questions reach the teacher: the agent waits for answers, or learns on. Used by the loop."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

import numpy as np

from rlvlm.core.steps import Pair, Segment
from rlvlm.preferences.answers.teachers import PatientTeacher, Teacher, sides_of

_COLUMNS = tuple(field.name for field in fields(Segment))


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Questions put together at one point of the run."""

    number: int
    """From 0."""
    env_steps: int
    """Env steps done by then."""
    questions: list[Any]
    """Pairs to be compared, or segments to be scored."""
    num_look_alike: int
    """Questions that were drawn but not asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A session and what the teacher said."""

    session: Session
    answers: list[Any]
    """One verdict per pair or score per segment, in order."""
    wait_s: float
    """How long the agent stood still for them, seconds."""


class Asking(Protocol):
    """Hands sessions to a teacher, and hands them back once they are answered."""

    @property
    def num_pending(self) -> int:
        """Queries asked and not handed back yet."""
        ...

    def put(self, session: Session) -> list[Answered]:
        """Asks; returns the sessions whose answers may be used now, oldest first.

        Raises:
            JudgeUnavailable: the teacher answers nothing at all.
        """
        ...

    def finish(self) -> list[Answered]:
        """Waits for everything that is pending and returns it. Raises as `put` does."""
        ...

    def get_state(self) -> dict[str, Any]:
        """What is pending, and the teacher's state: dicts, lists, arrays, numbers and strings."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; what was pending is asked again."""
        ...


class SyncLabelling:
    """Every session is answered before the agent takes its next step."""

    num_pending = 0

    def __init__(self, teacher: Teacher) -> None:
        self._teacher = teacher

    def put(self, session: Session) -> list[Answered]:
        """This session, answered."""
        started = time.perf_counter()
        answers = self._teacher.answer(session.questions) if session.questions else []
        return [Answered(session=session, answers=answers, wait_s=time.perf_counter() - started)]

    def finish(self) -> list[Answered]:
        return []

    def get_state(self) -> dict[str, Any]:
        return {"teacher": self._teacher.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._teacher.set_state(state["teacher"])


class AsyncLabelling:
    """A session is answered while the agent learns on, and handed back when the next one is put.

    Images are drawn at once, in the thread that owns the renderer; only the wait for a judge moves to another one.
    Answers are used at a fixed step, whenever they came, so a run does not depend on how fast the judge was.
    """

    def __init__(self, teacher: Teacher) -> None:
        self._teacher = teacher
        self._state_before = teacher.get_state()
        self._pending: tuple[Session, Future[list[Any]]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="teacher")

    @property
    def num_pending(self) -> int:
        """Queries asked and not handed back yet."""
        return 0 if self._pending is None else len(self._pending[0].questions)

    def put(self, session: Session) -> list[Answered]:
        """The session before this one."""
        answered = self.finish()
        self._state_before = self._teacher.get_state()
        teacher, questions = self._teacher, session.questions
        work: Callable[[], list[Any]] = list  # nothing was asked
        if questions:
            patient = isinstance(teacher, PatientTeacher)
            work = teacher.prepare(questions) if patient else partial(teacher.answer, questions)
        self._pending = session, self._thread.submit(work)
        return answered

    def finish(self) -> list[Answered]:
        """What is pending, once it is answered."""
        if self._pending is None:
            return []
        session, future = self._pending
        started = time.perf_counter()
        answers = future.result()
        self._pending = None
        return [Answered(session=session, answers=answers, wait_s=time.perf_counter() - started)]

    def get_state(self) -> dict[str, Any]:
        if self._pending is None:
            return {"teacher": self._teacher.get_state(), "pending": []}
        return {"teacher": self._state_before, "pending": [_pack(self._pending[0])]}

    def set_state(self, state: dict[str, Any]) -> None:
        if self._pending is not None:  # a teacher that still answers would draw from the state that is restored
            wait([self._pending[1]])
        self._teacher.set_state(state["teacher"])
        self._pending = None
        for packed in state["pending"]:
            self.put(_unpack(packed))


def _pack(session: Session) -> dict[str, Any]:
    """The session as numbers and arrays [N, S, L, ...], S segments per question."""
    return {
        "number": session.number,
        "env_steps": session.env_steps,
        "num_look_alike": session.num_look_alike,
        "num_questions": len(session.questions),
        "sides": {
            name: np.array([[getattr(side, name) for side in sides_of(question)] for question in session.questions])
            for name in _COLUMNS
        },
    }


def _unpack(packed: dict[str, Any]) -> Session:
    """The inverse of `_pack`."""
    questions: list[Pair | Segment] = []
    for at in range(packed["num_questions"]):
        columns = {name: packed["sides"][name][at] for name in _COLUMNS}
        sides = [
            Segment(**{name: column[side] for name, column in columns.items()}) for side in range(len(columns["obs"]))
        ]
        questions.append(sides[0] if len(sides) == 1 else Pair(left=sides[0], right=sides[1]))
    return Session(
        number=packed["number"],
        env_steps=packed["env_steps"],
        questions=questions,
        num_look_alike=packed["num_look_alike"],
    )
