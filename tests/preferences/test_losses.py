import math

import pytest
import torch

from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.losses import PREFERENCE, SCORE, preference_loss


def test_preference_loss_by_hand():
    # Margin 0: one coin toss, ln 2. Margin ln 3 for the right one: it is right with probability 3/4.
    left = torch.tensor([[0.0, 0.0], [1.0, math.log(3)]])
    right = torch.tensor([[0.0, math.log(3)], [1.0, 0.0]])
    loss = preference_loss(left, right, torch.tensor([1.0, 1.0]))
    expected = [(math.log(2) + math.log(4 / 3)) / 2, (math.log(2) + math.log(4)) / 2]
    torch.testing.assert_close(loss, torch.tensor(expected))
    tie = preference_loss(torch.zeros(1, 1), torch.full((1, 1), math.log(3)), torch.tensor([0.5]))
    torch.testing.assert_close(tie, torch.tensor([(math.log(4 / 3) + math.log(4)) / 2]))


def test_swapping_the_sides_and_the_labels_changes_nothing():
    left, right = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    p_right = torch.tensor([0, 1, 0.5, 1, 0, 0.5, 1, 0])
    torch.testing.assert_close(preference_loss(left, right, p_right), preference_loss(right, left, 1 - p_right))
    returns = torch.stack((left, right), dim=-1)
    assert PREFERENCE.grade(returns, p_right) == PREFERENCE.grade(returns.flip(-1), 1 - p_right)


def test_agreement_counts_decided_labels_only():
    returns = torch.tensor([[0.0, 1.0]] * 3)
    assert PREFERENCE.grade(returns, torch.tensor([1.0, 0.0, 0.5])) == (1, 2)


def test_returns_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="must share shape"):
        preference_loss(torch.zeros(3, 4), torch.zeros(3, 5), torch.zeros(4))


def test_smoothed_labels_want_a_margin_that_is_bounded():
    config = RewardModelConfig(label_smoothing=0.2)  # right in 9 of 10: a margin of ln 9 is enough
    margins = torch.tensor([1.0, math.log(9), 4.0], requires_grad=True)
    returns = torch.stack([torch.zeros(3), margins], dim=-1).unsqueeze(1)  # [K, 1, 2]
    losses = PREFERENCE.loss(returns, torch.ones(3, 1), config)
    torch.testing.assert_close(losses[1], torch.tensor(-0.9 * math.log(0.9) - 0.1 * math.log(0.1)))
    losses.sum().backward()
    assert margins.grad is not None
    assert margins.grad[0] < 0 < margins.grad[2] and abs(margins.grad[1]) < 1e-6
    plain = PREFERENCE.loss(returns, torch.ones(3, 1), RewardModelConfig())
    torch.testing.assert_close(plain, preference_loss(returns[..., 0], returns[..., 1], torch.ones(3, 1)))


def test_a_label_is_predicted_by_the_larger_return_and_not_by_equal_ones():
    returns = torch.tensor([[0.0, 1.0], [0.0, 1.0], [2.0, 2.0], [2.0, 2.0], [0.0, 1.0]])
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5])
    assert PREFERENCE.predicted(returns, labels) == [True, False, False, False], "the tie is nobody's"


def test_scores_are_predicted_in_disjoint_pairs():
    returns = torch.tensor([[0.0], [1.0], [1.0], [0.0], [3.0], [3.0], [1.0], [2.0], [5.0]])
    scores = torch.tensor([0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.3, 0.3, 0.9])
    assert SCORE.predicted(returns, scores) == [True, False, False], "equal scores decide nothing, the last has no mate"
    assert SCORE.predicted(returns[:1], scores[:1]) == []


def test_score_loss_by_hand():
    # Scores of 0, 1/2 and 1 mean rewards of -1, 0 and 1.
    rewards = torch.tensor([[-1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, -1.0]])
    loss = SCORE.loss(rewards[..., None], torch.tensor([0.0, 0.5, 1.0]), RewardModelConfig())
    torch.testing.assert_close(loss, torch.tensor([0.0, 2 / 3, 9 / 3]))


def test_a_fit_to_scores_ends_on_the_error_of_those_held_out():
    config = RewardModelConfig(stop_error=0.1)
    assert SCORE.is_reached(1.0, lambda: 0.0099, config) and not SCORE.is_reached(0.0, lambda: 0.0101, config)
    assert SCORE.is_reached(0.0099, lambda: math.nan, config), "nothing is held out"


def test_the_error_is_in_units_of_the_score():
    returns, scores = torch.tensor([[0.0], [1.0], [-1.0]]), torch.tensor([0.5, 1.0, 0.3])  # the last misses by 0.3
    assert SCORE.grade(returns, scores) == (pytest.approx(0.09), 3)
