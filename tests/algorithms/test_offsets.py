"""The offsets from the hand to the things, which demonstrations teach beside actions."""

import numpy as np
import pytest
import torch

from rlvlm.algorithms.sft import Imitator
from rlvlm.algorithms.sft_chunks import demonstrate
from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.push_block import HAND
from rlvlm.envs.registry import make_env
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.config import PocketVLAConfig, VLAConfig
from rlvlm.policies.vla.offsets import augment_scenes
from rlvlm.policies.vla.pocket import PocketVLA

WORLD = make_env("push_block", ChunkEnvConfig(), 0)
SHOWN = demonstrate(WORLD, ChunkSFTConfig(episodes=6), 0)
Seen = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def policy(offsets: bool = True) -> PocketVLA:
    torch.manual_seed(0)
    found = build_policy(VLAConfig(pocket=PocketVLAConfig(image_px=16, hidden=32, predicts_offsets=offsets)), WORLD)
    assert isinstance(found, PocketVLA)
    found.learn_statistics(SHOWN, WORLD)
    return found


def seen_by(net: PocketVLA) -> tuple[Seen, torch.Tensor]:
    return net.shown_inputs(WORLD, SHOWN.obs), torch.from_numpy(WORLD.offsets(SHOWN.obs.snapshots))


def error(net: PocketVLA) -> float:
    seen, offsets = seen_by(net)
    return (net.forward_with_offsets(*seen)[1] - offsets).square().mean().item()


def test_unplayed_scenes_mix_the_hand_of_one_moment_with_the_objects_of_a_start():
    scenes = augment_scenes(SHOWN.obs, SHOWN.begins, 200, WORLD, np.random.default_rng(0))
    shown, starts = SHOWN.obs.snapshots, SHOWN.obs.snapshots[SHOWN.begins]
    assert len(SHOWN.begins) == 6 and SHOWN.begins[0] == 0 and (np.diff(SHOWN.begins) > 0).all()
    texts = np.array(SHOWN.obs.texts)
    for snapshot, instruction in zip(scenes.snapshots, scenes.texts, strict=True):
        assert (shown[texts == instruction][:, HAND] == snapshot[HAND]).all(axis=1).any(), "of a demonstrated moment"
        apart = np.abs(starts[texts[SHOWN.begins] == instruction] - snapshot)[:, HAND.stop :].max(axis=1)
        assert apart.min() <= 0.1, "of a start with this instruction, and moved"
    assert len(np.unique(scenes.snapshots, axis=0)) == 200


@pytest.mark.slow
def test_such_scenes_teach_to_see_where_the_hand_should_not_be():
    errors = []
    for count in (0, 400):
        net = policy()
        config = ChunkSFTConfig(updates=300, batch_size=16, scenes=count)
        Imitator(net, WORLD, SHOWN, config, np.random.default_rng(0), print).train(config.updates)
        other = augment_scenes(SHOWN.obs, SHOWN.begins, 200, WORLD, np.random.default_rng(1))
        with torch.no_grad():
            offsets = net.predict_offsets(*net.shown_inputs(WORLD, other))
        errors.append((offsets - torch.from_numpy(WORLD.offsets(other.snapshots))).square().mean().item())
    assert errors[1] < 0.5 * errors[0]


def test_true_ways_lead_from_the_hand_to_each_thing():
    _, offsets = seen_by(policy())
    places = WORLD.landmarks(SHOWN.obs.snapshots)
    assert offsets.shape == (len(places), WORLD.num_offsets) == (len(places), 4)
    for thing in (1, 2):
        expected = places[:, thing] - places[:, 0]
        np.testing.assert_allclose(offsets[:, 2 * thing - 2 : 2 * thing].numpy(), expected, rtol=1e-5)


@pytest.mark.slow
def test_demonstrations_teach_ways_where_the_policy_tells_them():
    config = ChunkSFTConfig(updates=300, batch_size=16)
    after = []
    for offsets in (True, False):
        net = policy(offsets)
        loss = Imitator(net, WORLD, SHOWN, config, np.random.default_rng(0), print).train(config.updates)
        after.append((net, loss))
    (tells, told_loss), (silent, silent_loss) = after
    _, offsets = seen_by(tells)
    assert error(tells) < 0.3 * offsets.var(dim=0).mean()
    assert not silent.predicts_offsets and "offset_head.weight" not in silent.state_dict()
    assert told_loss == pytest.approx(silent_loss, rel=0.2)  # the loss that is told is of actions alone
