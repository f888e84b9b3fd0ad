from functools import partial

import numpy as np
import pytest
import torch

from rlvlm.envs.images import FrameStore
from rlvlm.preferences.dataset import Steps
from rlvlm.preferences.model.networks import BOUND, ImageInput, ImageNetwork, StateInput, StateNetwork
from rlvlm.testing import TinyEnv


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_state_row_is_the_observation_after_the_step_and_the_action() -> None:
    steps = Steps(
        next_obs=np.array([[1, 2], [3, 4]], np.float32),
        actions=np.array([[5], [6]], np.float32),
        snapshots=np.zeros((2, 3), np.float32),
    )
    inputs = StateInput(obs_size=2, action_size=1)
    assert inputs.rows(steps, np.array([1, 0, 1])).tolist() == [[3, 4, 6], [1, 2, 5], [3, 4, 6]]
    first, kind = inputs.distinct(steps)
    assert first.tolist() == kind.tolist() == [0, 1]


def test_a_picture_row_is_the_image_after_the_step_each_kind_once() -> None:
    snapshots = np.array([[0.1, 0.5, 0.4], [0.3, 0.2, 0.6], [0.2, 0.9, 0.4]], np.float32)  # only the block shows
    steps = Steps(next_obs=np.zeros((3, 4), np.float32), actions=np.zeros((3, 2), np.float32), snapshots=snapshots)
    inputs = ImageInput(FrameStore(TinyEnv(), 24), partial(ImageNetwork, 24))
    first, kind = inputs.distinct(steps)
    assert (first.tolist(), kind.tolist()) == ([0, 1], [0, 1, 0])
    np.testing.assert_array_equal(inputs.rows(steps, first).numpy(), TinyEnv().draw(snapshots[:2], 24))


@pytest.mark.parametrize("size_px", [16, 64, 300])
def test_every_pixel_but_the_last_row_and_column_counts_at_every_size(size_px: int) -> None:
    network = ImageNetwork(size_px, rng())
    with torch.no_grad():
        for layer in network.layers[::2]:
            if isinstance(layer, torch.nn.Conv2d):
                layer.weight.abs_()  # no unit is silent
    pictures = torch.full((1, size_px, size_px, 3), 1e-3, requires_grad=True)
    network(pictures).sum().backward()
    assert pictures.grad is not None and (pictures.grad[:, :-1, :-1] != 0).all()


def test_rewards_are_bounded_and_start_small_for_images() -> None:
    pictures = torch.randint(0, 256, (5, 64, 64, 3), generator=rng(), dtype=torch.uint8)
    rewards = ImageNetwork(64, rng())(pictures)
    assert rewards.shape == (5,) and rewards.abs().max() < 0.05
    network = StateNetwork(3, rng())
    far = network(1e6 * torch.randn(50, 3, generator=rng()))
    assert far.shape == (50,) and far.abs().max() <= BOUND


def test_the_generator_passed_in_decides_the_first_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        return torch.cat([weight.flatten() for weight in ImageNetwork(16, rng(seed)).parameters()])

    assert torch.equal(weights(0), weights(0)) and not torch.equal(weights(0), weights(1))
    assert torch.isfinite(weights(0)).all() and weights(0).abs().max() <= BOUND / np.sqrt(75)


def test_a_calibrated_network_does_not_care_for_offset_and_scale_unless_nothing_moved() -> None:
    rows = torch.randn(200, 3, generator=rng())
    plain, moved = StateNetwork(3, rng()), StateNetwork(3, rng())
    plain.calibrate(rows)
    moved.calibrate(5 + 2 * rows)
    torch.testing.assert_close(moved(5 + 2 * rows), plain(rows), atol=1e-4, rtol=0)
    moved.calibrate(torch.ones(10, 3))
    torch.testing.assert_close(moved.scale, torch.full((3,), 0.1))
    assert "centre" in moved.state_dict(), "saved with the weights"
