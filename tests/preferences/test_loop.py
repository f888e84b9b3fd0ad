import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tiny_episodes import numbered_trajectory, tiny_episodes, transitions_of, truth, verdict
from tiny_loops import FEEDBACK, build, filled, judge_teacher, same_trees

from rlvlm.core import metrics
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Label, Verdict
from rlvlm.core.steps import Pair
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.asking import Session, TeacherQueue
from rlvlm.preferences.queries import draw_pairs, look_alike
from rlvlm.preferences.teachers import OracleTeacher, RandomTeacher, Teacher
from rlvlm.rewards.source import Labelling
from rlvlm.testing import TinyEnv


class Scripted(Teacher):
    """Answers as it is told to, and remembers what it was asked."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.asked: list[Pair] = []

    def answer(self, pairs: Sequence[Pair]) -> list[Verdict]:
        self.asked += pairs
        return self._answer(pairs)


def test_the_schedule_by_hand():
    loop = build(OracleTeacher())
    assert not loop.is_due(10), "nothing to draw from"
    for episode in tiny_episodes(4):
        loop.add(episode)
    assert [step for step in (9, 10, 11) if loop.is_due(step)] == [10, 11]
    loop.run_session(12)  # late; the next is still due at 15
    assert [step for step in (12, 14, 15) if loop.is_due(step)] == [15]
    loop.run_session(31)
    assert [step for step in (31, 34, 35) if loop.is_due(step)] == [35]
    assert loop.num_sessions == 2


def test_a_session_asks_records_stores_and_fits():
    loop = filled(OracleTeacher())
    assert loop.source.version == 0 and loop.source.labelling is Labelling.ON_CHANGE
    before = loop.source.label(transitions_of(*tiny_episodes(6)))
    found = loop.run_session(10)
    assert found[metrics.QUERIES] == 8 and found[metrics.QUERIES_OK] == 8 == found[metrics.COMPARISONS]
    assert found[metrics.LABEL_ACCURACY] == 1 and found[metrics.REWARD_EPOCHS] >= 1
    assert {metrics.TEACHER_WAIT_S, metrics.REWARD_FIT_S, metrics.REWARD_LOSS, metrics.REWARD_ACCURACY} <= found.keys()
    assert loop.source.version == 1
    after = loop.source.label(transitions_of(*tiny_episodes(6)))
    assert after.shape == (120,) and after.dtype == np.float32 and not np.array_equal(before, after)
    records = loop.drain_records()
    assert [(r.env_step, r.session, r.index) for r in records] == [(10, 0, index) for index in range(8)]
    assert all(record.correct for record in records) and loop.drain_records() == []
    loop.run_session(15)
    assert {record.session for record in loop.drain_records()} == {1} and loop.source.version == 2


def test_the_budget_ends_the_asking():
    loop = filled(OracleTeacher(), feedback=dataclasses.replace(FEEDBACK, max_queries=13))
    assert loop.run_session(10)[metrics.QUERIES] == 8
    assert loop.is_due(15) and loop.run_session(15)[metrics.QUERIES] == 13
    assert not loop.is_due(1000)


def test_pairs_that_look_alike_are_never_asked_and_cost_nothing():
    teacher = Scripted(truth)
    loop = filled(teacher, feedback=dataclasses.replace(FEEDBACK, queries=60))
    found = loop.run_session(10)
    assert found[metrics.QUERIES] == 60 == len(teacher.asked) and found[metrics.QUERIES_LOOK_ALIKE] > 0
    assert not look_alike(teacher.asked, FrameStore(TinyEnv(), 16)).any()


def test_a_session_in_which_everything_looks_alike_asks_nothing_and_fits_nothing():
    teacher = Scripted(truth)
    loop = build(teacher)
    loop.add(dataclasses.replace(numbered_trajectory(20), snapshots=np.full((20, 3), 0.4, np.float32)))
    found = loop.run_session(10)
    assert teacher.asked == [] and loop.drain_records() == [] and loop.source.version == 0
    assert found[metrics.QUERIES] == 0 and found[metrics.QUERIES_LOOK_ALIKE] >= 8 and found[metrics.COMPARISONS] == 0
    assert not loop.is_due(14) and loop.is_due(15)


def test_a_session_without_a_decision_fits_nothing_unless_ties_train():
    def undecided(pairs: Sequence[Pair]) -> list[Verdict]:
        return [verdict(Label.TIE) for _ in pairs]

    loop = filled(Scripted(undecided))
    found = loop.run_session(10)
    assert found[metrics.QUERIES_NO_PREFERENCE] == 8 and loop.source.version == 0
    assert metrics.REWARD_LOSS not in found and metrics.LABEL_ACCURACY not in found
    loop = filled(Scripted(undecided), feedback=dataclasses.replace(FEEDBACK, ties="equal"))
    assert loop.run_session(10)[metrics.COMPARISONS] == 8 and loop.source.version == 1


def test_an_outage_raises_leaves_the_records_and_the_session_due():
    loop = filled(judge_teacher(failing=8))
    with pytest.raises(JudgeUnavailable, match="none of 8 queries was answered: outage"):
        loop.run_session(10)
    assert loop.is_due(10) and loop.source.version == 0 and len(loop.drain_records()) == 8
    found = loop.run_session(10)
    assert found[metrics.QUERIES_FAILED] == 8 and found[metrics.QUERIES] == 16


def test_a_teacher_with_a_missing_answer_is_an_error():
    with pytest.raises(AssertionError, match="got 7 of 8"):
        filled(Scripted(lambda pairs: truth(pairs)[1:])).run_session(10)


def test_only_the_newest_episodes_are_asked_about():
    teacher = Scripted(truth)
    loop = build(teacher, feedback=dataclasses.replace(FEEDBACK, recent_episodes=2))
    episodes = tiny_episodes(5)
    for episode in episodes:
        loop.add(episode)
    loop.run_session(10)
    known = {row.tobytes() for episode in episodes[-2:] for row in episode.obs}
    assert all(row.tobytes() in known for pair in teacher.asked for row in (pair.left.obs[0], pair.right.obs[0]))


OF_PAIRS = {"segment_steps": 2, "recent_episodes": 5}
OF_SCORES = [{}, {"sampling": "disagreement"}, {"sampling": "k_center"}, {"ahead": True}]


@pytest.mark.parametrize("sampling", ["disagreement", "entropy", "k_center"])
def test_informed_sampling_starts_after_the_first_fit(sampling):
    asked = {}
    for kind in ("uniform", sampling):
        feedback = dataclasses.replace(FEEDBACK, sampling=kind, pool=5)
        teacher = Scripted(truth)
        loop = filled(teacher, feedback=feedback)
        loop.run_session(10)
        loop.run_session(15)
        asked[kind] = [float(pair.left.snapshots[0, 2]) for pair in teacher.asked]
    assert len(asked[sampling]) == 16 and asked["uniform"][:8] == asked[sampling][:8]
    assert asked["uniform"][8:] != asked[sampling][8:]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "sees"), [("preference", "image"), ("preference", "state"), ("score", "image")])
def test_the_true_reward_changes_nothing_for_a_judge_and_everything_for_an_oracle(source, sees):
    def model_after(teacher: Teacher, scramble: bool) -> Any:
        loop, rng = build(teacher, sees=sees, source=source), np.random.default_rng(7)
        for episode in tiny_episodes(6):
            noise = rng.normal(size=len(episode)).astype(np.float32)
            truth = {"env_rewards": noise, "progress": np.abs(noise) % 1} if scramble else {}
            loop.add(dataclasses.replace(episode, **truth))
        loop.run_session(10)
        loop.run_session(15)
        assert loop.source.version == 2
        return loop.get_state()["model"]

    assert same_trees(model_after(judge_teacher(), False), model_after(judge_teacher(), True))
    assert same_trees(model_after(RandomTeacher(0), False), model_after(RandomTeacher(0), True))
    assert not same_trees(model_after(OracleTeacher(), False), model_after(OracleTeacher(), True))


class SlowTeacher(Teacher):
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


def test_sessions_come_back_at_once_or_one_later():
    at_once, ahead = (TeacherQueue(OracleTeacher(), ahead=ahead) for ahead in (False, True))
    pairs = draw_pairs(tiny_episodes(3), 5, 2, np.random.default_rng(0))
    sessions = [Session(number=number, env_steps=0, questions=pairs, num_look_alike=0) for number in range(3)]
    assert [[one.number for one in at_once.put(each)] for each in sessions] == [[0], [1], [2]]
    assert [[one.number for one in ahead.put(each)] for each in sessions] == [[], [0], [1]]
    assert ahead.num_pending == 5
    (last,) = ahead.finish()
    assert last.number == 2 and last.answers == OracleTeacher().answer(pairs)
    assert ahead.num_pending == 0 and ahead.finish() == []


def test_asking_ahead_does_not_wait_and_draws_in_its_own_thread():
    teacher = SlowTeacher()
    ahead = TeacherQueue(teacher, ahead=True)
    pairs = draw_pairs(tiny_episodes(3), 5, 2, np.random.default_rng(0))
    assert ahead.put(Session(number=0, env_steps=0, questions=pairs, num_look_alike=0)) == []  # no answer can have come
    assert teacher.drawn_in == [threading.get_ident()]
    teacher.may_answer.set()
    assert len(ahead.finish()) == 1


def test_a_loop_that_asks_ahead_fits_one_session_later_and_loses_nothing():
    feedback = type(FEEDBACK)(first_step=10, every_steps=5, queries=8, max_queries=16, ahead=True)
    loop = filled(judge_teacher(), feedback=feedback)
    first = loop.run_session(10)
    assert loop.source.version == 0 and first[metrics.QUERIES] == 0
    assert loop.run_session(15)[metrics.QUERIES] == 8
    assert loop.source.version == 1
    assert not loop.is_due(20), "pending queries count against the budget"
    loop.finish(20)
    assert [record.env_step for record in loop.drain_records()] == [10] * 8 + [15] * 8
