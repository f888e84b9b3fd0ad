"""What an update descends: by hand, and value and gradient against the single-file oracles."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from examples import grpo_in_one_file as grpo_oracle
from rlvlm.algorithms.policy_gradient.config import Averaging, LossConfig
from rlvlm.algorithms.policy_gradient.losses import (
    POLICY_LOSSES,
    MiniBatch,
    PolicyLoss,
    james_stein_share,
    k3,
    surrogate_gain,
    token_weights,
    total_loss,
    truncated_importance,
    value_loss,
)
from rlvlm.core.errors import UsageError
from tests.oracles import ppo_vlm as oracle

CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}
B, N = 9, 6
STEPS, EPISODES = torch.tensor([3, 3, 1, 2, 3, 3, 3, 1, 3]), torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3])
"""Of the nine chunks of four episodes: env steps that were run, of three with two tokens each."""


def columns(seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.0, (B, N))
    found: dict[str, Any] = {
        "old": old, "now": old + 0.3 * rng.normal(size=(B, N)), "reference": old + 0.3 * rng.normal(size=(B, N)),
        "entropies": rng.exponential(1.0, (B, N)), "advantages": rng.normal(size=B), "returns": rng.normal(size=B),
        "token_advantages": rng.normal(size=(B, N)), "token_returns": rng.normal(size=(B, N)),
        "values": rng.normal(size=B), "token_values": rng.normal(size=(B, N)), "old_values": rng.normal(size=B),
        "is_token": np.arange(N) < rng.integers(2, N + 1, B)[:, None],
    }  # fmt: skip
    found["is_action"] = found["is_token"] & (np.arange(N) >= found["is_token"].sum(1, keepdims=True) - 2)
    return {name: torch.as_tensor(value) for name, value in found.items()}


REPLIES = [
    LossConfig(),
    LossConfig(kl_weight=0.05, entropy_weight=0.02),
    LossConfig(policy="guarded", ratio="weighted", clip_low=0.1, clip_high=0.1, value_clip=0.1),
    LossConfig(policy="guarded", ratio="weighted", thought_weight=0.2, max_ratio=1.3, value_clip=0.1),
]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("config", REPLIES)
def test_of_replies_loss_and_gradient_are_the_oracles(config, per_token):
    if per_token and config.ratio == "weighted":
        return  # a reply with one ratio has one advantage
    data, kind = columns(seed=3), "token_" if per_token else ""
    now, values = data["now"].clone().requires_grad_(), data[f"{kind}values"].clone().requires_grad_()
    weights = token_weights(data["is_token"], torch.zeros(B).long(), 1, "turn").double()
    policy, value, rest, *_ = total_loss(
        config, MiniBatch(log_probs=now, old_log_probs=data["old"], weights=weights, is_action=data["is_action"],
        advantages=data[f"{kind}advantages"], values=values,
        old_values=data["token_values"] if per_token else data["old_values"], returns=data[f"{kind}returns"],
        entropies=data["entropies"], reference=data["reference"] if config.kl_weight else None),
    )  # fmt: skip
    loss = policy + value + rest
    loss.backward()

    twin, twin_values = data["now"].clone().requires_grad_(), values.detach().clone().requires_grad_()
    turns = []
    for row in range(B):
        kept = data["is_token"][row]
        turns.append(
            {
                "log_probs": list(twin[row][kept]),
                "old": data["old"][row][kept].tolist(),
                "action": data["is_action"][row][kept].tolist(),
                "reference": data["reference"][row][kept].tolist(),
                "entropies": data["entropies"][row][kept].tolist(),
                "advantage": data[f"{kind}advantages"][row][kept].tolist()
                if per_token
                else data["advantages"][row].item(),
                "value": list(twin_values[row][kept]) if per_token else twin_values[row],
                "old_value": data["old_values"][row].item(),
                "ret": data[f"{kind}returns"][row][kept].tolist() if per_token else data["returns"][row].item(),
            }
        )  # fmt: skip
    if config.ratio == "weighted":
        expected = oracle.rl4vlm_loss(
            turns, config.thought_weight, config.clip_low, config.value_clip, config.value_weight, config.max_ratio
        )
    else:
        expected = oracle.token_loss(turns, 0.2, config.value_weight, config.kl_weight, config.entropy_weight)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), **CLOSE)
    torch.testing.assert_close(now.grad, twin.grad, **CLOSE)
    torch.testing.assert_close(values.grad, twin_values.grad, **CLOSE)
    assert now.grad is not None and now.grad.abs().max() > 1e-3, "a gradient of nothing proves nothing"


@pytest.mark.parametrize(
    ("ratio", "average", "dual_clip", "kl_weight"),
    list(
        itertools.product(["token", "action", "answer"], ["trajectory", "token", "constant"], [None, 1.5], [0.0, 0.1])
    ),
)
def test_of_chunks_loss_and_gradient_are_the_oracles(ratio, average, dual_clip, kl_weight):
    data, episodes = columns(seed=4), EPISODES
    config = LossConfig(ratio=ratio, average=average, dual_clip=dual_clip, kl_weight=kl_weight, clip_high=0.28)
    ours, theirs = (data["now"].clone().requires_grad_() for _ in range(2))
    is_run = (torch.arange(3) < STEPS[:, None]).repeat_interleave(2, dim=1)
    weights = token_weights(is_run, episodes, 4, average, action_size=2, longest_steps=11).double()
    advantages = data["advantages"][:4][episodes]

    def part(rows: slice) -> Tensor:
        policy, _, rest, *_ = total_loss(
            config, MiniBatch(log_probs=ours[rows], old_log_probs=data["old"][rows], weights=weights[rows],
            is_action=is_run[rows], advantages=advantages[rows], action_size=2,
            reference=data["reference"][rows] if kl_weight else None),
        )  # fmt: skip
        return policy + rest

    chunks = [
        {"steps": int(STEPS[row]), "new": theirs[row], "old": data["old"][row], "reference": data["reference"][row]}
        for row in range(B)
    ]
    batch = [
        {"advantage": float(data["advantages"][e]), "chunks": [chunks[row] for row in range(B) if episodes[row] == e]}
        for e in range(4)
    ]
    expected = grpo_oracle.loss(
        batch, action_size=2, ratio=ratio, average=average, dual_clip=dual_clip, kl_weight=kl_weight,
        longest_steps=11, exp=torch.exp,
    )  # fmt: skip
    whole = part(slice(None))
    assert whole.item() == pytest.approx(expected.item(), abs=1e-6)
    assert (part(slice(0, 2)) + part(slice(2, None))).item() == pytest.approx(whole.item(), abs=1e-7), "they add up"
    whole.backward()
    expected.backward()
    assert ours.grad is not None and theirs.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)


def surrogate(ratios: list[float], advantage: float, name: str = "clipped", **settings: Any) -> list[float]:
    now, ones = torch.tensor([ratios]).log(), torch.ones(1, len(ratios))
    batch = MiniBatch(
        log_probs=now, old_log_probs=0 * ones, weights=ones, is_action=ones > 0, advantages=torch.tensor([advantage])
    )
    loss, _ = POLICY_LOSSES[name].compute(batch, LossConfig(**settings))
    return loss[0].tolist()


def test_clips_by_hand():
    ratios, wide = [0.5, 0.9, 1.2, 2.0], {"clip_high": 0.28}
    assert surrogate(ratios, 1.0, **wide) == pytest.approx([-0.5, -0.9, -1.2, -1.28]), "nothing is gained beyond 1.28"
    assert surrogate(ratios, -1.0, **wide) == pytest.approx([0.8, 0.9, 1.2, 2.0]), "nothing is gained below 0.8"
    assert surrogate([5.0], -1.0, dual_clip=3.0) == pytest.approx([3.0])
    assert surrogate([20.0, 1.5], -2.0, "guarded") == pytest.approx([2.4, 2.4]), "a huge one leaves the clipped term"
    assert surrogate([1.5], -2.0, "guarded") == pytest.approx([3.0])
    assert math.isfinite(surrogate([math.exp(80.0)], -1.0)[0])


def test_weights_by_hand():
    # Two episodes: one of 3 + 1 = 4 steps in two chunks, one of 2 steps in one; two tokens a step.
    is_run = (torch.arange(3) < torch.tensor([3, 1, 2])[:, None]).repeat_interleave(2, dim=1)

    def weights(average: Averaging) -> list[float]:
        rows = token_weights(is_run, torch.tensor([0, 0, 1]), 2, average, action_size=2, longest_steps=10)
        assert not rows[~is_run].any()
        return rows[:, 0].tolist()

    assert weights("trajectory") == pytest.approx([1 / 16, 1 / 16, 1 / 8])  # half for each episode, over its tokens
    assert weights("token") == pytest.approx([1 / 12] * 3)  # 6 steps of two tokens
    assert weights("constant") == pytest.approx([1 / 40] * 3)  # 10 steps of two tokens, two episodes
    assert weights("turn") == pytest.approx([1 / 3] * 3)


def test_divergence_and_critics_error_by_hand():
    assert k3(torch.tensor(-1.0), torch.tensor(-2.0)).item() == pytest.approx(math.exp(-1) - 1 + 1)
    assert k3(torch.tensor(-1.0), torch.tensor(-1.0)).item() == 0
    assert (k3(torch.linspace(-3, 0, 50), torch.linspace(0, -3, 50)) >= 0).all()
    # Value 1 from 0 with clip .1, return 2: plain .5, near .1 -> 1.9**2 / 2. Return 1: plain 0, near .9**2 / 2.
    loss = value_loss(torch.ones(2), torch.zeros(2), torch.tensor([2.0, 1.0]), 0.1)
    assert loss.tolist() == pytest.approx([1.805, 0.405])


def test_a_gain_by_hand_in_which_no_token_decides_alone():
    # Ratio 1.1 and advantage 2: .2. Ratio 10 counts as 1.2, advantage -1: -.2. Padding does not count.
    log_ratio = torch.tensor([[1.1, 1.0, 7.0], [10.0, 1.0, 1.0]]).log()
    is_token = torch.tensor([[True, True, False], [True, True, True]])
    gains = surrogate_gain(log_ratio, torch.tensor([[2.0], [-1.0]]), is_token, 0.2)
    assert gains.tolist() == pytest.approx([0.2, -0.2])


@pytest.mark.parametrize(
    ("gains", "kept"), [([1, 3], 0.75), ([-1, 1], 0), ([-2, -2.1], 0), ([0, 0, 0], 0), ([1, 1, 1], 1), ([-5], 1)]
)
def test_the_james_stein_share_by_hand(gains, kept):
    # Gains 1 and 3: mean 2, standard error 1, so a quarter may be chance; one gain alone says nothing.
    assert james_stein_share(torch.tensor(gains, dtype=torch.float32)) == pytest.approx(kept)


def test_a_loss_without_what_it_needs_is_refused():
    rows = torch.ones(1, 2)
    batch: dict[str, Any] = dict.fromkeys(("log_probs", "old_log_probs", "weights"), rows)
    batch |= {"is_action": rows > 0, "advantages": rows[0, :1]}
    with pytest.raises(ValueError, match="reference"):
        total_loss(LossConfig(kl_weight=1.0), MiniBatch(**batch))
    with pytest.raises(UsageError, match="no algo.loss.policy 'linear'"):
        total_loss(LossConfig(policy="linear"), MiniBatch(**batch))
    with pytest.raises(UsageError, match="this policy gives no entropies"):
        total_loss(LossConfig(entropy_weight=0.1), MiniBatch(**batch))


BAD_LOSSES: dict[str, tuple[Any, str]] = {
    "no metrics": (lambda batch, config: batch.log_probs, "gave a Tensor, and no loss with metrics"),
    "another shape": (lambda batch, config: (batch.log_probs.sum(0), {}), r"gave a loss of shape \[2\]"),
    "metrics that are columns": (lambda batch, config: (batch.log_probs, {"a": batch.weights}), r".* \{'a'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_a_users_own_loss_with_a_wrong_result_is_refused(name, monkeypatch):
    compute, said = BAD_LOSSES[name]
    monkeypatch.setitem(POLICY_LOSSES, "own", PolicyLoss(compute))
    rows = torch.ones(3, 2)
    batch = MiniBatch(log_probs=rows, old_log_probs=rows, weights=rows, is_action=rows > 0, advantages=rows[:, 0])
    with pytest.raises(UsageError, match=f"algo.loss.policy own {said}"):
        total_loss(LossConfig(policy="own"), batch)


def expected_gradient(config: LossConfig, trainer: Tensor, engine: Tensor, advantages: Tensor) -> Tensor:
    """Of the loss with respect to the trainer's logits, over all single-token answers that the engine may give."""
    logits = trainer.clone().requires_grad_()
    now, sampled_by = logits.log_softmax(0)[:, None], engine.log_softmax(0)[:, None]
    old, weights = sampled_by, sampled_by.exp()  # each answer weighs as often as it comes
    if config.correction in ("token", "sequence"):
        old = now.detach()
        weights = weights * truncated_importance(old, sampled_by, torch.ones_like(old, dtype=torch.bool), config)
    policy, *_ = total_loss(
        config,
        MiniBatch(
            log_probs=now,
            old_log_probs=old,
            weights=weights,
            is_action=torch.ones_like(old, dtype=torch.bool),
            advantages=advantages,
        ),
    )
    policy.backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("correction", ["token", "sequence"])
def test_an_engine_that_differs_is_learned_from_as_if_it_did_not(correction):
    """The policy gradient itself, where no weight is cut off; clipping from the engine's ratio misses it."""
    trainer, engine = torch.tensor([0.0, 1.0, -0.5, 0.3]), torch.tensor([0.6, 0.2, 0.1, 0.0])
    advantages = torch.tensor([1.0, 2.0, -1.0, 0.5])
    odds = trainer.softmax(0)
    truth = -odds * (advantages - (odds * advantages).sum())
    corrected = LossConfig(correction=correction, correction_cap=10.0)
    torch.testing.assert_close(expected_gradient(corrected, trainer, engine, advantages), truth, **CLOSE)
    torch.testing.assert_close(expected_gradient(LossConfig(), trainer, trainer, advantages), truth, **CLOSE)
    without = expected_gradient(LossConfig(), trainer, engine, advantages)
    assert (without - truth).abs().max() > 0.1, "the best answer is clipped before anything was learned"


def test_importance_weights_by_hand():
    trainer = torch.log(torch.tensor([[0.5, 0.2], [0.9, 0.5]]))
    engine = torch.log(torch.tensor([[0.25, 0.4], [0.1, 0.5]]))
    is_token = torch.tensor([[True, True], [True, False]])
    by_token = truncated_importance(trainer, engine, is_token, LossConfig(correction="token", correction_cap=3.0))
    torch.testing.assert_close(by_token, torch.tensor([[2.0, 0.5], [3.0, 1.0]]), **CLOSE)
    whole = truncated_importance(trainer, engine, is_token, LossConfig(correction="sequence", correction_cap=3.0))
    torch.testing.assert_close(whole, torch.tensor([[1.0, 1.0], [3.0, 1.0]]), **CLOSE)
    masked = LossConfig(correction="token", correction_cap=3.0, beyond_cap="mask")
    kept = truncated_importance(trainer, engine, is_token, masked)
    torch.testing.assert_close(kept, torch.tensor([[2.0, 0.5], [0.0, 1.0]]), **CLOSE)
    with pytest.raises(ValueError, match="correction_cap"):
        LossConfig(correction="token", correction_cap=0.5)
