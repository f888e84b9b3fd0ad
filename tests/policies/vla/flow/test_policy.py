"""Flow policies: what they sample, how likely it is later, what is scored, and that they learn."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core.episodes import Observations
from rlvlm.envs.push_block import PushBlock
from rlvlm.envs.registry import make_env, task_env
from rlvlm.policies.protocol import Reading
from rlvlm.policies.vla.build import build_policy, read_policy
from rlvlm.policies.vla.config import PocketVLAConfig, VLAConfig
from rlvlm.policies.vla.flow.config import FlowConfig
from rlvlm.policies.vla.flow.policy import FlowPolicy, VelocityNetwork
from rlvlm.policies.vla.flow.scale import Scale, read_scales, write_scales
from rlvlm.policies.vla.policy import Demonstrations, Sampling

SMALL = PocketVLAConfig(image_px=8, channels=(2, 3), hidden=16, vocabulary=20, word_width=4, has_values=True)


def pocket(**flow: Any) -> tuple[FlowPolicy, Observations, Demonstrations]:
    """A small policy with random weights, six observations that it was shown, and demonstrations."""
    env = make_env("push_block", task_env("push_block"), 0)
    assert isinstance(env, PushBlock)
    torch.manual_seed(0)
    policy = build_policy(VLAConfig(head="flow", pocket=SMALL, flow=FlowConfig(**flow)), env)
    assert isinstance(policy, FlowPolicy)
    with torch.no_grad():
        for parameter in policy.parameters():  # what begins at zero would hide mistakes
            parameter += 0.1 * torch.randn(parameter.shape)
    rng = np.random.default_rng(0)
    obs = Observations.joined([env.reset_to(number)[0] for number in range(6)])
    actions = rng.normal(size=(6, env.chunk_steps, 7)).astype(np.float32)
    actions[..., 6] = 0.0  # never changes
    shown = Demonstrations(obs=obs, actions=actions, begins=np.arange(6), num_failures=0)
    policy.learn_statistics(shown, env)
    policy.show(obs.images, policy.draw(env, obs.snapshots))
    return policy, obs, shown


def sampling(**settings: Any) -> Sampling:
    return Sampling(generator=torch.Generator().manual_seed(1), **settings)


@pytest.mark.parametrize(
    ("flow", "num_learned"),
    [
        ({}, 1),
        ({"steps": 4, "learn": "one", "start_std": 1.0, "noise": 0.5}, 1),
        ({"learn": "one", "steps": 1, "start_std": 1.0}, 1),
        ({"steps": 10, "learn": "last"}, 1),
        ({"steps": 4, "start_std": 1.0}, 4),
        ({"steps": 4, "ignore_last": True}, 3),
        ({"steps": 4, "kernel": "learned"}, 4),
        ({"steps": 4, "kernel": "cps"}, 3),
    ],
)
def test_before_an_update_every_ratio_is_one(flow, num_learned):
    policy, obs, _ = pocket(**flow)
    drawn = policy.sample(obs, sampling(temperature=0.7))
    found = policy.log_probs(obs, drawn.answers, Reading(temperature=0.7))
    assert np.abs(found.log_probs.detach().numpy() - drawn.log_probs).max() < 1e-5
    shape = (6, num_learned, 8, 7)
    assert drawn.log_probs.size == np.prod(shape) and drawn.mask.all() and drawn.actions.shape == (6, 8, 7)
    assert drawn.steps.reshape(shape[1:])[:, 3].tolist() == [[3] * 7] * num_learned
    assert np.abs(policy.values(obs).detach().numpy() - drawn.values).max() < 1e-5
    assert found.entropies is not None and found.entropies.shape == found.log_probs.shape
    # a row alone, in another order, is what it was in the batch
    rows = [4, 0]
    alone = policy.log_probs(obs.at(rows), [drawn.answers[row] for row in rows], Reading(temperature=0.7)).log_probs
    torch.testing.assert_close(alone, found.log_probs[rows], atol=1e-5, rtol=0)
    # every weight that acts is moved by its gradient
    found.log_probs.sum().backward()
    missing = [name for name, parameter in policy.named_parameters() if parameter.grad is None]
    assert all(name.startswith("network.value_head") for name in missing)


def test_greedy_chunks_are_the_odes_and_have_nothing_to_learn_from():
    policy, obs, _ = pocket(steps=4)
    drawn = policy.sample(obs, sampling())
    again = policy.sample(obs, Sampling(generator=torch.Generator().manual_seed(9)))
    assert np.array_equal(drawn.actions, again.actions) and not drawn.mask.any() and not drawn.log_probs.any()
    found = policy.log_probs(obs, drawn.answers).log_probs
    assert not found.detach().any()
    # a loop by hand
    with torch.no_grad():
        cache = policy.network.prefix(*policy.normalised(*policy.inputs(obs)))
        x = torch.zeros(6, 8, 7)
        for t in (1.0, 0.75, 0.5, 0.25):
            x = x - 0.25 * policy.network.velocity(cache, x, torch.full((6,), t))
    assert np.abs(policy.scales["action"].restored(x.numpy()) - drawn.actions).max() < 1e-6


def test_noise_may_be_shared_by_the_steps_of_a_chunk_and_leaves_dimensions_alone():
    policy, obs, _ = pocket(steps=1, start_std=1.0, noise=0.5)
    explored = np.array([True, False, True, True, True, True, False])
    ways: dict[str, np.ndarray] = {}
    for noise_per in ("token", "chunk"):
        drawn = policy.sample(obs, sampling(temperature=1.0, noise_per=noise_per, explored=explored))
        mask = drawn.mask.reshape(6, 8, 7)
        assert mask[..., explored].all() and not mask[..., ~explored].any()
        found = policy.log_probs(obs, drawn.answers).log_probs.detach().numpy()
        assert np.abs(found - drawn.log_probs).max() < 1e-5 and not found[~drawn.mask].any()
        before, after = (np.stack([answer["states"][i] for answer in drawn.answers]) for i in (0, 1))
        still = policy.sample(obs, sampling(temperature=1e-6, noise_per=noise_per, explored=explored))
        # with one step, the same start and hardly any noise, what differs is the noise and the drift along the start
        ways[noise_per] = after - policy.scales["action"].normalised(still.actions) + 0.125 * before
    assert ways["chunk"][..., explored].std(axis=1).max() < 1e-3 < ways["token"][..., explored].std(axis=1).min()


class Padded(VelocityNetwork):
    """Denoises 5 steps of 4 dimensions, each of which sees all others."""

    horizon, action_width = 5, 4

    def __init__(self) -> None:
        super().__init__()
        self.value_head = None
        self.mixed = torch.nn.Linear(20, 20)

    def read(self, instructions: Any) -> Tensor:
        return torch.zeros(len(instructions), 1, dtype=torch.long)

    def prefix(self, images: Tensor, words: Tensor, proprio: Tensor) -> Tensor:
        return proprio

    def velocity(self, cache: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return self.mixed(x.flatten(1)).view_as(x)


def padded() -> tuple[FlowPolicy, Observations, Demonstrations]:
    """A policy whose env runs 3 of 5 steps of 2 of 4 dimensions."""
    torch.manual_seed(0)
    policy = FlowPolicy(Padded(), FlowConfig(steps=4), chunk_steps=3, action_size=2)
    rng = np.random.default_rng(0)
    obs = Observations(texts=("go",) * 4, proprio=rng.normal(size=(4, 2)).astype(np.float32))
    policy.show(obs.images, np.zeros((4, 1, 2, 2, 3), np.uint8))
    frames = np.zeros((4, 1, 2, 2, 3), np.uint8)
    actions = rng.normal(size=(4, 3, 2)).astype(np.float32)
    shown = Demonstrations(obs=obs, actions=actions, begins=np.arange(1), num_failures=0, images=frames)
    policy.learn_statistics(shown, None)  # pyright: ignore[reportArgumentType] - not asked
    return policy, obs, shown


def test_unplayed_steps_are_neither_noisy_nor_scored_nor_imitated():
    policy, obs, shown = padded()
    drawn = policy.sample(obs, sampling(temperature=1.0))
    assert drawn.actions.shape == (4, 3, 2) and drawn.log_probs.shape == (4, 4 * 3 * 2)
    assert drawn.steps.tolist() == [0, 0, 1, 1, 2, 2] * 4
    states = torch.from_numpy(np.stack([answer["states"] for answer in drawn.answers]))
    for k in range(4):
        ode = states[:, k] - 0.25 * policy.network.velocity(None, states[:, k], torch.ones(4))
        rest = ~policy.is_real.expand_as(ode)
        torch.testing.assert_close(states[:, k + 1][rest], ode[rest].detach(), atol=1e-6, rtol=0)
    # their velocity is trained by nobody
    loss = policy.imitation(shown, None, None, np.random.default_rng(0), print).loss(torch.arange(4), None)  # pyright: ignore[reportArgumentType]
    loss.backward()
    grad = policy.get_parameter("network.mixed.bias").grad
    assert grad is not None and torch.equal(grad.view(5, 4) != 0, policy.is_real)
    with pytest.raises(ValueError, match="have 5 steps and the env runs 6"):
        FlowPolicy(Padded(), FlowConfig(), chunk_steps=6, action_size=2)


def test_weights_of_demonstrations_scale_their_loss():
    policy, _, shown = padded()

    def loss(rows: list[int], weights: list[float] | None) -> float:
        fresh = policy.imitation(shown, None, None, np.random.default_rng(0), print)  # pyright: ignore[reportArgumentType]
        return fresh.loss(torch.tensor(rows), None if weights is None else torch.tensor(weights)).item()

    assert loss([0, 1], [1.0, 1.0]) == pytest.approx(loss([0, 1], None))
    assert loss([0, 1], [2.0, 0.0]) != pytest.approx(loss([0, 1], None))
    assert loss([0, 1], [2.0, 0.0]) + loss([0, 1], [0.0, 2.0]) == pytest.approx(2 * loss([0, 1], None))


def test_statistics_go_there_and_back_with_the_policy():
    policy, obs, _ = pocket(kernel="learned", steps=4)
    env = make_env("push_block", task_env("push_block"), 0)
    other = read_policy(policy.meta(), env)
    assert isinstance(other, FlowPolicy) and other.config == policy.config
    other.load_trained_state(policy.trained_state())
    other.show(obs.images, other.draw(env, obs.snapshots))
    assert np.array_equal(other.sample(obs, sampling()).actions, policy.sample(obs, sampling()).actions)
    assert policy.explored(env, 0.0).tolist() == [True] * 6 + [False], "what never changes is not explored"
    for text in ("{}", '{"action": {}}', "[1]", policy.statistics.replace('"mean": [', '"mean": [NaN, ')):
        with pytest.raises(ValueError, match="statistics|mean"):
            other.load_statistics(text)


class TwoModes(VelocityNetwork):
    """The exact velocity of a flow whose actions are -1 or 1, each half of the time."""

    horizon, action_width, value_head = 1, 1, None

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))  # by which its device is found

    def read(self, instructions: Sequence[str]) -> torch.Tensor:
        return torch.zeros(len(instructions), 1, dtype=torch.long)

    def prefix(self, images: torch.Tensor, token_ids: torch.Tensor, proprio: torch.Tensor) -> None: ...

    def velocity(self, cache: None, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        t = t[:, None, None]
        return (x - torch.tanh((1 - t) * x / t**2)) / t


def test_from_noise_it_plays_a_mode_and_greedily_what_lies_between():
    policy = FlowPolicy(TwoModes(), FlowConfig(steps=1), chunk_steps=1, action_size=1)
    policy.own_steps = 50
    unit = Scale(mean=(0.0,), std=(1.0,), q01=(-1.0,), q99=(1.0,), mode="mean_std")
    policy.scales = {"action": unit, "proprio": unit}
    empty, keys = np.zeros((64, 1), np.float32), np.arange(64, dtype=np.float32)[:, None]
    obs = Observations(texts=("go",) * 64, proprio=empty, snapshots=keys)
    policy.show(obs.images, np.zeros((64, 1, 2, 2, 3), np.uint8))
    assert (policy.sample(obs, Sampling()).actions == 0).all()
    noisy = policy.sample(obs, Sampling(from_noise=True)).actions
    assert np.abs(np.abs(noisy) - 1).max() < 0.05 and 0.3 < (noisy > 0).mean() < 0.7
    assert np.array_equal(noisy, policy.sample(obs, Sampling(from_noise=True)).actions), "the same noise each time"


@pytest.mark.parametrize("mode", ["mean_std", "quantiles"])
def test_scales(mode):
    draws = np.random.default_rng(0).normal(size=(1_000, 4))
    values = (draws * [2.0, 0.1, 0.0, 0.0] + [1.0, -2.0, 3.0, 0.0]).astype(np.float32)
    values[5, 3] = 1.0  # changes only now and then
    scale = Scale.measure(values, mode)
    normal = scale.normalised(values)
    assert np.abs(scale.restored(normal) - values).max() < 1e-5
    assert (normal[:, 2] == 0).all() and scale.restored(np.ones((1, 4), np.float32))[0, 2] == pytest.approx(3.0)
    if mode == "mean_std":
        assert normal[:, :2].mean(axis=0) == pytest.approx(0, abs=1e-5) and normal[:, :2].std(axis=0) == pytest.approx(
            1
        )
    else:
        assert np.quantile(normal[:, :2], [0.01, 0.99], axis=0) == pytest.approx(np.array([[-1, -1], [1, 1]]), abs=1e-4)
    assert read_scales(write_scales({"action": scale})) == {"action": scale}


def test_it_learns_offsets_beside():
    """As LIBERO's recipes have it: from demonstrated moments, and from scenes that were never played."""
    shown, env = pocket()[2], make_env("push_block", task_env("push_block"), 0)
    settings = replace(SMALL, predicts_offsets=True)
    policy = build_policy(VLAConfig(head="flow", pocket=settings), env)
    policy.learn_statistics(shown, env)
    prepared = policy.imitation(shown, env, ChunkSFTConfig(scenes=8), np.random.default_rng(0), print)
    prepared.loss(torch.arange(6), None).backward()
    grad = policy.get_parameter("network.offset_head.weight").grad
    assert grad is not None and grad.abs().max() > 0


@pytest.mark.slow
def test_it_learns_demonstrations_by_heart():
    policy, obs, shown = pocket()
    env = make_env("push_block", task_env("push_block"), 0)
    prepared = policy.imitation(shown, env, None, np.random.default_rng(0), print)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    for _ in range(150):
        loss = prepared.loss(torch.arange(6), None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    errors = policy.sample(obs, sampling()).actions - shown.actions
    assert np.abs(errors).mean() < 0.5 * np.abs(shown.actions).mean()
