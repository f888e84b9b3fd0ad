"""Which groups are worth learning from, and which of their chunks."""

from dataclasses import replace

import numpy as np
import pytest

from rlvlm.algorithms.policy_gradient.config import AdvantageConfig, chunk_defaults
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller, drop_unlabelled
from rlvlm.algorithms.policy_gradient.source import EpisodeSource, informative_groups, is_informative
from rlvlm.algorithms.training_stats import TrainingStats
from rlvlm.rewards.config import ChunkRewardConfig
from tests.algorithms.policy_gradient.by_hand import episode, scored

CONFIG = AdvantageConfig(estimator="grpo")


def test_groups_are_found_by_their_number_and_kept_where_scores_differ():
    # In the order they came: groups 5, 4, 5, 4; group 4 succeeds once, group 5 never.
    episodes = [scored(0, group=5), scored(1, group=4), scored(0, group=5), scored(0, group=4)]
    assert informative_groups(episodes, CONFIG, 0.0) == [episodes[1], episodes[3]]
    assert informative_groups([], CONFIG, 0.0) == []


def test_only_the_group_of_an_unscored_episode_is_left_out():
    episodes = [scored(np.nan, group=0), scored(1, group=0), scored(0.1, group=1), scored(0.8, group=1)]
    assert drop_unlabelled(episodes) == episodes[2:]
    alone = [scored(np.nan, group=0), scored(1, group=1)]
    assert drop_unlabelled(alone) == alone[1:], "nobody is compared with it"


def test_a_group_of_failures_that_a_noisy_scorer_calls_different_is_dropped():
    close, far = np.array([0.08, 0.10, 0.10, 0.12], np.float32), np.array([0.1, 0.1, 0.1, 0.9], np.float32)
    assert is_informative(close, CONFIG, 0.0) and is_informative(far, CONFIG, 0.0)
    assert not is_informative(close, CONFIG, 0.02) and is_informative(far, CONFIG, 0.02)
    assert not is_informative(np.full(8, 0.3, np.float32), CONFIG, 0.0)
    for noise in (0.02, 0.2):
        noisy = (0.1 + noise * np.random.default_rng(2).normal(size=(2_000, 8))).astype(np.float32)
        assert np.mean([is_informative(row, CONFIG, 0.0) for row in noisy]) > 0.99
        assert np.mean([is_informative(row, CONFIG, noise) for row in noisy]) < 0.01


def test_an_episodes_columns_by_hand():
    one = episode((8, 3), env_rewards=np.arange(11, dtype=np.float32))
    assert one.obs.snapshots[:, 0].tolist() == [0, 8, 11] and one.ends.tolist() == [8, 11]
    assert one.turn_rewards.tolist() == [28, 27] and one.num_steps == 11 and one.first_step == 0 and len(one) == 2
    with pytest.raises(ValueError, match="one entry per observation"):
        replace(one.obs, images=one.obs.images[:1])


@pytest.mark.parametrize(("num_successes", "warns"), [(0, True), (1, False)])
def test_episodes_that_are_all_paid_the_same_are_reported(num_successes, warns, caplog):
    rollout = [episode(group=number // 4, success=number < num_successes) for number in range(40)]
    source = EpisodeSource(
        chunk_defaults(), lambda weights: (rollout, []), lambda: None,
        RewardLabeller(ChunkRewardConfig(), None), True, TrainingStats(), False,
    )  # fmt: skip
    source.next()
    assert ("every step of the first 40 episodes has the same reward, 0" in caplog.text) == warns
