import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tiny_episodes import tiny_episodes
from tiny_loops import FEEDBACK, filled, judge_teacher, same_trees

from rlvlm.core import metrics
from rlvlm.core.judging import Verdict
from rlvlm.core.steps import Pair
from rlvlm.preferences.answers.sessions import AsyncLabelling, Session, SyncLabelling
from rlvlm.preferences.answers.teachers import OracleTeacher, RandomTeacher
from rlvlm.preferences.questions.queries import draw_pairs


def session(number: int) -> Session:
    pairs = draw_pairs(tiny_episodes(3), 5, 2, np.random.default_rng(number))
    return Session(number=number, env_steps=100 * number, questions=pairs, num_look_alike=number)


class SlowTeacher:
    """Draws in the thread that asks, and answers only once it is let."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.drawn_in: list[int] = []

    def prepare(self, pairs: Sequence[Pair]) -> Callable[[], list[Verdict]]:
        self.drawn_in.append(threading.get_ident())

        def wait() -> list[Verdict]:
            assert self.may_answer.wait(timeout=60)
            return OracleTeacher().answer(pairs)

        return wait

    def answer(self, pairs: Sequence[Pair]) -> list[Verdict]:
        return self.prepare(pairs)()

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass


def test_sessions_come_back_at_once_or_one_later() -> None:
    at_once, ahead = SyncLabelling(OracleTeacher()), AsyncLabelling(OracleTeacher())
    sessions = [session(number) for number in range(3)]
    assert [[one.session.number for one in at_once.put(each)] for each in sessions] == [[0], [1], [2]]
    assert [[one.session.number for one in ahead.put(each)] for each in sessions] == [[], [0], [1]]
    assert ahead.num_pending == 5
    (last,) = ahead.finish()
    assert last.session is sessions[2] and last.answers == OracleTeacher().answer(sessions[2].questions)
    assert ahead.num_pending == 0 and ahead.finish() == []


def test_asking_ahead_does_not_wait_and_draws_in_its_own_thread() -> None:
    teacher = SlowTeacher()
    ahead = AsyncLabelling(teacher)
    assert ahead.put(session(0)) == []  # returns although no answer can have come
    assert teacher.drawn_in == [threading.get_ident()]
    teacher.may_answer.set()
    assert len(ahead.finish()) == 1


def test_what_is_pending_is_asked_again_after_a_restart_with_the_same_answers() -> None:
    ahead = AsyncLabelling(RandomTeacher(seed=0))
    ahead.put(session(0))
    ahead.put(session(1))
    restored = AsyncLabelling(RandomTeacher(seed=99))
    restored.set_state(ahead.get_state())
    (mine,), (theirs,) = ahead.finish(), restored.finish()
    assert mine.answers == theirs.answers
    assert same_trees(ahead.get_state()["teacher"], restored.get_state()["teacher"])
    assert theirs.session.env_steps == 100 and theirs.session.num_look_alike == 1
    for side in ("left", "right"):
        left, right = (getattr(one.session.questions[3], side).snapshots for one in (mine, theirs))
        np.testing.assert_array_equal(left, right)


def test_a_loop_that_asks_ahead_fits_one_session_later_and_loses_nothing() -> None:
    feedback = type(FEEDBACK)(first_step=10, every_steps=5, queries=8, max_queries=16, ahead=True)
    loop = filled(judge_teacher(), feedback=feedback)
    first = loop.run_session(10)
    assert loop.source.version == 0 and first[metrics.QUERIES] == 0
    restored = filled(judge_teacher(), feedback=feedback)
    restored.set_state(loop.get_state())
    for each in (loop, restored):
        assert each.run_session(15)[metrics.QUERIES] == 8
        assert each.source.version == 1
        assert not each.is_due(20), "pending queries count against the budget"
        each.finish()
        assert [record.env_step for record in each.drain_records()] == [10] * 8 + [15] * 8
    assert same_trees(loop.get_state(), restored.get_state())
