import numpy as np
import pytest
from tiny_episodes import one_step, tiny_episodes

from rlvlm.core.judging import Status
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.answers.teachers import JudgeTeacher, OracleTeacher, RandomTeacher
from rlvlm.preferences.questions.queries import cut
from rlvlm.testing import FakeJudge, TinyEnv


def frames() -> FrameStore:
    return FrameStore(TinyEnv(), 24)


def test_the_oracle_gives_the_true_progress_at_the_end() -> None:
    (episode,) = tiny_episodes(1)
    scores = OracleTeacher().answer([one_step(0.25), cut(episode, 3, 5)])
    assert [score.value for score in scores] == [0.25, pytest.approx(float(episode.progress[7]))]
    assert all(score.status is Status.OK for score in scores)


def test_a_judge_sees_every_segment_drawn_in_order() -> None:
    seen = []

    class Watching(FakeJudge):
        def score(self, clips):
            seen.extend(clips)
            return super().score(clips)

    segments = [cut(episode, 2, 3) for episode in tiny_episodes(4)]
    scores = JudgeTeacher(Watching(), frames(), "push the block").answer(segments)
    for clip, segment, score in zip(seen, segments, scores, strict=True):
        expected = TinyEnv().draw(segment.snapshots, 24)
        np.testing.assert_array_equal(clip.frames, expected)
        assert clip.goal == "push the block" and score.value == pytest.approx(expected[-1].mean() / 255)


def test_a_die_is_fair_and_a_restored_one_goes_on() -> None:
    die, other = RandomTeacher(0), RandomTeacher(9)
    values = [score.value for score in die.answer([one_step(0.5)] * 4_000)]
    assert np.histogram(values, bins=4, range=(0, 1))[0] == pytest.approx([1_000] * 4, abs=120)
    other.set_state(die.get_state())
    assert die.answer([one_step(0.5)] * 5) == other.answer([one_step(0.5)] * 5)
