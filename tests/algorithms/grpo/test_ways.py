"""The ways from the hand to the things: learned from demonstrations and after each update."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from rlvlm import metrics
from rlvlm.algorithms.grpo.config import GRPOConfig, ScoreConfig, SFTConfig, WaysConfig, check_together
from rlvlm.algorithms.grpo.imitation import demonstrate, imitate
from rlvlm.algorithms.grpo.rollouts import ObsProcessor
from rlvlm.algorithms.grpo.ways import WaysPhase
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import make_world
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.config import PocketVLAConfig, VLAConfig
from rlvlm.policies.vla.pocket import PocketVLA
from rlvlm.policies.vla.tokens import ActionScale

WORLD = make_world("push_block", EnvConfig(), 0)
SHOWN = demonstrate(WORLD, SFTConfig(demonstrations=6), 0)
Seen = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def policy(ways: bool = True) -> PocketVLA:
    torch.manual_seed(0)
    found = build_policy(VLAConfig(pocket=PocketVLAConfig(image_px=16, hidden=32, ways=ways)), WORLD)
    assert isinstance(found, PocketVLA)
    return found


def seen_by(net: PocketVLA) -> tuple[Seen, torch.Tensor]:
    obs_processor = ObsProcessor(net, WORLD)
    return obs_processor.look(SHOWN.obs), obs_processor.true_ways(SHOWN.obs)


def error(net: PocketVLA) -> float:
    seen, ways = seen_by(net)
    return (net.act_and_tell(*seen)[1] - ways).square().mean().item()


def strayed(net: PocketVLA, before: PocketVLA) -> float:
    """Divergence of a chunk, nats."""
    seen, _ = seen_by(net)
    acted, acts = (one(*seen).log_softmax(dim=-1) for one in (before, net))
    return (acted.exp() * (acted - acts)).sum(dim=(1, 2)).mean().item()


def phase(net: PocketVLA, **settings: Any) -> WaysPhase:
    return WaysPhase(net, WaysConfig(**{"passes": 200, "batch_size": 16, "lr": 3e-3, **settings}), 1.0, seed=3)


def taught(one: WaysPhase, net: PocketVLA, share: float = 1.0) -> dict[str, float]:
    (images, words, proprio), ways = seen_by(net)
    one.learn(one.lessons(len(ways)), lambda rows: (images[rows], words[rows], proprio[rows]), ways, share)
    return one.report()


def test_true_ways_lead_from_the_hand_to_each_thing() -> None:
    _, ways = seen_by(policy())
    places = WORLD.landmarks(SHOWN.obs.snapshots)
    assert ways.shape == (len(places), WORLD.num_ways) == (len(places), 4)
    for thing in (1, 2):
        expected = places[:, thing] - places[:, 0]
        np.testing.assert_allclose(ways[:, 2 * thing - 2 : 2 * thing].numpy(), expected, rtol=1e-5)


def test_demonstrations_teach_ways_where_the_policy_tells_them() -> None:
    scale = ActionScale.of_actions(SHOWN.actions.reshape(-1, 7), WORLD.scaled_actions)
    config = SFTConfig(steps=300, batch_size=16)
    after = []
    for ways in (True, False):
        net = policy(ways)
        loss = imitate(net, ObsProcessor(net, WORLD), SHOWN, scale, config, np.random.default_rng(0), print)
        after.append((net, loss))
    (tells, told_loss), (silent, silent_loss) = after
    _, ways = seen_by(tells)
    assert error(tells) < 0.3 * ways.var(dim=0).mean()
    assert not silent.tells_ways and "ways.weight" not in silent.state_dict()
    assert told_loss == pytest.approx(silent_loss, rel=0.2)  # the loss that is told is of actions alone


def test_the_phase_learns_ways_and_acts_as_before() -> None:
    net = policy()
    before, wrong = copy.deepcopy(net), error(net)
    report = taught(phase(net), net)
    assert error(net) < 0.5 * wrong and report[metrics.GRPO_WAYS] < 0.5
    kept = strayed(net, before)
    free = copy.deepcopy(before)
    (images, words, proprio), ways = seen_by(free)
    optimizer = torch.optim.AdamW(free.parameters(), 3e-3, weight_decay=1e-4)
    for rows in phase(free).lessons(len(ways)):
        optimizer.zero_grad()
        told = free.act_and_tell(images[rows], words[rows], proprio[rows])[1]
        (told - ways[rows]).square().mean().backward()
        optimizer.step()
    assert kept < 0.2 * strayed(free, before)


def test_a_share_of_the_step_size_moves_less() -> None:
    errors = []
    for share in (0.0, 0.1, 1.0):
        net = policy()
        taught(phase(net, passes=1), net, share)
        errors.append(error(net))
    assert errors[0] == error(policy()) > errors[1] > errors[2]


def test_a_saved_phase_goes_on_to_the_bit() -> None:
    net = policy()
    one = phase(net, passes=2)
    taught(one, net)
    tree, other_net = copy.deepcopy(one.save_tree()), copy.deepcopy(net)
    other = phase(other_net, passes=2)
    other.load_tree(tree)
    assert other.report() == one.report()
    assert taught(one, net) == taught(other, other_net)
    for name, value in net.state_dict().items():
        assert torch.equal(value, other_net.state_dict()[name]), name


def test_passes_need_a_policy_that_tells_ways() -> None:
    grpo = GRPOConfig(ways=WaysConfig(passes=1))
    with pytest.raises(ValueError, match=r"algo\.ways\.passes has no effect .* --policy\.pocket\.ways"):
        check_together(ScoreConfig(), grpo, PocketVLAConfig())
    check_together(ScoreConfig(), grpo, PocketVLAConfig(ways=True))
    for odd in ({"passes": -1}, {"batch_size": 0}, {"lr": 0.0}):
        with pytest.raises(ValueError, match=r"need ways\.passes >= 0"):
            WaysConfig(**odd)
