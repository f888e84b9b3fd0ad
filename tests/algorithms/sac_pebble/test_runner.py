from dataclasses import fields, replace

import numpy as np
import torch

from rlvlm.algorithms.sac_pebble.algorithm import SACPebbleConfig
from rlvlm.algorithms.sac_pebble.dense import flatten
from rlvlm.algorithms.sac_pebble.runner import Sample, StepEnvRunner, join
from rlvlm.core.steps import Transitions
from rlvlm.envs.config import StepEnvConfig
from rlvlm.policies.squashed_gaussian import SquashedGaussian
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.testing import TinyEnv

WORLD = StepEnvConfig(episode_steps=6, num_envs=2)


def make_runner(seed=0, worker_index=0, start="fixed"):
    env = replace(WORLD, start=start)
    config = (
        SACPebbleConfig()
        .settings(task="rlvlm.testing:TINY", env_settings=env)
        .debugging(seed=seed)
        .settings(reward=StepRewardConfig(source="environment"))
    )
    runner = StepEnvRunner(config=config, worker_index=worker_index)
    runner.policy = SquashedGaussian(4, 2, (8,), torch.Generator().manual_seed(0))
    return runner


def test_every_transition_is_the_envs_even_at_the_end_of_an_episode():
    sample = make_runner().sample(num_steps=13, random_actions=True)
    flat, env = sample.transitions, TinyEnv(WORLD)
    for which in range(2):  # rows alternate between the two envs
        obs, _ = env.reset()
        for row in range(which, 26, 2):
            np.testing.assert_array_equal(flat.obs[row], obs)
            obs, reward, _, truncated, info = env.step(flat.actions[row])
            np.testing.assert_array_equal(flat.next_obs[row], obs)
            np.testing.assert_array_equal(flat.snapshots[row], info["snapshot"])
            assert flat.env_rewards[row] == np.float32(reward) and flat.success[row] == info["success"]
            if truncated:
                obs, _ = env.reset()
    assert [len(episode) for episode in sample.episodes] == [6, 6, 6, 6]
    assert not flat.terminated.any() and not sample.episodes[0].terminated


def test_random_actions_fill_the_box_and_the_policys_follow_the_policy():
    runner = make_runner()
    actions = runner.sample(num_steps=1000, random_actions=True).transitions.actions
    assert abs(actions.mean()) < 0.1 and abs(actions.std() - 3**-0.5) < 0.05 and np.abs(actions).max() <= 1
    held = (actions[2:] == actions[:-2]).all(axis=1)  # by the same env, one step later
    assert abs(held.mean() - 0.5) < 0.05
    with torch.no_grad():
        runner.policy.layers[-1].weight.zero_()
        runner.policy.layers[-1].bias[:] = torch.tensor([1.0, -1.0, -9.0, -9.0])
    actions = runner.sample(num_steps=50).transitions.actions
    np.testing.assert_allclose(actions.mean(axis=0), np.tanh([1.0, -1.0]), atol=0.01)


def test_samples_join_in_the_order_they_are_given():
    left, right = (make_runner(seed).sample(num_steps=6) for seed in (1, 2))
    both = join([left, right])
    for field in fields(Transitions):
        ours, theirs = (getattr(sample.transitions, field.name) for sample in (left, right))
        np.testing.assert_array_equal(getattr(both.transitions, field.name), [*ours, *theirs])
    assert both.episodes == [*left.episodes, *right.episodes]
    assert isinstance(both, Sample) and join([left]) is left


def test_every_runner_and_every_restart_has_its_own_luck_and_the_first_actor_that_of_a_local_one():
    runners = {index: make_runner(seed=5, worker_index=index, start="random") for index in (0, 1, 2)}
    drawn = {index: runner.sample(num_steps=6, random_actions=True).transitions for index, runner in runners.items()}
    runners[1].begin(restart=1)
    runners[2].begin(restart=2)
    drawn |= {index + 10: runners[index].sample(num_steps=6, random_actions=True).transitions for index in (1, 2)}
    np.testing.assert_array_equal(drawn[0].actions, drawn[1].actions)
    np.testing.assert_array_equal(drawn[0].obs, drawn[1].obs)
    for column in ("obs", "actions"):
        different = [getattr(drawn[which], column)[-2:, :2] for which in (1, 2, 11, 12)]
        assert len(np.unique(np.concatenate(different), axis=0)) == 8


def test_an_actor_acts_with_the_weights_it_is_sent():
    here = make_runner()
    there = StepEnvRunner(config=here.config, worker_index=1)
    here.policy = SquashedGaussian(4, 2, (256, 256), torch.Generator().manual_seed(1))
    values = flatten(here.policy.parameters()).numpy()
    values.flags.writeable = False  # as it comes from Ray
    ours, theirs = here.sample(num_steps=4), there.act(values=values, num_steps=4, random_actions=False)
    np.testing.assert_array_equal(ours.transitions.actions, theirs.transitions.actions)
