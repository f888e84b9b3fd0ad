import pytest
import torch
from torch.nn.functional import one_hot

from rlvlm.algorithms.sac_pebble.update.losses import (
    actor_loss,
    critic_gradient,
    critic_loss,
    smaller_critic,
    td_target,
    temperature_gradient,
    temperature_loss,
)


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


def test_temperature_rises_below_the_target_entropy_and_falls_above():
    for entropy, sign in ((-5.0, -1), (-3.0, 1)):  # the gradient is descended: a negative one raises
        log_alpha = torch.zeros((), requires_grad=True)
        temperature_loss(log_alpha, torch.full((8,), -entropy), -4).backward()
        assert torch.sign(log_alpha.grad).item() == sign


def test_gradients_are_the_losses_derivatives():
    generator = torch.Generator().manual_seed(0)
    q, other = torch.randn(2, 2, 9, generator=generator, dtype=torch.float64)
    target, log_density = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    log_alpha = torch.tensor(-1.3, dtype=torch.float64, requires_grad=True)
    alpha = log_alpha.detach().exp()
    q.requires_grad_(), other.requires_grad_()
    for loss, variable, gradient in (
        (critic_loss(q, target), q, critic_gradient(q.detach(), target)),
        (actor_loss(other, log_density, alpha), other, one_hot(smaller_critic(other), 2).T.double() / -9),
        (temperature_loss(log_alpha, log_density, -3.0), log_alpha, temperature_gradient(alpha, log_density, -3.0)),
    ):
        (expected,) = torch.autograd.grad(loss, variable)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_of_two_equal_values_one_counts():
    assert smaller_critic(torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 4.0]])).tolist() == [0, 1, 0]
