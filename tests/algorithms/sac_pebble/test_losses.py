import pytest
import torch

from rlvlm.algorithms.sac_pebble.losses import actor_loss, critic_loss, td_target


def test_one_transition_by_hand():
    # r = 1, the smaller next value is 3, log-density -2 at alpha 0.5: soft value 3 + 1 = 4, target 1 + 0.9 * 4 = 4.6.
    one = torch.ones(1)
    target = td_target(one, 0 * one, torch.tensor([[5.0], [3.0]]), -2 * one, torch.tensor(0.5), 0.9)
    assert target.item() == pytest.approx(4.6)
    # Critics at 4 and 5: squared errors 0.36 and 0.16, summed.
    assert critic_loss(torch.tensor([[4.0], [5.0]]), target).item() == pytest.approx(0.52)
    # Actor: alpha * log-density - smaller value = 0.5 * -2 - 4.
    assert actor_loss(torch.tensor([[4.0], [5.0]]), -2 * one, torch.tensor(0.5)).item() == pytest.approx(-5)


def test_an_end_for_good_has_no_future():
    one = torch.ones(1)
    assert td_target(one, one, torch.full((2, 1), 100.0), one, torch.tensor(1.0), 0.9).item() == 1
