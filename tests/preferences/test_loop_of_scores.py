import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tiny_episodes import score, tiny_episode, tiny_episodes
from tiny_loops import FEEDBACK, filled

from rlvlm.core import metrics
from rlvlm.core.judging import Score, Status
from rlvlm.core.steps import Segment
from rlvlm.preferences.loop import FeedbackLoop
from rlvlm.preferences.teachers import OracleTeacher, Teacher
from rlvlm.rewards.scoring_items import ScoringItem


class Scripted(OracleTeacher):
    """Knows the truth, but answers the first questions as it is told; remembers what it was asked."""

    def __init__(self, *answers: Score) -> None:
        self._answers = list(answers)
        self.asked: list[Segment] = []

    def answer(self, segments: Sequence[Segment]) -> list[Score]:
        self.asked += segments
        return [
            self._answers.pop(0) if self._answers else super(Scripted, self).answer([segment])[0]
            for segment in segments
        ]


def loop_of(scorer: Teacher, seed: int = 0, num_episodes: int = 12, **feedback: Any) -> FeedbackLoop:
    return filled(scorer, num_episodes, feedback=dataclasses.replace(FEEDBACK, **feedback), seed=seed, source="score")


def block(segment: Segment | ScoringItem) -> int:
    """What the image shows of a segment of TinyEnv."""
    return round(float(segment.snapshots[-1, 2]) / 1e-3)


def test_a_session_scores_frames_records_the_truth_and_fits():
    loop = loop_of(OracleTeacher())
    found = loop.run_session(10)
    assert found[metrics.QUERIES] == 8 == found[metrics.QUERIES_OK] == found[metrics.SCORES]
    assert metrics.LABEL_ACCURACY not in found and metrics.REWARD_TRAIN_ERROR in found and loop.source.version == 1
    records = loop.drain_records()
    assert [(record.env_step, record.group, record.index) for record in records] == [(10, 0, at) for at in range(8)]
    shown = {
        (row.tobytes(), float(reward))
        for episode in tiny_episodes(12)
        for row, reward in zip(episode.snapshots, episode.env_rewards, strict=False)
    }
    for record in records:
        assert len(record.item.snapshots) == 1 and record.score.value == record.truth == record.item.progress
        assert (record.item.snapshots[0].tobytes(), record.env_return) in shown


@pytest.mark.slow
def test_no_image_is_scored_twice_and_a_rare_one_is_as_likely_as_a_common_one():
    scorer = Scripted()
    loop = loop_of(scorer, queries=30)
    found = [loop.run_session(step) for step in (10, 15, 20)][-1]
    blocks = [block(segment) for segment in scorer.asked]
    assert len(set(blocks)) == len(blocks) == found[metrics.QUERIES] > 8 and found[metrics.QUERIES_LOOK_ALIKE] == 0
    still = dataclasses.replace(tiny_episode(0), snapshots=np.full((20, 3), 0.4, np.float32))
    drawn = []
    for seed in range(40):
        loop = loop_of(Scripted(), seed, num_episodes=0, queries=1)
        for episode in [still] * 50 + [tiny_episode(0)]:
            loop.add(episode)
        loop.run_session(10)
        drawn += [block(record.item) for record in loop.drain_records()]
    assert drawn.count(400) < 15, "one image of ten, although it fills fifty episodes"


def test_once_everything_is_scored_nothing_is_asked_and_nothing_fitted():
    scorer = Scripted()
    loop = loop_of(scorer, num_episodes=1, queries=100)
    loop.run_session(10)
    assert len(scorer.asked) == len({block(segment) for segment in scorer.asked}) == 10
    before = len(scorer.asked)
    assert metrics.REWARD_LOSS not in loop.run_session(15) and len(scorer.asked) == before and loop.source.version == 1
    loop.add(tiny_episode(16))
    assert loop.run_session(20)[metrics.QUERIES] > before


def test_only_scores_train_and_only_unanswered_questions_are_asked_again():
    scorer = Scripted(score(None), score(None, Status.FAILED))
    loop = loop_of(scorer, num_episodes=1, queries=100)
    found = loop.run_session(10)
    num = len(scorer.asked)
    assert (found[metrics.QUERIES_INVALID], found[metrics.QUERIES_FAILED], found[metrics.SCORES]) == (1, 1, num - 2)
    found = loop.run_session(15)
    assert found[metrics.SCORES] == num - 1 and [block(one) for one in scorer.asked[num:]] == [block(scorer.asked[1])]
