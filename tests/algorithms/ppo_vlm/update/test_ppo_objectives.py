"""Every objective against its single-file oracle, on one batch that was made once and for all."""

from typing import Any

import numpy as np
import pytest
import torch

from rlvlm.algorithms.ppo_vlm.config import (
    BiLevelConfig,
    GiGPOConfig,
    GRPOConfig,
    HeadConfig,
    ObjectiveConfig,
    RL4VLMConfig,
    TokenPPOConfig,
)
from rlvlm.algorithms.ppo_vlm.update.objectives import Minibatch, Outcome, build_objective
from tests.oracles import ppo_vlm as oracle

T, W, N = 6, 4, 5
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}
WEIGHTED: dict[str, Any] = {"kl_weight": 0.05, "entropy_weight": 0.02}


def stored() -> dict[str, torch.Tensor]:
    """One rollout: fragments with ends and time limits, and single episodes of envs 0 to 3 for the groups."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(1, N + 1, (T, W))
    is_reply = np.arange(N) < lengths[..., None]
    old = -rng.exponential(1.0, (T, W, N))
    columns = {
        "rewards": rng.normal(size=(T, W)),
        "ends": rng.random((T, W)) < 0.3,
        "values": rng.normal(size=(T, W)),
        "next_values": rng.normal(size=(T, W)) * (rng.random((T, W)) < 0.7),
        "token_values": rng.normal(size=(T, W, N)),
        "is_reply": is_reply,
        "is_action": is_reply & (np.arange(N) >= lengths[..., None] - 2),
        "states": rng.integers(0, 3, (T, W)),
        "old": old,
        "now": old + 0.3 * rng.normal(size=(T, W, N)),
        "reference": old + 0.3 * rng.normal(size=(T, W, N)),
        "entropies": rng.exponential(1.0, (T, W, N)),
        "new_values": rng.normal(size=(T, W)),
        "new_token_values": rng.normal(size=(T, W, N)),
    }
    return {name: torch.as_tensor(column) for name, column in columns.items()}


GROUPS = [0, 0, 1, 1]
LENGTHS = [6, 3, 5, 6]
"""Turns of each env's only episode, for objectives with groups."""


def outcome_of(data: dict[str, torch.Tensor], has_groups: bool) -> Outcome:
    live, ends, rewards = torch.ones(T, W, dtype=torch.bool), data["ends"], data["rewards"]
    if has_groups:
        live = torch.arange(T)[:, None] < torch.tensor(LENGTHS)
        ends = torch.arange(T)[:, None] >= torch.tensor(LENGTHS) - 1
        rewards = rewards * live
    return Outcome(
        rewards=rewards, ends=ends, is_live=live, values=data["values"], next_values=data["next_values"],
        token_values=data["token_values"], is_reply=data["is_reply"], states=data["states"],
        groups=torch.tensor(GROUPS),
    )  # fmt: skip


def envs_of(data: dict[str, torch.Tensor], has_groups: bool) -> list[list[dict[str, Any]]]:
    """The same rollout as the oracle takes it."""
    return [
        [
            {
                "reward": data["rewards"][t, w].item(),
                "value": data["values"][t, w].item(),
                "next_value": data["next_values"][t, w].item(),
                "end": data["ends"][t, w].item(),
                "state": data["states"][t, w].item(),
                "token_values": data["token_values"][t, w][data["is_reply"][t, w]].tolist(),
            }
            for t in range(LENGTHS[w] if has_groups else T)
        ]
        for w in range(W)
    ]


def oracle_credit(config: ObjectiveConfig, envs: list[list[dict[str, Any]]]) -> Any:
    match config:
        case RL4VLMConfig() | TokenPPOConfig() | HeadConfig():
            return oracle.turn_critic_credit(envs, config.gamma, config.gae_lambda)
        case BiLevelConfig():
            return oracle.bi_level_credit(
                envs, config.turn_gamma, config.turn_lambda, config.token_gamma, config.token_lambda
            )
        case GRPOConfig():
            return oracle.grpo_credit(envs, GROUPS, config.is_scaled), None
        case GiGPOConfig():
            return oracle.gigpo_credit(envs, GROUPS, config.gamma, config.step_weight, config.is_scaled), None


CONFIGS = [
    RL4VLMConfig(),
    RL4VLMConfig(thought_weight=0.2, largest_ratio=1.3, clip=0.2),
    TokenPPOConfig(),
    TokenPPOConfig(**WEIGHTED),
    BiLevelConfig(token_gamma=0.95, token_lambda=0.9, **WEIGHTED),
    GRPOConfig(group_size=2, **WEIGHTED),
    GRPOConfig(group_size=2, is_scaled=False),
    GiGPOConfig(group_size=2, step_weight=0.7),
    HeadConfig(),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_credit_loss_and_gradient_are_the_oracles(config: ObjectiveConfig):
    data, objective = stored(), build_objective(config)
    has_groups = objective.group_size > 1
    live = outcome_of(data, has_groups).is_live
    credit = objective.credit(outcome_of(data, has_groups))
    wanted, wanted_returns = oracle_credit(config, envs_of(data, has_groups))
    per_token = credit.advantages.ndim == 3
    if per_token:
        assert credit.returns is not None
        order = [(t, w) for w in range(W) for t in range(T)]
        flat = torch.cat([credit.advantages[t, w][data["is_reply"][t, w]] for t, w in order])
        returned = torch.cat([credit.returns[t, w][data["is_reply"][t, w]] for t, w in order])
        torch.testing.assert_close(flat, torch.tensor([x for row in wanted for x in row]).double(), **CLOSE)
        torch.testing.assert_close(returned, torch.tensor([x for row in wanted_returns for x in row]).double(), **CLOSE)
    else:
        for w in range(W):
            mine = credit.advantages[:, w][live[:, w]]
            torch.testing.assert_close(mine, torch.tensor(wanted[w]).double(), **CLOSE)
            if credit.returns is not None:
                torch.testing.assert_close(credit.returns[:, w], torch.tensor(wanted_returns[w]).double(), **CLOSE)

    now = data["now"].clone().requires_grad_()
    values = data["new_token_values" if per_token else "new_values"].clone().requires_grad_()
    chosen = live.nonzero().unbind(1)
    loss = objective.loss(
        Minibatch(
            log_probs=now[chosen],
            old_log_probs=data["old"][chosen],
            is_reply=data["is_reply"][chosen],
            is_action=data["is_action"][chosen],
            advantages=credit.advantages[chosen],
            values=values[chosen],
            old_values=data["token_values" if per_token else "values"][chosen],
            returns=None if credit.returns is None else credit.returns[chosen],
            entropies=data["entropies"][chosen],
            reference=data["reference"][chosen],
        )  # fmt: skip
    )
    (loss.policy + loss.value + loss.rest).backward()

    twin, twin_values = data["now"].clone().requires_grad_(), values.detach().clone().requires_grad_()
    turns = []
    for t, w in zip(*(index.tolist() for index in chosen), strict=True):
        kept = data["is_reply"][t, w]
        turns.append(
            {
                "log_probs": list(twin[t, w][kept]),
                "old": data["old"][t, w][kept].tolist(),
                "action": data["is_action"][t, w][kept].tolist(),
                "reference": data["reference"][t, w][kept].tolist(),
                "entropies": data["entropies"][t, w][kept].tolist(),
                "advantage": wanted[w * T + t] if per_token else wanted[w][t],
                "value": list(twin_values[t, w][kept]) if per_token else twin_values[t, w],
                "old_value": None if per_token else data["values"][t, w].item(),
                "ret": 0.0
                if wanted_returns is None
                else (wanted_returns[w * T + t] if per_token else wanted_returns[w][t]),
            }
        )
    expected = oracle_loss(config, turns)
    expected.backward()
    torch.testing.assert_close((loss.policy + loss.value + loss.rest).detach(), expected.detach(), **CLOSE)
    torch.testing.assert_close(now.grad, twin.grad, **CLOSE)
    if objective.has_critic:
        torch.testing.assert_close(values.grad, twin_values.grad, **CLOSE)
    assert now.grad is not None and now.grad.abs().max() > 1e-3, "a gradient of nothing proves nothing"


def oracle_loss(config: ObjectiveConfig, turns: list[dict[str, Any]]) -> torch.Tensor:
    if isinstance(config, RL4VLMConfig):
        return oracle.rl4vlm_loss(
            turns, config.thought_weight, config.clip, config.value_clip, config.value_weight, config.largest_ratio
        )
    names = ("value_weight", "kl_weight", "entropy_weight")
    return oracle.token_loss(turns, config.clip, **{name: getattr(config, name, 0.0) for name in names})


def test_what_an_objective_needs_is_what_its_config_says():
    plain, full = build_objective(TokenPPOConfig()), build_objective(TokenPPOConfig(**WEIGHTED))
    assert not (plain.needs_reference or plain.needs_entropies)
    assert full.needs_reference and full.needs_entropies
    assert build_objective(GRPOConfig(group_size=4)).group_size == 4
    assert not build_objective(GiGPOConfig()).has_critic
    assert build_objective(BiLevelConfig()).judges_tokens


@pytest.mark.parametrize(
    "wrong", [lambda: GRPOConfig(group_size=1), lambda: TokenPPOConfig(gamma=1.5), lambda: RL4VLMConfig(clip=0)]
)
def test_wrong_settings_are_named(wrong: Any):
    with pytest.raises(ValueError, match=r"algo\.objective\."):
        wrong()
