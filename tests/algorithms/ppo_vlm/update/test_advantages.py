import pytest
import torch

from rlvlm.algorithms.ppo_vlm.update.advantages import (
    episode_advantages,
    group_relative,
    returns_to_go,
    state_advantages,
    token_gae,
    turn_gae,
    whiten,
)


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def test_two_turns_by_hand():
    # gamma .9, lambda .5. Turn 2 ends for good: 1 - 0.4 = 0.6. Turn 1: 0 + .9 * .4 - .2 = 0.16, and .45 * .6 ahead.
    gae = turn_gae(column(0, 1), column(0.2, 0.4), column(0.4, 0), column(0, 1).bool(), 0.9, 0.5)
    assert gae[:, 0].tolist() == pytest.approx([0.16 + 0.27, 0.6])


def test_a_time_limit_is_bootstrapped_and_an_end_is_not():
    cut, over = (turn_gae(column(0), column(0), column(v), column(1).bool(), 0.9, 0.95).item() for v in (2.0, 0.0))
    assert (cut, over) == (pytest.approx(1.8), 0)


def test_nothing_leaks_across_an_episodes_end():
    ends, quiet = column(0, 1, 0).bool(), column(0, 0, 0)
    gae = turn_gae(column(0, 0, 7), quiet, quiet, ends, 1.0, 1.0)
    assert gae[:, 0].tolist() == [0, 0, 7]


def test_a_reply_of_two_tokens_by_hand():
    # The turn is worth 1; values .5 and .8. Last token: 1 - .8 = .2; first: .8 - .5 = .3, and .5 * .2 ahead.
    is_reply = torch.tensor([[True, True, False]])
    gae = token_gae(torch.tensor([1.0]), torch.tensor([[0.5, 0.8, 9.0]]), is_reply, 1.0, 0.5)
    assert gae[0].tolist() == pytest.approx([0.4, 0.2, 0.0])


def test_returns_to_go_stop_at_ends():
    assert returns_to_go(column(1, 2, 4), column(0, 1, 0).bool(), 0.5)[:, 0].tolist() == [2, 2, 4]


def test_scores_are_compared_within_their_key():
    scores, keys = torch.tensor([1.0, 3.0, 10.0]), torch.tensor([5, 5, 6])
    assert group_relative(scores, keys, is_scaled=False).tolist() == [-1, 1, 0]
    assert group_relative(scores, keys, is_scaled=True).tolist() == pytest.approx([-1, 1, 0], abs=1e-5)


def test_a_group_of_equal_returns_teaches_nothing():
    assert not episode_advantages(torch.ones(3, 4), torch.tensor([0, 0, 1, 1]), is_scaled=True).any()


def test_turns_are_compared_only_within_group_and_state():
    # Envs 0 and 1 are a group and start in state 0; env 2 is alone in its group.
    rewards = torch.tensor([[0.0, 0.0, 5.0], [1.0, 0.0, 0.0]])
    ends, live = torch.tensor([[False, False, True], [True, True, True]]), torch.tensor([[True, True, True]] * 2)
    states = torch.tensor([[0, 0, 0], [1, 2, 0]])
    turns = state_advantages(rewards, ends, live, states, torch.tensor([0, 0, 1]), 0.5, is_scaled=False)
    assert turns.tolist() == [[0.25, -0.25, 2.5], [0, 0, -2.5]]


def test_whitening_looks_only_where_it_is_told():
    white = whiten(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]))
    assert white.tolist() == pytest.approx([-1, 1, 0], abs=1e-5)
