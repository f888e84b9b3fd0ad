import numpy as np
import torch

from rlvlm.algorithms.evaluation import evaluate
from rlvlm.algorithms.sac_pebble.player import StepsPlayer
from rlvlm.envs.config import StepEnvConfig
from rlvlm.policies.squashed_gaussian import SquashedGaussian
from rlvlm.rewards.source import SuccessReward
from rlvlm.testing import TinyEnv


def steady_policy(action):
    """A policy whose mode is `action` everywhere."""
    policy = SquashedGaussian(4, 2, (8,), torch.Generator().manual_seed(0))
    with torch.no_grad():
        policy.layers[-1].weight.zero_()
        policy.layers[-1].bias[:2] = torch.atanh(torch.tensor(action))
    return policy


def test_going_right_succeeds_and_standing_still_does_not():
    env = TinyEnv(StepEnvConfig(episode_steps=20))
    (right,) = evaluate(StepsPlayer(steady_policy([0.999999, 0.0]), env), 1)
    assert right.is_success and len(right.success) == 20
    # The point goes from 0.2 to 0.7, where the block has come to 0.8, at just under 0.1 a step: the sixth step does it.
    assert np.flatnonzero(right.success)[0] == 5
    assert right.env_return == np.float64(right.env_rewards).sum()
    (still,) = evaluate(StepsPlayer(steady_policy([0.0, 0.0]), env), 1)
    assert not still.is_success and still.env_return == 0


def test_the_source_labels_every_step_and_none_means_nan():
    env, policy = TinyEnv(StepEnvConfig(episode_steps=20)), steady_policy([0.999999, 0.0])
    (episode,) = evaluate(StepsPlayer(policy, env, SuccessReward()), 1)
    np.testing.assert_array_equal(episode.learned_rewards, episode.success)
    assert episode.learned_return == 15
    (unasked,) = evaluate(StepsPlayer(policy, env), 1)
    assert np.isnan(unasked.learned_rewards).all() and np.isnan(unasked.learned_return)
