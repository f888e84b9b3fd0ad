import numpy as np
import pytest

from rlvlm.algorithms.sac_pebble.player import EpisodeBuffer, StepsPlayer
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.registry import make_env
from rlvlm.policies.squashed_gaussian import SquashedGaussian
from rlvlm.rewards.source import EnvironmentReward, SuccessReward


def step(number, num_envs=2):
    """A step of which every number says when it was and, in tenths, in which env."""
    value = (number + np.arange(num_envs) / 10).astype(np.float32)
    wide = np.stack([value, value], 1)
    flat = np.zeros(num_envs, np.float32)
    return {
        **{"obs": wide, "actions": wide, "next_obs": wide + 1, "snapshots": wide},
        **{"terminated": flat, "success": flat, "env_rewards": value, "progress": value},
    }


def ended(*flags):
    return np.array(flags, bool)


def test_two_envs_whose_episodes_end_at_different_steps():
    buffer = EpisodeBuffer(2)
    assert buffer.record(step(0), ended(False, False)) == []
    (first,) = buffer.record(step(1), ended(True, False))
    assert first.env_rewards.tolist() == [0, 1]
    second = buffer.record(step(2), ended(True, True))
    np.testing.assert_allclose(second[0].env_rewards, [2])
    np.testing.assert_allclose(second[1].env_rewards, [0.1, 1.1, 2.1])
    assert buffer.get_state()["columns"] == {}


def test_the_tape_forgets_steps_that_no_running_episode_needs():
    buffer = EpisodeBuffer(2)
    for number in range(5000):
        buffer.record(step(number), ended(number % 7 == 0, number % 5 == 0))
    assert len(buffer.get_state()["columns"]["progress"]) <= 1100


@pytest.mark.parametrize(
    ("source", "name"), [(EnvironmentReward(), "true reward"), (SuccessReward(), "learned reward")]
)
def test_the_true_reward_is_called_so(source, name):
    env = make_env("rlvlm.testing:TINY", StepEnvConfig(episode_steps=3), 0)
    obs, _ = env.reset(seed=0)
    policy = SquashedGaussian(len(obs), env.action_space.shape[0], (4,))
    (played,) = StepsPlayer(policy, env, source).play([0])
    assert played.reward_name == name
