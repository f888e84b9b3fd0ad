"""Both members of `Update` are held to each other, losses and gradients."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sac_pebble.dense import ParameterBlock, flatten
from rlvlm.algorithms.sac_pebble.module import SACModule
from rlvlm.algorithms.sac_pebble.replay import ReplayBatch
from rlvlm.algorithms.sac_pebble.update import AutogradUpdate, HandWrittenUpdate

OBS, ACTIONS, ROWS = 5, 3, 40
MEMBERS = pytest.mark.parametrize("member", [HandWrittenUpdate, AutogradUpdate])


def build(member, hidden=(24, 16), initial_alpha=0.3, seed=0):
    torch.manual_seed(seed)
    module = SACModule(
        observation_space=gym.spaces.Box(-1, 1, (OBS,), np.float32),
        action_space=gym.spaces.Box(-1, 1, (ACTIONS,), np.float32),
        model_config={"hidden": list(hidden), "initial_alpha": initial_alpha},
    )
    module.target.reset()  # another network than the critic, so that a mix-up shows
    groups = {
        "critic": list(module.critic.parameters()),
        "actor": list(module.policy.parameters()),
        "alpha": [module.log_alpha],
    }
    blocks = {name: ParameterBlock(group, 1e-3) for name, group in groups.items()}
    flatten(module.target.parameters())
    return member(module, SACConfig(hidden=hidden, batch_size=ROWS, gamma=0.9)), module, blocks


def draw_batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, ROWS, OBS, generator=generator)
    actions = torch.tanh(torch.randn(ROWS, ACTIONS, generator=generator))
    rewards, ends = torch.randn(ROWS, generator=generator), (torch.rand(ROWS, generator=generator) < 0.3).float()
    noise = torch.randn(2, ROWS, ACTIONS, generator=generator)
    return ReplayBatch(obs, actions, next_obs, ends, rewards, torch.cat((obs, actions), dim=1)), noise


@pytest.mark.parametrize("hidden", [(24, 16), (8,), (300, 10, 12)])
def test_losses_and_gradients_by_hand_are_those_of_autograd(hidden):
    batch, noise = draw_batch()
    by_hand, _, hand_blocks = build(HandWrittenUpdate, hidden)
    autograd, _, auto_blocks = build(AutogradUpdate, hidden)
    for _ in range(3):
        readings = [update.critic_gradients(batch, noise) for update in (by_hand, autograd)]
        torch.testing.assert_close(*readings, rtol=1e-5, atol=1e-5)
        for blocks in (hand_blocks, auto_blocks):
            blocks["critic"].step()
        readings = [update.policy_gradients(batch, noise) for update in (by_hand, autograd)]
        torch.testing.assert_close(*readings, rtol=1e-5, atol=1e-5)
        for name, block in hand_blocks.items():
            assert block.gradients.any(), name
            torch.testing.assert_close(block.gradients, auto_blocks[name].gradients, rtol=1e-5, atol=1e-5)
            for blocks in (hand_blocks, auto_blocks):  # so that the next round meets other weights
                blocks[name].step()


@MEMBERS
def test_the_temperatures_gradient_on_paper(member):
    # d/dlog_alpha of -exp(log_alpha) * mean(log p + target), with the target entropy -3 of three actions.
    update, _, blocks = build(member, initial_alpha=0.5)
    batch, noise = draw_batch()
    update.critic_gradients(batch, noise)
    _, log_density, _ = update.policy_gradients(batch, noise)
    assert blocks["alpha"].gradients.item() == pytest.approx(-0.5 * (log_density.mean().item() - 3.0), rel=1e-5)


@MEMBERS
def test_readings_hold_no_graph(member):
    update, _, _ = build(member)
    batch, noise = draw_batch()
    values = *update.critic_gradients(batch, noise), *update.policy_gradients(batch, noise)
    assert not any(tensor.requires_grad for tensor in values)
