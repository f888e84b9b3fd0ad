import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from rlvlm.policies.squashed_gaussian import ActionSample, SquashedGaussian, log_density


def test_density_at_the_mean_of_a_unit_gaussian_by_hand():
    zero = torch.zeros(1, 1)
    # u = 0: the Gaussian gives -log sqrt(2 pi), and tanh has derivative 1 there.
    assert log_density(zero, zero, zero).item() == pytest.approx(-0.5 * math.log(2 * math.pi))


def test_density_is_that_of_the_change_of_variables():
    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise = torch.randn(3, 64, 4, generator=generator)
    before = mean + log_std.exp() * noise
    reference = TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform(cache_size=1)])
    expected = (
        Normal(mean, log_std.exp()).log_prob(before) - TanhTransform().log_abs_det_jacobian(before, torch.tanh(before))
    ).sum(-1)
    torch.testing.assert_close(log_density(before, noise, log_std), expected)
    inside = torch.tanh(before).abs() < 0.99  # the reference inverts tanh, which loses digits near the ends
    exact = reference.log_prob(torch.tanh(before))
    torch.testing.assert_close(
        log_density(before, noise, log_std)[inside.all(-1)], exact.sum(-1)[inside.all(-1)], atol=1e-2, rtol=1e-3
    )


def test_density_stays_finite_where_tanh_saturates():
    far = torch.full((1, 1), 40.0)
    assert torch.isfinite(log_density(far, torch.zeros(1, 1), torch.zeros(1, 1))).all()


def test_log_std_stays_between_its_bounds_however_wild_the_network():
    policy = SquashedGaussian(3, 2, (8,), torch.Generator().manual_seed(0))
    for sign, bound in ((1, 2.0), (-1, -5.0)):
        with torch.no_grad():
            policy.layers[-1].bias[2:] = sign * 100.0
        _, log_std = policy(torch.zeros(1, 3))
        torch.testing.assert_close(log_std, torch.full((1, 2), bound))


def test_acting_is_the_mode_without_noise_and_the_sample_with_it():
    policy = SquashedGaussian(3, 2, (8, 8), torch.Generator().manual_seed(0))
    obs, noise = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))[0], torch.ones(5, 2)
    torch.testing.assert_close(policy.act(obs), torch.tanh(policy(obs)[0]))
    torch.testing.assert_close(policy.act(obs, noise), policy.sample(obs, noise)[0])
    assert not torch.allclose(policy.act(obs), policy.act(obs, noise))
    assert policy.act(obs).abs().max() < 1


def test_the_generator_decides_the_first_weights_which_are_orthogonal():
    left, right = (SquashedGaussian(3, 2, (8,), torch.Generator().manual_seed(5)) for _ in range(2))
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(one, other)
    weight = left.layers[0].weight.detach().numpy()
    np.testing.assert_allclose(weight.T @ weight, np.eye(3), atol=1e-5)  # orthogonal columns


def test_a_draw_is_the_policys_sample_and_its_gradient_is_that_of_autograd():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(9, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    noise, action_gradient = torch.randn(2, 9, 3, generator=generator, dtype=torch.float64)
    density_gradient = torch.tensor(0.37, dtype=torch.float64)
    draw = ActionSample.of(outputs, noise)
    loss = (draw.actions * action_gradient).sum() + density_gradient * draw.log_density.sum()
    (expected,) = torch.autograd.grad(loss, outputs)
    torch.testing.assert_close(draw.output_gradient(action_gradient, density_gradient), expected, rtol=0, atol=1e-12)
    policy = SquashedGaussian(3, 2, (8,), generator)
    obs, noise = torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator)
    hidden = torch.relu(policy.layers[0](obs))
    draw = ActionSample.of(policy.layers[1](hidden), noise)
    for left, right in zip((draw.actions, draw.log_density), policy.sample(obs, noise), strict=True):
        torch.testing.assert_close(left, right)
    first, second = ActionSample.of(policy.layers[1](hidden[:4]), noise[:4]).halves()
    torch.testing.assert_close(torch.cat((first.actions, second.actions)), draw.actions[:4])
    torch.testing.assert_close(second.log_density, draw.log_density[2:4])
