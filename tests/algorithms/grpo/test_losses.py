"""The update's maths: masks, weights, ratios, clips and KL, against cases by hand and the oracle."""

import itertools
import math

import numpy as np
import pytest
import torch
from oracles import grpo as oracle

from rlvlm.algorithms.grpo.config import Averaging, Granularity, LossConfig
from rlvlm.algorithms.grpo.losses import (
    clipped_loss,
    kl_k3,
    log_ratios,
    step_mask,
    token_weights,
    update_loss,
)

L, D = 3, 2


def test_by_hand_clips() -> None:
    config = LossConfig(clip_low=0.2, clip_high=0.28)
    ratios = torch.tensor([[0.5, 0.9, 1.2, 2.0]]).log()
    good = clipped_loss(ratios, torch.tensor([1.0]), config)
    bad = clipped_loss(ratios, torch.tensor([-1.0]), config)
    assert good[0].tolist() == pytest.approx([-0.5, -0.9, -1.2, -1.28])  # nothing is gained beyond 1.28
    assert bad[0].tolist() == pytest.approx([0.8, 0.9, 1.2, 2.0])  # nothing is gained below 0.8
    dual = clipped_loss(torch.tensor([[5.0]]).log(), torch.tensor([-1.0]), LossConfig(dual_clip=3.0))
    assert dual.item() == pytest.approx(3.0)


def test_steps_are_counted_up_to_and_including_the_one_that_ended_the_episode() -> None:
    assert step_mask(torch.tensor([3, 1, 0]), L).tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]


def test_by_hand_weights() -> None:
    # Two episodes: one of 3 + 1 = 4 steps in two chunks, one of 2 steps in one; two tokens a step.
    steps, episodes = torch.tensor([3, 1, 2]), torch.tensor([0, 0, 1])

    def weights(average: Averaging) -> list[list[float]]:
        found = token_weights(
            steps,
            episodes,
            2,
            chunk_steps=L,
            action_size=D,
            average=average,
            longest_steps=10,
        )
        return found.tolist()

    e = 1 / 16  # half a weight for each episode, over 4 * 2 tokens
    assert weights("trajectory") == [[e] * 6, [e] * 2 + [0] * 4, [pytest.approx(1 / 8)] * 4 + [0] * 2]
    t = pytest.approx(1 / 12)  # 6 steps of two tokens
    assert weights("token") == [[t] * 6, [t] * 2 + [0] * 4, [t] * 4 + [0] * 2]
    c = pytest.approx(1 / 40)  # 10 steps of two tokens, two episodes
    assert weights("constant") == [[c] * 6, [c] * 2 + [0] * 4, [c] * 4 + [0] * 2]


def test_by_hand_ratios_multiply_over_an_action_or_a_chunk_and_skip_what_was_not_run() -> None:
    new = torch.tensor([[0.1, 0.2, 0.4, 0.8, 9.0, 9.0]])
    mask = torch.tensor([[1.0, 1, 1, 1, 0, 0]])
    zero = torch.zeros_like(new)
    assert log_ratios(new, zero, mask, "token", D)[0].tolist() == pytest.approx([0.1, 0.2, 0.4, 0.8, 0, 0])
    assert log_ratios(new, zero, mask, "action", D)[0].tolist() == pytest.approx([0.3, 0.3, 1.2, 1.2, 0, 0])
    assert log_ratios(new, zero, mask, "chunk", D)[0].tolist() == pytest.approx([1.5] * 4 + [0, 0])


def test_kl_is_zero_for_equals_and_positive_else() -> None:
    p = torch.tensor([0.3, 0.7]).log()
    q = torch.tensor([0.6, 0.4]).log()
    assert kl_k3(p, p).abs().max() == 0
    assert kl_k3(p, q).min() > 0
    exact = (p.exp() * (p - q)).sum()
    assert (p.exp() * kl_k3(p, q)).sum().item() == pytest.approx(exact.item())  # its mean under p is the divergence


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Chunks of 4 episodes with 1 to 3 chunks each, the last one cut short."""
    rng = np.random.default_rng(seed)
    steps, episodes = [], []
    for episode in range(4):
        length = int(rng.integers(1, 4))
        steps += [L] * (length - 1) + [int(rng.integers(1, L + 1))]
        episodes += [episode] * length
    shape = (len(steps), L * D)
    columns = {name: torch.from_numpy(rng.normal(-1, 0.4, shape)) for name in ("new", "old", "reference")}
    advantages = torch.from_numpy(rng.normal(size=4))
    return {"steps": torch.tensor(steps), "episodes": torch.tensor(episodes), "advantages": advantages} | columns


@pytest.mark.parametrize(
    ("ratio", "average", "dual_clip", "kl_weight"),
    list(itertools.product(["token", "action", "chunk"], ["trajectory", "token", "constant"], [None, 1.5], [0.0, 0.1])),
)
def test_loss_and_gradient_equal_the_oracle(
    ratio: Granularity, average: Averaging, dual_clip: float | None, kl_weight: float
) -> None:
    data = batch(seed=3)
    config = LossConfig(ratio=ratio, average=average, dual_clip=dual_clip, kl_weight=kl_weight)  # pyright: ignore[reportArgumentType]
    ours = data["new"].clone().requires_grad_()
    weights = token_weights(
        data["steps"], data["episodes"], 4, chunk_steps=L, action_size=D, average=config.average, longest_steps=11
    ).double()
    advantages = data["advantages"][data["episodes"]]
    mine = update_loss(ours, data["old"], advantages, weights, config, D, data["reference"] if kl_weight else None)
    theirs = data["new"].clone().requires_grad_()
    episodes = [
        {
            "advantage": float(data["advantages"][episode]),
            "chunks": [
                {
                    "steps": int(data["steps"][row]),
                    "new": theirs[row],
                    "old": data["old"][row],
                    "reference": data["reference"][row],
                }
                for row in np.flatnonzero(data["episodes"].numpy() == episode)
            ],
        }
        for episode in range(4)
    ]
    expected = oracle.loss(
        episodes,
        action_size=D,
        ratio=ratio,
        average=average,
        dual_clip=dual_clip,
        kl_weight=kl_weight,
        longest_steps=11,
        exp=torch.exp,
    )
    assert mine.item() == pytest.approx(expected.item(), abs=1e-6)
    mine.backward()
    expected.backward()
    assert ours.grad is not None and theirs.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)


def test_minibatches_of_an_update_add_up_to_its_loss() -> None:
    data = batch(seed=4)
    config = LossConfig()
    weights = token_weights(
        data["steps"], data["episodes"], 4, chunk_steps=L, action_size=D, average="trajectory", longest_steps=11
    )
    advantages = data["advantages"][data["episodes"]]

    def part(rows: slice) -> float:
        return update_loss(data["new"][rows], data["old"][rows], advantages[rows], weights[rows], config, D).item()

    assert part(slice(0, 2)) + part(slice(2, None)) == pytest.approx(part(slice(None)), abs=1e-7)


def test_impossible_settings_are_refused() -> None:
    for wrong in ({"clip_low": 1.0}, {"clip_high": 0.0}, {"dual_clip": 1.0}, {"kl_weight": -0.1}):
        with pytest.raises(ValueError, match=str(next(iter(wrong)))):
            LossConfig(**wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="reference"):
        update_loss(
            torch.zeros(1, 6), torch.zeros(1, 6), torch.zeros(1), torch.ones(1, 6), LossConfig(kl_weight=1.0), D
        )
    assert math.isfinite(
        update_loss(torch.zeros(1, 6), torch.zeros(1, 6), torch.zeros(1), torch.ones(1, 6), LossConfig(), D)
    )
