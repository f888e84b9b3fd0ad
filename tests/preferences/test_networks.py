import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from tiny_episodes import some_steps, steps_of, tiny_episode, tiny_episodes
from tiny_loops import FEEDBACK, same_trees

from rlvlm.core import metrics
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.dataset import Steps
from rlvlm.preferences.loop import build_loop
from rlvlm.preferences.networks import BOUND, ImageInput, ImageNetwork, ResNetNetwork, StateInput, StateNetwork
from rlvlm.preferences.teachers import OracleTeacher
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.runs.settings.kinds import StepsRun
from rlvlm.testing import TinyEnv


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_state_row_is_the_observation_after_the_step_and_the_action():
    steps = Steps(
        next_obs=np.array([[1, 2], [3, 4]], np.float32),
        actions=np.array([[5], [6]], np.float32),
        snapshots=np.zeros((2, 3), np.float32),
    )
    inputs = StateInput(obs_size=2, action_size=1)
    assert inputs.rows(steps, np.array([1, 0, 1])).tolist() == [[3, 4, 6], [1, 2, 5], [3, 4, 6]]
    first, kind = inputs.distinct(steps)
    assert first.tolist() == kind.tolist() == [0, 1]


def test_a_picture_row_is_the_image_after_the_step_each_kind_once():
    snapshots = np.array([[0.1, 0.5, 0.4], [0.3, 0.2, 0.6], [0.2, 0.9, 0.4]], np.float32)  # only the block shows
    steps = Steps(next_obs=np.zeros((3, 4), np.float32), actions=np.zeros((3, 2), np.float32), snapshots=snapshots)
    inputs = ImageInput(FrameStore(TinyEnv(), 24), partial(ImageNetwork, 24))
    first, kind = inputs.distinct(steps)
    assert (first.tolist(), kind.tolist()) == ([0, 1], [0, 1, 0])
    np.testing.assert_array_equal(inputs.rows(steps, first).numpy(), TinyEnv().draw(snapshots[:2], 24))


@pytest.mark.parametrize("size_px", [16, 64, 300])
def test_every_pixel_but_the_last_row_and_column_counts_at_every_size(size_px):
    network = ImageNetwork(size_px, rng())
    with torch.no_grad():
        for layer in network.layers[::2]:
            if isinstance(layer, torch.nn.Conv2d):
                layer.weight.abs_()  # no unit is silent
    pictures = torch.full((1, size_px, size_px, 3), 1e-3, requires_grad=True)
    network(pictures).sum().backward()
    assert pictures.grad is not None and (pictures.grad[:, :-1, :-1] != 0).all()


def test_rewards_are_bounded_and_start_small_for_images():
    pictures = torch.randint(0, 256, (5, 64, 64, 3), generator=rng(), dtype=torch.uint8)
    rewards = ImageNetwork(64, rng())(pictures)
    assert rewards.shape == (5,) and rewards.abs().max() < 0.05
    network = StateNetwork(3, rng())
    far = network(1e6 * torch.randn(50, 3, generator=rng()))
    assert far.shape == (50,) and far.abs().max() <= BOUND


def test_a_calibrated_network_does_not_care_for_offset_and_scale_unless_nothing_moved():
    rows = torch.randn(200, 3, generator=rng())
    plain, moved = StateNetwork(3, rng()), StateNetwork(3, rng())
    plain.calibrate(rows)
    moved.calibrate(5 + 2 * rows)
    torch.testing.assert_close(moved(5 + 2 * rows), plain(rows), atol=1e-4, rtol=0)
    moved.calibrate(torch.ones(10, 3))
    torch.testing.assert_close(moved.scale, torch.full((3,), 0.1))
    assert "centre" in moved.state_dict(), "saved with the weights"


SMALL = RewardModelConfig(ensemble=1, batch_size=4, max_epochs=1, min_updates=0, max_updates=2, hold_out_every=0)


@pytest.fixture(scope="module")
def resnet():
    yield ResNetNetwork(rng()).eval()


def test_it_is_a_resnet_18(resnet):
    # He et al. 2016: 11.69 million weights with 1000 classes; without those 513,000, and with our 513.
    assert sum(weight.numel() for weight in resnet.parameters()) == 11_689_512 - 513_000 + 513
    convolutions = [layer for layer in resnet.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert len([layer for layer in convolutions if layer.kernel_size != (1, 1)]) == 17  # and one linear layer: 18


def test_rewards_of_a_resnet_are_bounded_and_start_small(resnet):
    pictures = torch.randint(0, 256, (3, 64, 64, 3), generator=rng(), dtype=torch.uint8)
    with torch.no_grad():
        rewards, features = resnet(pictures), resnet.features(pictures)
    assert rewards.shape == (3,) and rewards.abs().max() < 0.1 and features.shape == (3, 512)
    values = features @ resnet.head.weight[0] + resnet.head.bias
    torch.testing.assert_close(rewards, BOUND * torch.tanh(values / BOUND))


def test_of_a_resnet_the_generator_passed_in_decides_and_the_global_one_is_not_touched(resnet):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    again = ResNetNetwork(rng())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(one, other) for one, other in zip(resnet.parameters(), again.parameters(), strict=True))
    assert not torch.equal(ResNetNetwork(rng(1)).head.weight, again.head.weight)


@pytest.mark.slow
def test_an_image_is_worth_the_same_in_any_company_and_after_a_restart():
    def build(seed: int):
        loop = build_loop(
            TinyEnv(),
            OracleTeacher(),
            reward=StepRewardConfig(model="resnet18"),
            reward_model=SMALL,
            feedback=dataclasses.replace(FEEDBACK, sampling="disagreement", pool=2),
            seed=seed,
        )
        for episode in tiny_episodes(4):
            loop.add(episode)
        return loop

    one, other = build(0), build(1)
    assert metrics.REWARD_LOSS in one.run_session(10)
    model, steps = one._model, some_steps(steps_of(tiny_episode(0)), slice(0, 20, 5))
    together = model.ensemble.predict(steps)
    rows = [some_steps(steps, slice(place, place + 1)) for place in range(len(steps))]
    alone = np.concatenate([model.ensemble.predict(row) for row in rows], axis=1)
    np.testing.assert_allclose(alone, together, atol=1e-4)  # normalised by running statistics, not by the batch
    other.set_state(one.get_state())
    for loop in (one, other):
        loop.run_session(15)
    assert same_trees(one.get_state(), other.get_state())


def test_images_too_small_for_it_are_refused():
    with pytest.raises(ValueError, match="needs reward_model.image_px >= 64, got 32"):
        StepsRun(task="tiny", reward=StepRewardConfig(model="resnet18"), reward_model=RewardModelConfig(image_px=32))
