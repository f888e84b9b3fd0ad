"""Estimators of advantages: by hand, against the single-file oracles, and where nothing must be learned."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from examples import grpo_in_one_file as grpo_oracle
from rlvlm.algorithms.policy_gradient.advantages import (
    ESTIMATORS,
    Trajectories,
    episode_returns,
    estimate,
    estimator,
    find_estimator,
    group_relative,
    turn_gae,
)
from rlvlm.algorithms.policy_gradient.config import AdvantageConfig
from rlvlm.core.errors import NumericsError, UsageError
from tests.oracles import ppo_vlm as oracle

CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}
T, E, N = 6, 4, 5
GROUPS, LENGTHS = torch.tensor([0, 0, 1, 1]), torch.tensor([6, 3, 5, 6])
"""Groups of the four episodes, and their turns where they are compared."""


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def rollout(is_compared: bool) -> Trajectories:
    """Pieces with ends and time limits; or whole episodes, which are compared."""
    rng = np.random.default_rng(7)
    is_token = torch.from_numpy(np.arange(N) < rng.integers(1, N + 1, (T, E))[..., None])
    live, ends = torch.ones(T, E, dtype=torch.bool), torch.from_numpy(rng.random((T, E)) < 0.3)
    if is_compared:
        live, ends = (torch.arange(T)[:, None] < LENGTHS), torch.arange(T)[:, None] >= LENGTHS - 1
    next_values = torch.from_numpy(rng.normal(size=(T, E)) * (rng.random((T, E)) < 0.7))
    return Trajectories(
        rewards=torch.from_numpy(rng.normal(size=(T, E))) * live, ends=ends, is_live=live, groups=GROUPS,
        values=torch.from_numpy(rng.normal(size=(T, E))), next_values=next_values,
        token_values=torch.from_numpy(rng.normal(size=(T, E, N))), is_token=is_token,
        states=torch.from_numpy(rng.integers(0, 3, (T, E))),
    )  # fmt: skip


def as_lists(played: Trajectories) -> list[list[dict[str, Any]]]:
    """The same rollout as the oracle takes it."""
    assert played.token_values is not None and played.is_token is not None and played.states is not None
    return [
        [
            {
                "reward": played.rewards[t, e].item(),
                "value": played.values[t, e].item(),
                "next_value": played.next_values[t, e].item(),
                "end": played.ends[t, e].item(),
                "state": played.states[t, e].item(),
                "token_values": played.token_values[t, e][played.is_token[t, e]].tolist(),
            }
            for t in range(T)
            if played.is_live[t, e]
        ]
        for e in range(E)
    ]


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", ["gae", "bi_level", "grpo", "rloo", "gigpo"])
def test_advantages_and_targets_are_the_oracles(name, scaled):
    config = AdvantageConfig(estimator=name, divide_by_std=scaled, step_weight=0.7, token_gamma=0.95, token_lambda=0.9)
    played = rollout(is_compared=not find_estimator(name).has_critic)
    found, targets = estimate(played, config)
    turns, groups = as_lists(played), GROUPS.tolist()
    if name == "gae":
        wanted, wanted_targets = oracle.turn_critic_credit(turns, config.gamma, config.gae_lambda)
    elif name == "bi_level":
        wanted, wanted_targets = oracle.bi_level_credit(
            turns, config.gamma, config.gae_lambda, config.token_gamma, config.token_lambda
        )
    elif name == "gigpo":
        wanted, wanted_targets = oracle.gigpo_credit(turns, groups, config.gamma, config.step_weight, scaled), None
    else:  # one score for all turns of an episode
        returns = [sum(turn["reward"] for turn in episode) for episode in turns]
        baseline = "mean" if name == "grpo" else "leave_one_out"
        pairs = [grpo_oracle.advantages(returns[i : i + 2], baseline, scaled and name == "grpo") for i in (0, 2)]
        wanted, wanted_targets = [[score] * int(n) for score, n in zip(sum(pairs, []), LENGTHS, strict=True)], None
    for e in range(E):
        if name == "bi_level":
            assert played.is_token is not None and targets is not None and wanted_targets is not None
            own = torch.cat([found[t, e][played.is_token[t, e]] for t in range(T)])
            kept = torch.cat([targets[t, e][played.is_token[t, e]] for t in range(T)])
            flat = torch.tensor([x for row in wanted_targets[e * T : e * T + T] for x in row]).double()
            torch.testing.assert_close(kept, flat, **CLOSE)
            expected = torch.tensor([x for row in wanted[e * T : e * T + T] for x in row]).double()
        else:
            own, expected = found[:, e][played.is_live[:, e]], torch.tensor(wanted[e]).double()
            if targets is not None:
                assert wanted_targets is not None
                torch.testing.assert_close(targets[:, e], torch.tensor(wanted_targets[e]).double(), **CLOSE)
        if scaled or wanted_targets is None:  # the oracle standardises what a critic gave
            torch.testing.assert_close(own, expected, **CLOSE)
    assert (targets is None) == (wanted_targets is None)


def test_two_turns_by_hand():
    # gamma .9, lambda .5. Turn 2 ends for good: 1 - 0.4 = 0.6. Turn 1: 0 + .9 * .4 - .2 = 0.16, and .45 * .6 ahead.
    gae = turn_gae(column(0, 1), column(0.2, 0.4), column(0.4, 0), column(0, 1).bool(), 0.9, 0.5)
    assert gae[:, 0].tolist() == pytest.approx([0.16 + 0.27, 0.6])


def test_tokens_of_an_episode_are_one_sequence():
    """With one token a turn it is GAE over turns; by hand, the second turn's reward reaches the first one's tokens."""
    played = rollout(is_compared=False)
    assert played.is_token is not None and played.token_values is not None
    single = torch.zeros_like(played.is_token)
    single[..., 0] = True
    alike = replace(played, is_token=single, values=played.token_values[..., 0])
    raw = {name: ESTIMATORS[name].compute(alike, AdvantageConfig()) for name in ("gae", "gae_tokens")}
    torch.testing.assert_close(raw["gae_tokens"][..., 0], raw["gae"], **CLOSE)
    two = Trajectories(
        rewards=column(0, 1), ends=column(0, 1).bool(), is_live=column(1, 1).bool(), groups=torch.zeros(1),
        values=column(0, 0), next_values=column(0.5, 0), token_values=torch.tensor([[[0.2, 0.4]], [[0.5, 0.0]]]),
        is_token=torch.tensor([[[True, True]], [[True, False]]]),
    )  # fmt: skip
    config = AdvantageConfig(gamma=0.8, gae_lambda=0.5, token_lambda=0.5)
    # Turn 2: 1 - .5 = .5. Turn 1: last .8 * .5 - .4 = 0, and .4 * .5 ahead; first .4 - .2, and .5 * .2 ahead.
    found = ESTIMATORS["gae_tokens"].compute(two, config)
    assert found.flatten().tolist() == pytest.approx([0.3, 0.2, 0.5, 0.0])


@pytest.mark.parametrize(
    ("wins", "success", "failure"), [(1, 2.475, -0.354), (2, 1.620, -0.540), (4, 0.935, -0.935), (7, 0.354, -2.475)]
)
def test_eight_episodes_by_hand(wins, success, failure):
    # One of eight: mean 1/8, unbiased variance (49/64 + 7/64) / 7 = 1/8; (1 - 1/8) / sqrt(1/8) = 2.475.
    found = group_relative(torch.tensor([1.0] * wins + [0.0] * (8 - wins)), torch.zeros(8), True)
    assert found.tolist() == pytest.approx([success] * wins + [failure] * (8 - wins), abs=1e-3)
    other = group_relative(torch.tensor([1.0, 0, 0, 0]), torch.zeros(4), False, leaves_one_out=True)
    assert other.tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_scores_are_compared_within_their_key_and_in_no_unit():
    scores, keys = torch.tensor([1.0, 3.0, 10.0]), torch.tensor([5, 5, 6])
    assert group_relative(scores, keys, False).tolist() == [-1, 1, 0]
    assert group_relative(scores, keys, True, correction=0).tolist() == pytest.approx([-1, 1, 0], abs=1e-5)
    some = torch.rand(32, generator=torch.Generator().manual_seed(0))
    plain, scaled = (group_relative(factor * some, torch.arange(32) // 8, True) for factor in (1, 5))
    torch.testing.assert_close(plain, scaled, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gigpo"])
@pytest.mark.parametrize("scaled", [True, False])
def test_equal_episodes_teach_exactly_nothing(name, scaled):
    rng, config = np.random.default_rng(0), AdvantageConfig(estimator=name, divide_by_std=scaled, gamma=1.0)
    for value in (*rng.normal(scale=10, size=20), 0.1, 1 / 3, 1e4, 16_777_217.0):
        parts = rng.normal(scale=abs(value), size=4).astype(np.float32)
        shuffled = np.stack([rng.permutation(parts) for _ in range(7)], axis=1)  # seven episodes of the same rewards
        alike = np.full((1, 7), value, np.float32)
        for rewards in (alike, shuffled):
            grid = torch.from_numpy(rewards)
            live = torch.ones_like(grid, dtype=torch.bool)
            states = torch.arange(grid.numel()).view_as(grid) if len(grid) > 1 else torch.zeros_like(grid).long()
            played = Trajectories(
                rewards=grid, ends=torch.arange(len(grid))[:, None].expand_as(grid) == len(grid) - 1, is_live=live,
                groups=torch.zeros(7).long(), values=grid * 0, next_values=grid * 0, states=states,
            )  # fmt: skip
            assert not estimate(played, config)[0].any(), (name, value)


def test_turns_are_compared_only_within_group_and_state():
    # Episodes 0 and 1 are a group and start in state 0; episode 2 is alone in its group.
    played = Trajectories(
        rewards=torch.tensor([[0.0, 0.0, 5.0], [1.0, 0.0, 0.0]]),
        ends=torch.tensor([[False, False, True], [True, True, True]]), is_live=torch.ones(2, 3, dtype=torch.bool),
        states=torch.tensor([[0, 0, 0], [1, 2, 0]]), groups=torch.tensor([0, 0, 1]),
        values=torch.zeros(2, 3), next_values=torch.zeros(2, 3),
    )  # fmt: skip
    config = AdvantageConfig(estimator="gigpo", gamma=0.5, divide_by_std=False)
    episodes = torch.tensor([0.5, -0.5, 0.0])
    turns = estimate(played, config)[0] - episodes
    assert turns.tolist() == [[0.25, -0.25, 2.5], [0, 0, -2.5]]


def test_gains_of_a_growing_score_are_credited_to_their_turns():
    """A judge scores three episodes of one group so far after each turn; the third is over after its second turn.

    scores .2 .5 .9   rewards .2 .3 .4   returns to go .9 .7 .4
           .4 .4 .5           .4  0 .1                 .5 .1 .1
           .1 .7              .1 .6                    .7 .6
    """
    scores = torch.tensor([[0.2, 0.4, 0.1], [0.5, 0.4, 0.7], [0.9, 0.5, 0.7]])
    live = torch.tensor([[True] * 3, [True] * 3, [True, True, False]])
    played = Trajectories(
        rewards=scores.diff(dim=0, prepend=torch.zeros(1, 3)) * live, is_live=live,
        ends=torch.tensor([[False] * 3, [False, False, True], [True] * 3]), groups=torch.zeros(3, dtype=torch.int64),
        values=torch.zeros(3, 3), next_values=torch.zeros(3, 3),
    )  # fmt: skip

    def found(name: str, is_scaled: bool = False) -> Tensor:
        return estimate(played, AdvantageConfig(estimator=name, gamma=1.0, divide_by_std=is_scaled))[0]

    grpo = [[0.2, -0.2, 0.0], [0.7 - 1.4 / 3, 0.1 - 1.4 / 3, 0.6 - 1.4 / 3], [0.15, -0.15, 0.0]]
    rloo = [[0.3, -0.3, 0.0], [0.7 - 0.35, 0.1 - 0.65, 0.6 - 0.4], [0.3, -0.3, 0.0]]
    torch.testing.assert_close(found("grpo_turns"), torch.tensor(grpo), **CLOSE)
    torch.testing.assert_close(found("rloo_turns"), torch.tensor(rloo), **CLOSE)
    torch.testing.assert_close(found("grpo_turns", True)[0], torch.tensor([1.0, -1.0, 0.0]), **CLOSE)
    # the other presets: the last scores alone, as when the judge is asked once an episode
    once = replace(
        played, rewards=torch.stack([torch.zeros(3), torch.tensor([0.0, 0.0, 0.7]), torch.tensor([0.9, 0.5, 0])])
    )
    for name in ("grpo", "rloo"):
        assert torch.equal(found(name), estimate(once, AdvantageConfig(estimator=name, divide_by_std=False))[0])
        assert find_estimator(name).is_per_episode and not find_estimator(f"{name}_turns").is_per_episode


def test_a_users_own_estimator_is_one_function():
    @estimator("lowest", "groups")
    def lowest(played: Trajectories, config: AdvantageConfig) -> Tensor:
        returns = episode_returns(played.rewards)
        return (returns - returns.min()).expand_as(played.rewards) * played.is_live

    try:
        found, targets = estimate(rollout(is_compared=True), AdvantageConfig(estimator="lowest"))
        assert found.min() == 0 and targets is None
    finally:
        del ESTIMATORS["lowest"]
    with pytest.raises(UsageError, match=r"there is no algo.advantage.estimator 'lowest'") as caught:
        find_estimator("lowest")
    assert "gae" in caught.value.fix and "my_file:FUNCTION" in caught.value.fix


OWN = """
import torch
from rlvlm.algorithms.policy_gradient.advantages import estimator

@estimator("a name", "groups")
def named(played, config):
    return played.rewards * 2

@estimator("flat")
def flat(played, config):
    return played.rewards.sum(0)

@estimator("nowhere")
def nowhere(played, config):
    return played.rewards / 0

def bare(played, config):
    return played.rewards
"""


def test_mistakes_in_a_users_estimator_are_named(tmp_path):
    file = tmp_path / "own_estimators.py"
    file.write_text(OWN)
    played = rollout(is_compared=True)
    try:
        found, _ = estimate(played, AdvantageConfig(estimator=f"{file}:named"))
        assert torch.equal(found, 2 * played.rewards), "it goes by its function, whatever it was registered as"
        with pytest.raises(UsageError, match=r"gave \[4\], not \[6, 4\]"):
            estimate(played, AdvantageConfig(estimator=f"{file}:flat"))
        with pytest.raises(NumericsError, match="gave advantages that are not finite"):
            estimate(played, AdvantageConfig(estimator=f"{file}:nowhere"))
        with pytest.raises(UsageError, match="nothing has registered it") as caught:
            find_estimator(f"{file}:bare")
        assert "@estimator" in caught.value.fix
    finally:
        for name in ("a name", "flat", "nowhere"):
            ESTIMATORS.pop(name, None)
    with pytest.raises(ValueError, match="needs group; there are groups, states, token_values, values"):
        estimator("mistyped", "group")
