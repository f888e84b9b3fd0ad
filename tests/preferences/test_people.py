"""Teachers that ask a person: the run goes on, answers come in parts, and what they did can be done again."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_episodes import tiny_episode, tiny_episodes, truth, verdict
from tiny_loops import FEEDBACK, SMALL, build, from_files, same_trees, through_files

from rlvlm.core import metrics
from rlvlm.core.judging import Label, Query, Status, Verdict
from rlvlm.core.steps import Pair
from rlvlm.envs.images import FrameStore
from rlvlm.judges.build import open_person
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.votes import BothOrders
from rlvlm.labels.store import LabelStore
from rlvlm.preferences.config import MixedConfig, SimulatedTeacherConfig, check_learning
from rlvlm.preferences.loop import FeedbackLoop
from rlvlm.preferences.people import MixedTeacher, PersonTeacher, make_teacher, most_doubtful
from rlvlm.preferences.queries import draw_pairs
from rlvlm.preferences.records import QueryRecord
from rlvlm.preferences.teachers import Deferred, OracleTeacher, SimulatedTeacher, Teacher
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.runs.files.answers import final_answers
from rlvlm.runs.files.folder import QUERY_COLUMNS
from rlvlm.runs.files.records import query_row
from rlvlm.runs.files.summary import summarise_queries
from rlvlm.runs.files.tables import CsvTable
from rlvlm.testing import FakeJudge, TinyEnv


class Patient(Teacher):
    """A person who sees the true progress, and answers the oldest open queries when told to."""

    asks_person = True

    def __init__(self) -> None:
        self.queries: dict[bytes, Pair] = {}
        self.answers: dict[bytes, Verdict] = {}

    def answer(self, questions: Sequence[Pair]) -> list[Deferred]:
        return [Deferred() for _ in questions]

    def follow(self, questions: Sequence[Pair]) -> Callable[[], list[Any]]:
        names = [pair.left.obs.tobytes() + pair.right.obs.tobytes() for pair in questions]
        self.queries |= {name: pair for name, pair in zip(names, questions, strict=True) if name not in self.queries}
        return lambda: [self.answers.get(name) for name in names]

    def work(self, num: int) -> None:
        for name in [name for name in self.queries if name not in self.answers][:num]:
            self.answers[name] = replace(truth([self.queries[name]])[0], latency_s=4.0)


def person_loop(person: Teacher, seed: int = 0, mixed: MixedConfig | None = None) -> FeedbackLoop:
    teacher = person if mixed is None else MixedTeacher(OracleTeacher(), person, mixed)
    loop = build(teacher, replace(FEEDBACK, queries=20, ties="equal"), seed=seed)
    for episode in tiny_episodes(6):
        loop.add(episode)
    return loop


def step_through(loop: FeedbackLoop, steps: range, work: Callable[[int], None]) -> list[QueryRecord]:
    """Takes these steps, asks where that is due, and lets the person work before each; the records in order."""
    records: list[Any] = []
    for step in steps:
        work(step)
        if loop.is_due(step):
            loop.run_session(step)
        records += loop.drain_records()
    return records


def test_a_person_is_not_waited_for_and_answers_train_in_parts():
    person = Patient()
    loop = person_loop(person)
    assert loop.run_session(10)[metrics.QUERIES_OPEN] == 20 and loop.source.version == 0
    assert [loop.is_due(step) for step in (11, 15, 10_000)] == [False] * 3, "an hour without an answer asks no more"
    assert loop.steps_to_session(15) is None and loop.drain_records() == []
    person.work(1)
    assert not loop.is_due(11), "a tenth of a session is used together"
    person.work(3)
    assert loop.is_due(11) and loop.steps_to_session(15) is None
    found = loop.run_session(11)
    assert loop.source.version == 1 and loop.num_sessions == 1
    assert (found[metrics.QUERIES], found[metrics.QUERIES_OPEN]) == (4, 16)
    assert found[metrics.PERSON_ANSWERS] == 4 and found[metrics.PERSON_MINUTES] == pytest.approx(4 * 4 / 60)
    records = loop.drain_records()
    assert [(r.env_step, r.used_step, r.session, r.index) for r in records] == [(10, 11, 0, at) for at in range(4)]
    # a session fills up what may be open, and draws no more
    assert loop.run_session(15)[metrics.QUERIES_OPEN] == 20 and len(person.queries) == 24
    person.work(100)
    loop.run_session(16)
    assert [record.index for record in loop.drain_records()] == [*range(4, 20), *range(4)]


def test_the_end_does_not_wait_and_reports_open_questions(caplog):
    person = Patient()
    loop = person_loop(person)
    loop.run_session(10)
    person.work(5)
    loop.finish(12)
    assert [record.used_step for record in loop.drain_records()] == [12] * 5
    assert "15 questions to a person were left unanswered" in caplog.text


@pytest.mark.parametrize("mixed", [None, MixedConfig(share=0.4)])
def test_a_loop_with_open_questions_goes_on_exactly(mixed):
    person = Patient()
    loop, other = person_loop(person, mixed=mixed), person_loop(person, seed=9, mixed=mixed)
    step_through(loop, range(10, 13), lambda step: person.work(3 if step > 10 else 0))
    person.work(1)  # has come, and is not used yet
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(through_files(loop.get_state(), arrays))
    other.set_state(from_files(json.loads(text), arrays))
    assert same_trees(loop.get_state(), other.get_state())
    before = len(person.queries)
    found = []
    for each in (loop, other):
        each.add(tiny_episode(50))
        assert each.is_due(15)
        records = step_through(each, range(15, 20), lambda step: person.work(8 if step == 17 else 0))
        found.append([(r.env_step, r.used_step, r.index, r.verdict.label) for r in records])
    # the second one finds the answers of the first at once: what differs is when, not what
    assert before < len(person.queries) and found[0] and {row[2:] for row in found[0]} <= {row[2:] for row in found[1]}


class Replayed(Patient):
    """Gives the answers of a run's query log at the steps at which they took effect there."""

    def __init__(self, rows: Sequence[dict[str, str]]) -> None:
        super().__init__()
        self.now = self._num_sessions = 0
        self._rows = {(int(row["session"]), int(row["index"])): row for row in rows}

    def follow(self, questions: Sequence[Pair]) -> Callable[[], list[Any]]:
        session, self._num_sessions = self._num_sessions, self._num_sessions + 1
        rows = [self._rows.get((session, index)) for index in range(len(questions))]

        def label_of(row: dict[str, str]) -> Label:
            return {"0": Label.LEFT, "1": Label.RIGHT}.get(row["vlm_predicted_label"], Label.TIE)

        return lambda: [verdict(label_of(row)) if row and int(row["used_step"]) <= self.now else None for row in rows]


def test_a_run_is_replayed_from_its_log_to_the_same_weights(tmp_path):
    person = Patient()
    loop = person_loop(person)
    records = step_through(loop, range(10, 40), lambda step: person.work(3 if step % 4 == 0 else 0))
    log = CsvTable(tmp_path / "log.csv", QUERY_COLUMNS, "used_step", "env_step")
    log.append(map(query_row, records))
    assert len({record.used_step for record in records}) == loop.source.version > 5 and loop.num_sessions > 3
    replayed = Replayed(log.read())
    again = person_loop(replayed)
    step_through(again, range(10, 40), lambda step: setattr(replayed, "now", step))
    assert same_trees(loop.get_state()["model"], again.get_state()["model"])


def test_the_most_doubtful_questions_go_to_a_person():
    tie, left = verdict(Label.TIE), verdict(Label.LEFT)
    split = replace(tie, votes=("left", "right"))
    unread, agreed = verdict(None), replace(tie, votes=("tie", "tie"))
    verdicts = [left, agreed, split, unread, left]
    apart = np.array([0.3, 0.0, 0.1, 0.2, 0.4])
    assert [most_doubtful(verdicts, apart, num).tolist() for num in (1, 3, 9)] == [[3], [3, 2, 4], [3, 2, 4, 0, 1]]
    assert most_doubtful([left] * 4, np.zeros(4), 2).tolist() == [0, 1]


def test_both_orders_say_that_they_disagree_and_a_store_remembers_it(tmp_path):
    class Biased(FakeJudge):
        """Names the left side, whatever is shown."""

        def _compare(self, query: Query) -> Verdict:
            return verdict(Label.LEFT)

    (pair,) = draw_pairs(tiny_episodes(2), 1, 1, np.random.default_rng(0))
    left, right = (FrameStore(TinyEnv(), 96).frames(side.snapshots) for side in (pair.left, pair.right))
    for _ in range(2):  # the second time from the store: a resumed run chooses the same queries for the person
        judge = CachedJudge(BothOrders(Biased()), LabelStore(tmp_path / "labels"))
        (said,) = judge.compare([Query(goal="", left=left, right=right)])
        assert said.votes == ("left", "right") and said.is_split and said.status is Status.NO_PREFERENCE
    assert judge.hits == 1
    assert not verdict(Label.TIE).is_split


def test_mixed_asks_both_within_its_budget_and_keeps_the_judges_answer(tmp_path):
    config = MixedConfig(share=0.25, max_answers=12, simulated=SimulatedTeacherConfig(seconds=6.0))
    wrong = SimulatedTeacher(SimulatedTeacherConfig(mistake=1.0), 0)
    teacher = MixedTeacher(wrong, SimulatedTeacher(config.simulated, 1, "simulated person"), config)
    loop = build(teacher, replace(FEEDBACK, queries=20, ties="equal"))
    for episode in tiny_episodes(6):
        loop.add(episode)
    found = [loop.run_session(step) for step in (10, 15, 20, 25)]
    # five of each session, until the twelve are spent; all answers train but the judge's to what the person was asked
    assert [each[metrics.PERSON_ANSWERS] for each in found] == [5, 10, 12, 12]
    assert (
        [each[metrics.COMPARISONS] for each in found] == [20, 40, 60, 80] == [each[metrics.QUERIES] for each in found]
    )
    assert found[-1][metrics.PERSON_MINUTES] == pytest.approx(1.2) and found[-1][metrics.QUERIES_OPEN] == 0
    records: list[Any] = loop.drain_records()
    aside = [record for record in records if record.used_step is None]
    by_person = {(r.session, r.index): r for r in records if r.verdict.stamp.judge == "simulated person"}
    assert [(r.session, r.index) for r in aside] == list(by_person) and len(aside) == 12
    assert all(r.verdict.stamp.judge == "simulated" and r.correct is not True for r in aside)
    assert all(r.correct is not False for r in by_person.values())
    log = CsvTable(tmp_path / "log.csv", QUERY_COLUMNS, "used_step", "env_step")
    log.append(map(query_row, records))
    assert summarise_queries(final_answers(log.read()))["queries"] == 80, "each query counts once"
    # minutes end it as well: 5 answers of 6 s are half a minute
    spent = build(
        MixedTeacher(OracleTeacher(), SimulatedTeacher(config.simulated, 1), replace(config, max_minutes=0.5)),
        replace(FEEDBACK, queries=20),
    )
    for episode in tiny_episodes(6):
        spent.add(episode)
    assert [spent.run_session(step)[metrics.PERSON_ANSWERS] for step in (10, 15)] == [5, 5]


def test_a_person_who_is_away_does_not_stop_the_judge():
    loop = person_loop(Patient(), mixed=MixedConfig(share=0.25))
    found = [loop.run_session(step) for step in (10, 15, 20)]
    assert [each[metrics.QUERIES_OPEN] for each in found] == [5, 5, 5]
    assert [each[metrics.COMPARISONS] for each in found] == [15, 30, 45] and loop.source.version == 3


def test_a_person_at_the_page_answers_through_the_label_store(tmp_path):
    people = pytest.importorskip("rlvlm.plugins.people.queue")

    def asking(seed: int) -> FeedbackLoop:
        judge = open_person(JudgeConfig(), tmp_path / "labels")
        return person_loop(PersonTeacher(judge, FrameStore(TinyEnv(), 96), TinyEnv.goal), seed)

    loop = asking(0)
    loop.run_session(10)
    page = people.PeopleQueue(LabelStore(tmp_path / "labels"))
    page.refresh()

    def say(question: str, choice: Any, name: str) -> None:
        said = {"question": question, "ticket": people.new_ticket(), "name": name, "client": name}
        page.add(people.Said(**said, choice=choice, seconds=3.0, when=0.0))

    asked = list(page.asked)
    assert page.waiting() == len(asked) > 5 and not loop.is_due(11)
    for question, choice in zip(asked, ("left", "right", "equal", "skip", "left"), strict=False):
        say(question, choice, "anna")
    assert not loop.is_due(11), "an answer can be taken back for a while"
    page.keep()
    assert loop.is_due(12)
    found = loop.run_session(12)  # several pairs show the same images, and are one question
    assert found[metrics.QUERIES] >= 5 and found[metrics.QUERIES_INVALID] and found[metrics.QUERIES_NO_PREFERENCE]
    assert {record.verdict.stamp.judge for record in loop.drain_records()} == {"human"}
    # another process takes the open questions up and finds what was said meanwhile
    for question in asked[5:]:
        say(question, "left", "ben")
    page.keep()
    other = asking(3)
    other.set_state(loop.get_state())
    assert other.run_session(13)[metrics.QUERIES_OPEN] == 0 and page.waiting() == 0


@pytest.mark.parametrize(
    ("reward", "feedback", "refusal"),
    [
        ({"teacher": "human"}, {"ahead": True}, "nobody waits for a person"),
        ({"teacher": "mixed"}, {"ahead": True}, "nobody waits for a person"),
        ({"teacher": "mixed", "mixed_judge": "human"}, {}, "reward.mixed_judge is 'human'"),
        ({"teacher": "human", "source": "score"}, {}, "compares and gives no scores"),
        ({"teacher": "mixed", "mixed_judge": "measured"}, {}, "feedback.measured FILE go together"),
    ],
)
def test_settings_that_contradict_a_person_are_refused(reward, feedback, refusal):
    with pytest.raises(ValueError, match=refusal):
        check_learning(StepRewardConfig(**reward), replace(FEEDBACK, **feedback), SMALL)


@pytest.mark.parametrize(("judge", "asks"), [("judge", True), ("simulated", False)])
def test_only_a_mixed_teacher_with_a_vlm_asks_a_judge(judge, asks):
    reward = StepRewardConfig(teacher="mixed", mixed_judge=judge)
    assert reward.asks_judge is asks and reward.may_ask_person
    feedback = replace(FEEDBACK, mixed=MixedConfig(person="simulated"))
    options = {"judge": FakeJudge(), "frames": FrameStore(TinyEnv(), 96), "goal": "push", "task": ""}
    teacher = make_teacher(reward, feedback, None, seed=0, **options)
    questions = draw_pairs(tiny_episodes(2), 8, 1, np.random.default_rng(0))
    assert sum(isinstance(answer, Deferred) for answer in teacher.answer(questions)) == 2
    assert truth(questions)[0].status is not Status.FAILED
