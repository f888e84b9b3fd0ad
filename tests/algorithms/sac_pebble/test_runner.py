import numpy as np
import torch

from rlvlm.algorithms.sac_pebble.algorithm import SACPebbleConfig
from rlvlm.algorithms.sac_pebble.runner import WorldRunner
from rlvlm.envs.config import EnvConfig
from rlvlm.policies.squashed_gaussian import SquashedGaussian
from rlvlm.rewards.config import RewardConfig
from rlvlm.testing import TinyWorld

WORLD = EnvConfig(episode_steps=6, num_envs=2)


def make_runner(seed=0):
    config = (SACPebbleConfig().worlds(task="rlvlm.testing:TINY", world=WORLD).debugging(seed=seed)
              .rewards(reward=RewardConfig(source="environment")))
    runner = WorldRunner(config=config)
    runner.policy = SquashedGaussian(4, 2, (8,), torch.Generator().manual_seed(0))
    return runner


def test_every_transition_is_what_the_world_does_even_at_the_end_of_an_episode():
    sample = make_runner().sample(num_steps=13, random_actions=True)
    flat, world = sample.transitions, TinyWorld(WORLD)
    for which in range(2):  # rows alternate between the two worlds
        obs, _ = world.reset()
        for row in range(which, 26, 2):
            np.testing.assert_array_equal(flat.obs[row], obs)
            obs, reward, _, truncated, info = world.step(flat.actions[row])
            np.testing.assert_array_equal(flat.next_obs[row], obs)
            np.testing.assert_array_equal(flat.snapshots[row], info["snapshot"])
            assert flat.env_rewards[row] == np.float32(reward) and flat.success[row] == info["success"]
            if truncated:
                obs, _ = world.reset()
    assert [len(episode) for episode in sample.episodes] == [6, 6, 6, 6]
    assert not flat.terminated.any() and not sample.episodes[0].terminated


def test_an_episode_is_the_rows_of_its_world():
    sample = make_runner().sample(num_steps=6)
    first, second = sample.episodes
    np.testing.assert_array_equal(first.obs, sample.transitions.obs[0::2])
    np.testing.assert_array_equal(second.next_obs, sample.transitions.next_obs[1::2])
    np.testing.assert_array_equal(second.snapshots, sample.transitions.snapshots[1::2])
    assert not np.array_equal(first.actions, second.actions)


def test_the_seed_decides_the_actions():
    same, again, other = (make_runner(seed).sample(num_steps=4).transitions.actions for seed in (1, 1, 2))
    np.testing.assert_array_equal(same, again)
    assert not np.array_equal(same, other)


def test_random_actions_fill_the_box_and_the_policys_follow_the_policy():
    runner = make_runner()
    actions = runner.sample(num_steps=1000, random_actions=True).transitions.actions
    assert abs(actions.mean()) < 0.1 and abs(actions.std() - 3**-0.5) < 0.05 and np.abs(actions).max() <= 1
    held = (actions[2:] == actions[:-2]).all(axis=1)  # by the same world, one step later
    assert abs(held.mean() - 0.5) < 0.05
    with torch.no_grad():
        runner.policy.layers[-1].weight.zero_()
        runner.policy.layers[-1].bias[:] = torch.tensor([1.0, -1.0, -9.0, -9.0])
    actions = runner.sample(num_steps=50).transitions.actions
    np.testing.assert_allclose(actions.mean(axis=0), np.tanh([1.0, -1.0]), atol=0.01)
