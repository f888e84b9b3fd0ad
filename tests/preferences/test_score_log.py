import numpy as np
from stub_judge import StubJudge
from tiny_episodes import tiny_episodes

from rlvlm.core.judging import Clip
from rlvlm.core.steps import Trajectory, Transitions
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.score_log import ScoreLog
from rlvlm.rewards.judged import JudgedReward
from rlvlm.testing import TinyEnv


def transitions(episode: Trajectory) -> Transitions:
    flat = np.zeros(len(episode), np.float32)
    return Transitions(
        obs=episode.obs,
        actions=episode.actions,
        next_obs=episode.next_obs,
        terminated=flat,
        env_rewards=episode.env_rewards,
        success=flat,
        snapshots=episode.snapshots,
    )


def test_every_image_is_recorded_once_with_its_truth_when_an_episode_has_shown_it() -> None:
    frames = FrameStore(TinyEnv(), 16)
    source = JudgedReward(StubJudge(), frames, "push")
    log, (one, other) = ScoreLog(source, frames), tiny_episodes(2)
    source.label(transitions(one))
    source.label(transitions(other))
    assert log.drain(20) == [], "no episode has ended"
    log.add(one)
    records = log.drain(40)
    shown = [round(float(record.segment.snapshots[0, 2]), 3) for record in records]
    assert sorted(shown) == sorted({round(float(block), 3) for block in one.snapshots[:, 2]})
    for record in records:
        image = TinyEnv().draw(record.segment.snapshots, 16)
        assert [record.score] == StubJudge().score([Clip(goal="push", frames=image)])
        assert record.progress == float(record.segment.progress[0]) and record.env_step == 40
    assert [record.index for record in records] == list(range(len(records)))
    log.add(one)
    assert log.drain(60) == [], "known already"
    log.add(other)
    later = {round(float(record.segment.snapshots[0, 2]), 3) for record in log.drain(80)}
    assert later == {round(float(block), 3) for block in other.snapshots[:, 2]} - set(shown)
