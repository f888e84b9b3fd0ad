from dataclasses import replace

import numpy as np
import pytest
from stub_judge import StubJudge
from tiny_episodes import numbered_trajectory, one_step, pair_of, tiny_episodes, transitions_of, verdict

from rlvlm.core import metrics
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Clip, Label, Score, Status, Verdict
from rlvlm.core.steps import Pair
from rlvlm.envs.images import FrameStore
from rlvlm.judge_bench.figures import pair_figures
from rlvlm.preferences.records import FeedbackCounts, QueryRecord, ScoreLog, record_answers
from rlvlm.rewards.judged import JudgedReward
from rlvlm.runs.files.answers import logged_pairs, truth_name
from rlvlm.runs.files.folder import QUERY_COLUMNS
from rlvlm.runs.files.records import query_row, score_row
from rlvlm.runs.files.summary import summarise_queries
from rlvlm.runs.files.tables import CsvTable
from rlvlm.testing import TinyEnv

ONE = np.ones(1, np.float32)


def records_of(verdicts: list[Verdict]) -> list[QueryRecord]:
    pairs = [pair_of(0.0, 1.0)] * len(verdicts)
    return record_answers(pairs, verdicts, env_step=7, session=2, timestamp=1.5)


def test_correctness_by_hand():
    labels = (Label.RIGHT, Label.LEFT, Label.TIE, None)
    assert [record.correct for record in records_of([verdict(label) for label in labels])] == [True, False, None, None]
    equal = Pair(left=one_step(0.5, block=0.6), right=one_step(0.5, block=0.6))
    (tie,) = record_answers([equal], [verdict(Label.RIGHT)], env_step=0, session=0, timestamp=0)
    assert tie.correct is None, "the truth is a tie"


def test_a_record_holds_the_truth_beside_the_answer():
    left, right = (numbered_trajectory(4, first).segment(1, 2) for first in (0.0, 10.0))
    answer = verdict(Label.RIGHT, text="1")
    (record,) = record_answers([Pair(left=left, right=right)], [answer], env_step=7, session=2, timestamp=1.5)
    assert (record.progress, record.returns) == ((1.5, 11.5), (3.0, 23.0))
    assert (record.env_step, record.session, record.index, record.timestamp) == (7, 2, 0, 1.5)
    assert record.verdict is answer and record.correct is True


def test_without_progress_true_returns_say_which_label_is_right(tmp_path):
    # progress says right, the true returns 1 and 0 say left
    pair = Pair(left=replace(one_step(0.1), env_rewards=ONE), right=replace(one_step(0.9), env_rewards=0 * ONE))
    answers = [verdict(Label.LEFT), verdict(Label.RIGHT)]
    about = {"env_step": 0, "session": 0, "timestamp": 0, "has_progress": False}
    records = record_answers([pair] * 2, answers, **about)
    assert [record.correct for record in records] == [True, False]
    log = CsvTable(tmp_path / "log.csv", QUERY_COLUMNS, "used_step", "env_step")
    log.append(map(query_row, records))
    rows = log.read()
    assert rows[0]["ground_truth_score_1"] == "" and truth_name(rows) == "true return"
    assert pair_figures(*logged_pairs(rows, "t"))["accuracy"]["value"] == 0.5
    assert summarise_queries(rows)["label_accuracy"] == 0.5
    scores = [Score(status=Status.OK, value=0.3, stamp=answers[0].stamp)]
    (scored,) = record_answers([pair.left], scores, **about)
    assert score_row(scored, 0)["ground_truth_score"] is None, "a score has no truth, only an order by returns"


def test_each_kind_of_answer_is_counted_apart():
    counts = FeedbackCounts()
    answers = [*map(verdict, (Label.RIGHT, Label.RIGHT, Label.LEFT, Label.TIE, None)), verdict(None, Status.FAILED)]
    counts.count(records_of(answers), num_look_alike=4)
    counts.count(records_of(answers[:1]), num_look_alike=1)
    assert counts.metrics() == {
        metrics.QUERIES: 7,
        metrics.QUERIES_OK: 4,
        metrics.QUERIES_NO_PREFERENCE: 1,
        metrics.QUERIES_INVALID: 1,
        metrics.QUERIES_FAILED: 1,
        metrics.QUERIES_LOOK_ALIKE: 5,
        metrics.LABEL_ACCURACY: 0.75,
        metrics.LABELS_CHECKED: 4,
        metrics.LABELS_LEFT: 1 / 4,
        metrics.LABELS_UNDECIDED: 1 / 7,
    }
    assert counts.num_asked == 7


def test_without_a_decided_label_there_is_no_accuracy():
    counts = FeedbackCounts()
    counts.count(records_of([verdict(Label.TIE)]), num_look_alike=0)
    pairs = [Pair(left=one_step(0.5), right=one_step(0.5, block=0.6))]
    counts.count(record_answers(pairs, [verdict(Label.LEFT)], env_step=0, session=0, timestamp=0), 0)
    assert metrics.LABEL_ACCURACY not in counts.metrics()


def test_an_unreadable_teacher_is_given_up():
    counts = FeedbackCounts()
    counts.count(records_of([verdict(None)] * 49), num_look_alike=0)
    with pytest.raises(JudgeUnavailable, match="50 of the last 50"):
        counts.count(records_of([verdict(None)]), num_look_alike=0)


def test_every_image_is_recorded_once_with_its_truth_when_an_episode_has_shown_it():
    frames = FrameStore(TinyEnv(), 16)
    source = JudgedReward(StubJudge(), frames, "push")
    log, (one, other) = ScoreLog(source, frames), tiny_episodes(2)
    source.label(transitions_of(one))
    source.label(transitions_of(other))
    assert log.drain(20) == [], "no episode has ended"
    log.add(one)
    records = log.drain(40)
    shown = [round(float(record.item.snapshots[0, 2]), 3) for record in records]
    assert sorted(shown) == sorted({round(float(block), 3) for block in one.snapshots[:, 2]})
    for record in records:
        image = TinyEnv().draw(record.item.snapshots, 16)
        assert [record.score] == StubJudge().score([Clip(goal="push", frames=image)])
        assert record.truth == record.item.progress and record.env_step == 40 and record.success_threshold is None
        assert record.truth in [float(progress) for progress in one.progress]
    assert [record.index for record in records] == list(range(len(records)))
    log.add(one)
    assert log.drain(60) == [], "known already"
    log.add(other)
    later = {round(float(record.item.snapshots[0, 2]), 3) for record in log.drain(80)}
    assert later == {round(float(block), 3) for block in other.snapshots[:, 2]} - set(shown)
