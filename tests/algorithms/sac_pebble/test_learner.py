import dataclasses

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from examples.sac_in_one_file import SAC as OracleSAC
from rlvlm.algorithms import learners
from rlvlm.algorithms.sac_pebble.algorithm import SACPebble, SACPebbleConfig
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sac_pebble.learner import SACLearner
from rlvlm.algorithms.sac_pebble.module import TwinCritic, centre_and_spread
from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.steps import Transitions
from rlvlm.envs.registry import make_env
from rlvlm.policies.squashed_gaussian import SquashedGaussian
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.rewards.source import EnvironmentReward

OBS, ACTIONS = 4, 2


def make_learner(seed=0, **sac):
    config = (
        SACPebbleConfig()
        .settings(task="rlvlm.testing:TINY")
        .debugging(seed=seed)
        .settings(sac=SACConfig(**{"hidden": (32, 32), "batch_size": 64, "replay_capacity": 5_000, **sac}))
        .settings(reward=StepRewardConfig(source="environment"))
    )
    env = make_env(config.task, config.env_settings, seed)
    spaces = {DEFAULT_MODULE_ID: (env.observation_space, env.action_space)}
    learner = SACLearner(config=config, module_spec=config.get_multi_rl_module_spec(spaces=spaces))
    learner.build()
    return learner


def test_a_gpu_is_reserved_where_one_is_wanted(monkeypatch):
    for device, gpus in (("cpu", 0), ("cuda", 1)):
        monkeypatch.setattr(learners, "pick_device", lambda *arguments, device=device: torch.device(device))
        config = SACPebbleConfig().settings(task="rlvlm.testing:TINY", sac=SACConfig())
        config.settings(reward=StepRewardConfig(source="environment"))
        assert config.num_gpus_per_learner == gpus
        reserved = SACPebble.default_resource_request(config)
        assert sum(bundle.get("GPU", 0) for bundle in reserved.bundles) == gpus
    with pytest.raises(ModelUnavailable, match="does not see here"):
        monkeypatch.undo()
        SACPebbleConfig().settings(sac=SACConfig(device="cuda"))


def random_transitions(count, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return Transitions(
        obs=normal(count, OBS),
        actions=np.tanh(normal(count, ACTIONS)),
        next_obs=normal(count, OBS),
        terminated=(rng.random(count) < 0.2).astype(np.float32),
        env_rewards=normal(count),
        success=np.zeros(count, np.float32),
        snapshots=normal(count, 3),
    )


def filled(learner, count=200):
    transitions = random_transitions(count)
    learner.replay.add(transitions, transitions.env_rewards)
    return learner


def copy_into_oracle(learner, oracle):
    layers = [
        [module for module in net if isinstance(module, torch.nn.Linear)]
        for net in (oracle.actor, oracle.q1, oracle.q2)
    ]
    with torch.no_grad():
        for mine, theirs in zip(learner.networks.policy.layers, layers[0], strict=True):
            theirs.weight.copy_(mine.weight), theirs.bias.copy_(mine.bias)
        critic = learner.networks.critic
        for which in (0, 1):
            for weight, bias, theirs in zip(critic.weights, critic.biases, layers[1 + which], strict=True):
                theirs.weight.copy_(weight[which].T), theirs.bias.copy_(bias[which, 0])
    oracle.copy_targets()


@pytest.mark.slow
@pytest.mark.parametrize("update", ["by_hand", "autograd"])
def test_every_loss_of_thirty_updates_is_the_oracles(update):
    learner, oracle = filled(make_learner(update=update)), OracleSAC(OBS, ACTIONS, hidden=(32, 32))
    copy_into_oracle(learner, oracle)
    twin = torch.Generator()
    twin.set_state(learner._generator.get_state())
    for _ in range(30):
        rows = torch.randint(200, (64,), generator=twin)
        next_noise, noise = torch.randn(2, 64, ACTIONS, generator=twin)
        batch = learner.replay.draw(rows)
        expected = oracle.update(
            batch.obs, batch.actions, batch.next_obs, batch.terminated, batch.rewards, next_noise, noise
        )
        learner.learn(1, EnvironmentReward())
        got = learner.report()
        for name in ("critic_loss", "actor_loss", "alpha", "entropy"):
            assert got[f"sac/{name}"] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    target = learner.networks.target(batch.obs, batch.actions)
    both = torch.cat([batch.obs, batch.actions], 1)
    torch.testing.assert_close(
        target, torch.stack([oracle.q1_target(both)[:, 0], oracle.q2_target(both)[:, 0]]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_restarted_critics_forget_and_everything_else_stays():
    learner = filled(make_learner())
    learner.learn(5, EnvironmentReward())
    policy = [parameter.clone() for parameter in learner.networks.policy.parameters()]
    critic = [parameter.clone() for parameter in learner.networks.critic.weights]
    learner.restart_critics()
    networks = learner.networks
    assert all(torch.equal(*pair) for pair in zip(policy, networks.policy.parameters(), strict=True))
    assert not any(torch.equal(*pair) for pair in zip(critic, networks.critic.weights, strict=True))
    assert all(
        torch.equal(*pair) for pair in zip(networks.critic.parameters(), networks.target.parameters(), strict=True)
    )
    tree = learner.save_tree()["adam"]
    assert [tree[name]["steps"] for name in ("critic", "actor", "alpha")] == [0, 5, 5]
    assert not tree["critic"]["mean"].any() and not tree["critic"]["square"].any() and tree["actor"]["mean"].any()
    learner.learn(5, EnvironmentReward())


@pytest.mark.slow
@pytest.mark.parametrize("bonus_weight", [0.0, 2.0])
def test_calibrated_critics_start_at_the_value_of_the_mean_reward(bonus_weight):
    learner = make_learner(gamma=0.9, is_calibrated=True)
    transitions = random_transitions(200)
    learner.replay.add(transitions, transitions.env_rewards - 7, np.full(200, -4.0, np.float32))
    learner.restart_critics(bonus_weight)
    p_on = 1 - transitions.terminated.mean()
    expected = (transitions.env_rewards.mean() - 7 - 4 * bonus_weight) / (1 - 0.9 * p_on)
    batch = learner.replay.draw(torch.arange(200))
    for critic in (learner.networks.critic, learner.networks.target):
        values = critic(batch.obs, batch.actions)
        assert expected < -20 and values.mean().item() == pytest.approx(expected, abs=1), "no fresh value is near it"


def test_networks_see_states_centred_and_scaled_and_actions_as_they_are():
    obs = torch.tensor([[5.0, 0.60, 1.0], [9.0, 0.80, 1.0]])  # spreads of 2, of 0.1 (which counts as 0.2) and of none
    seen = torch.tensor([[-1.0, -0.5, 0.0], [1.0, 0.5, 0.0]])
    actions = torch.tensor([[0.3, -0.7], [1.0, 0.2]])
    raw, scaled = (TwinCritic(3, 2, (16,), torch.Generator().manual_seed(0)) for _ in range(2))
    scaled.calibrate(*centre_and_spread(obs))
    torch.testing.assert_close(scaled(obs, actions), raw(seen, actions), rtol=1e-5, atol=1e-5)
    raw, scaled = (SquashedGaussian(3, 2, (16,), torch.Generator().manual_seed(0)) for _ in range(2))
    scaled.calibrate(*centre_and_spread(obs))
    torch.testing.assert_close(scaled(obs), raw(seen), rtol=1e-5, atol=1e-5)
    _, still = centre_and_spread(torch.full((5, 3), 0.25))  # a task whose states are all the same
    assert still.min() == pytest.approx(0.01)


@pytest.mark.slow
def test_states_are_scaled_once_before_the_first_update_and_for_critics_that_start_anew():
    transitions = random_transitions(200)
    transitions = dataclasses.replace(transitions, obs=0.5 + 0.02 * transitions.obs)

    def spread_of_values(learner):  # between states that differ by centimetres
        batch = learner.replay.draw(torch.arange(200))
        return learner.networks.critic(batch.obs, torch.zeros_like(batch.actions)).std().item()

    for is_calibrated in (False, True):
        learner = make_learner(is_calibrated=is_calibrated)
        learner.replay.add(transitions, transitions.env_rewards)
        learner.restart_critics()  # before the first update, which scales
        assert spread_of_values(learner) < 0.02
        learner.learn(1, EnvironmentReward())
        policy = learner.networks.policy(learner.replay.obs)[0].std(dim=0).mean().item()
        assert (spread_of_values(learner) > 0.05) == is_calibrated == (policy > 0.05)
        learner.restart_critics()
        assert (spread_of_values(learner) > 0.05) == is_calibrated


@pytest.mark.slow
def test_the_policy_may_move_less_often_than_the_critics():
    learner = filled(make_learner(actor_every=2))
    learner.learn(4, EnvironmentReward())
    steps = {name: state["steps"] for name, state in learner.save_tree()["adam"].items()}
    assert steps == {"critic": 4, "actor": 2, "alpha": 2}
    before, policy = learner.report(), learner.networks.policy.layers[0].weight.clone()
    learner.learn(1, EnvironmentReward())  # the fifth is the policy's turn, the sixth is not
    assert not torch.equal(policy, learner.networks.policy.layers[0].weight)
    policy, moved = learner.networks.policy.layers[0].weight.clone(), learner.report()
    learner.learn(1, EnvironmentReward())
    assert torch.equal(policy, learner.networks.policy.layers[0].weight)
    after = learner.report()
    assert before.keys() == after.keys() and after["sac/actor_loss"] == moved["sac/actor_loss"]
    assert after["sac/critic_loss"] != moved["sac/critic_loss"]
