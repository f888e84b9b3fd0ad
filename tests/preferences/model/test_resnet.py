import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tiny_episodes import tiny_episode, tiny_episodes
from tiny_loops import FEEDBACK, same_trees

from rlvlm.core import metrics
from rlvlm.preferences.answers.teachers import OracleTeacher
from rlvlm.preferences.build import build_loop
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.dataset import Steps
from rlvlm.preferences.model.networks import BOUND
from rlvlm.preferences.model.resnet import ResNetNetwork, affordable_pictures
from rlvlm.rewards.config import RewardConfig
from rlvlm.runs.config import RunConfig
from rlvlm.testing import TinyEnv

SMALL = RewardModelConfig(ensemble=1, batch_size=4, max_epochs=1, min_updates=0, max_updates=2, hold_out_every=0)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def network() -> Iterator[ResNetNetwork]:
    yield ResNetNetwork(rng()).eval()


def test_it_is_a_resnet_18(network: ResNetNetwork) -> None:
    # He et al. 2016: 11.69 million weights with 1000 classes; without those 513,000, and with our 513.
    assert sum(weight.numel() for weight in network.parameters()) == 11_689_512 - 513_000 + 513
    convolutions = [layer for layer in network.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert len([layer for layer in convolutions if layer.kernel_size != (1, 1)]) == 17  # and one linear layer: 18


def test_rewards_are_bounded_and_start_small(network: ResNetNetwork) -> None:
    images = torch.randint(0, 256, (3, 64, 64, 3), generator=rng(), dtype=torch.uint8)
    with torch.no_grad():
        rewards, features = network(images), network.features(images)
    assert rewards.shape == (3,) and rewards.abs().max() < 0.1 and features.shape == (3, 512)
    values = features @ network.head.weight[0] + network.head.bias
    torch.testing.assert_close(rewards, BOUND * torch.tanh(values / BOUND))


def test_the_generator_passed_in_decides_and_the_global_one_is_not_touched(network: ResNetNetwork) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    again = ResNetNetwork(rng())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(one, other) for one, other in zip(network.parameters(), again.parameters(), strict=True))
    assert not torch.equal(ResNetNetwork(rng(1)).head.weight, again.head.weight)


@pytest.mark.slow
def test_a_image_is_worth_the_same_in_any_company_and_after_a_restart() -> None:
    def build(seed: int):
        loop = build_loop(
            TinyEnv(),
            OracleTeacher(),
            reward=RewardConfig(model="resnet18"),
            reward_model=SMALL,
            feedback=dataclasses.replace(FEEDBACK, sampling="disagreement", pool=2),
            seed=seed,
        )
        for episode in tiny_episodes(4):
            loop.add(episode)
        return loop

    one, other = build(0), build(1)
    assert metrics.REWARD_LOSS in one.run_session(10)
    model, steps = one._model, _steps()
    together = model.ensemble.predict(steps)
    alone = np.concatenate([model.ensemble.predict(_part(steps, place)) for place in range(len(steps))], axis=1)
    np.testing.assert_allclose(alone, together, atol=1e-4)  # normalised by running statistics, not by the batch
    other.set_state(one.get_state())
    for loop in (one, other):
        loop.run_session(15)
    assert same_trees(one.get_state(), other.get_state())


def _steps() -> Steps:
    episode = tiny_episode(0)
    every = Steps(actions=episode.actions, next_obs=episode.next_obs, snapshots=episode.snapshots)
    return _part(every, slice(0, 20, 5))


def _part(steps: Steps, chosen: int | slice) -> Steps:
    rows = slice(chosen, chosen + 1) if isinstance(chosen, int) else chosen
    return Steps(actions=steps.actions[rows], next_obs=steps.next_obs[rows], snapshots=steps.snapshots[rows])


def test_larger_images_are_labelled_in_smaller_pieces() -> None:
    assert affordable_pictures(64) == 4 * affordable_pictures(128) and affordable_pictures(2_000) == 1


def test_images_too_small_for_it_are_refused() -> None:
    with pytest.raises(ValueError, match="needs reward_model.picture_px >= 64, got 32"):
        RunConfig(task="tiny", reward=RewardConfig(model="resnet18"), reward_model=RewardModelConfig(picture_px=32))
