import numpy as np
import pytest

from rlvlm.core.episodes import Observations, Reply, TokenEpisode
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.rewards.temporal import TemporalNovelty


def draw(snapshots: FloatArray) -> Frames:
    """Black or white, as the snapshot's first number says."""
    return np.broadcast_to(255 * snapshots[:, :1, None, None], (len(snapshots), 12, 12, 3)).astype(np.uint8)


def episode(white: bool, *actions: int | None) -> TokenEpisode:
    count, none = len(actions), np.zeros(0, np.float32)
    snapshots = np.full((count + 1, 1), float(white), np.float32)
    seen = Observations(
        images=(b"",) * (count + 1), texts=("",) * (count + 1), proprio=snapshots[:, :0], snapshots=snapshots
    )
    return TokenEpisode(
        task="", seed=0, snapshots=snapshots, obs=seen, played_at=np.arange(count), steps=np.ones(count, np.int64),
        answers=(), log_probs=(), masks=(), values=none, versions=np.zeros(0, np.int64), gains=none,
        goals=("",) * count, is_over=True,
        replies=tuple(Reply(text="", thought="", action=action, action_span=None) for action in actions),
        env_rewards=np.zeros(count, np.float32), success=np.zeros(count, bool), progress=np.zeros(count, np.float32),
        terminated=True,
    )  # fmt: skip


@pytest.mark.slow
def test_habits_are_not_new_and_dependence_on_the_image_is_learned():
    novelty = TemporalNovelty(3, draw, seed=0)
    usual = [episode(False, 0, 1, 0), episode(True, 1, 2, 1)]
    for _ in range(12):
        novelty.learn(usual * 4)
    found = novelty.label([*usual, episode(True, 0, 1, 0), episode(False, 0, 1, 2)])
    assert max(found[0].max(), found[1].max()) < 0.2
    assert found[2][0] > 0.5, "right with the black image, but this one is white"
    assert found[3][:2].max() < 0.2 and found[3][2] > 0.5, "only the last action is new"


def test_an_unreadable_reply_is_not_new():
    novelty = TemporalNovelty(3, draw, seed=0)
    novelty.learn([episode(False, 0, 0)] * 8)
    (found,) = novelty.label([episode(False, 0, None, 2)])
    assert found[1] == 0 and found.max() == pytest.approx(1)
    assert novelty.label([]) == []
