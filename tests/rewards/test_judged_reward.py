from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from stub_judge import StubJudge

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Clip, Score, Status
from rlvlm.core.steps import Transitions
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.images import FrameStore
from rlvlm.rewards.judged import JudgedReward
from rlvlm.rewards.source import Labelling
from rlvlm.testing import TinyEnv


class Moody(StubJudge):
    """Answers each question with the next of `statuses`, then by its image; remembers how many were asked at once."""

    def __init__(self, *statuses: Status) -> None:
        super().__init__()
        self.statuses = list(statuses)
        self.calls: list[int] = []

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        self.calls.append(len(clips))
        return [self._moody(score) for score in super().score(clips)]

    def _moody(self, score: Score) -> Score:
        status = self.statuses.pop(0) if self.statuses else Status.OK
        return score if status is Status.OK else Score(status=status, value=None, stamp=self.stamp, text="no")


def steps(*blocks: float) -> Transitions:
    """Steps of TinyEnv that end with the block where it is said; the true rewards are wrong on purpose."""
    num = len(blocks)
    columns: dict[str, Any] = {name: np.zeros((num, 4), np.float32) for name in ("obs", "actions", "next_obs")}
    columns |= {name: np.full(num, 77, np.float32) for name in ("terminated", "env_rewards", "success")}
    return Transitions(**columns, snapshots=np.array([[0.2, 0.5, block] for block in blocks], np.float32))


def build(judge: Moody) -> JudgedReward:
    return JudgedReward(judge, FrameStore(TinyEnv(StepEnvConfig()), 20), "push")


def right(*blocks: float) -> np.ndarray:
    """The rewards that the judge's answers stand for, each asked alone."""
    pictures = TinyEnv().draw(steps(*blocks).snapshots, 20)
    values = [StubJudge().score([Clip(goal="push", frames=image[None])])[0].value for image in pictures]
    return 2 * np.array(values) - 1


def test_each_image_is_judged_once_and_equal_images_share_their_reward():
    judge = Moody()
    source = build(judge)
    assert (source.labelling, source.version) == (Labelling.WHERE_ANSWERED, 0)
    rewards = source.label(steps(0.4, 0.5, 0.4))
    assert rewards.dtype == np.float32 and rewards.shape == (3,)
    np.testing.assert_allclose(rewards, right(0.4, 0.5, 0.4), atol=1e-6)
    np.testing.assert_array_equal(source.label(steps(0.5, 0.85, 0.4))[[0, 2]], rewards[[1, 0]])
    assert judge.calls == [2, 1] and rewards[0] != rewards[1]


def test_an_unreadable_answer_is_final_and_a_missing_one_is_asked_for_when_the_image_is_met_again():
    judge = Moody(Status.OK, Status.INVALID)
    source = build(judge)
    for _ in range(2):
        rewards = source.label(steps(0.4, 0.6))
        assert np.isfinite(rewards[0]) and np.isnan(rewards[1])
    assert judge.calls == [2]
    judge = Moody(Status.OK, Status.FAILED)
    source = build(judge)
    assert np.isnan(source.label(steps(0.4, 0.6))[1])
    np.testing.assert_allclose(source.label(steps(0.6)), right(0.6), atol=1e-6)
    assert judge.calls == [2, 1]


def test_an_outage_ends_the_run_and_earlier_answers_are_kept():
    judge = Moody(Status.OK, Status.FAILED)
    source = build(judge)
    source.label(steps(0.4))
    with pytest.raises(JudgeUnavailable, match="none of 1 queries was answered: no"):
        source.label(steps(0.4, 0.6))
    assert np.isfinite(source.label(steps(0.4, 0.6))).all()


def test_a_judge_that_is_mostly_unreadable_is_given_up():
    source = build(Moody(*[Status.INVALID] * 60))
    with pytest.raises(JudgeUnavailable, match="could not be read"):
        source.label(steps(*np.linspace(0.4, 0.8, 60)))


def test_many_new_images_are_asked_about_in_pieces_and_keep_their_order():
    blocks = np.linspace(0.3, 0.85, 150)
    judge = Moody()
    np.testing.assert_allclose(build(judge).label(steps(*blocks)), right(*blocks), atol=1e-6)
    assert judge.calls == [64, 64, 22]


def test_answers_are_drained_once_by_the_name_of_their_image():
    source = build(Moody(Status.OK, Status.INVALID))
    source.label(steps(0.4, 0.6))
    names = FrameStore(TinyEnv(), 20).keys(steps(0.4, 0.6).snapshots)
    answers = source.drain_answers()
    assert list(answers) == names and [score.status for score, _ in answers.values()] == [Status.OK, Status.INVALID]
    assert source.drain_answers() == {}
