"""Flow matching's loss, the kernels of a denoising step and their log-densities, against closed forms and loops."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Beta, Normal

from rlvlm.policies.vla.flow.kernels import (
    KERNELS,
    Denoiser,
    bounded_std,
    entropy,
    flow_matching_loss,
    log_density,
    noised,
    noisy_steps,
    training_times,
)
from tests.oracles import flow as oracle

TARGET = {"m": 0.3, "s0": 0.2}
NOISY = ("sde", "learned", "cps")
ALL = torch.tensor(True)


def gaussian(kernel: str, num_steps: int, noise: float) -> Denoiser:
    """Denoises to N(.3, .2^2) with the exact velocity."""

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        t = t[:, None, None]
        return oracle.velocity(x, t, **TARGET)

    level = torch.tensor(noise)
    return Denoiser(
        velocity=velocity, noise=lambda x, t: level.to(x.dtype), kernel=KERNELS[kernel], num_steps=num_steps
    )


def linear(kernel: str, num_steps: int, noise: float, weights: Tensor) -> Denoiser:
    """Has the velocity w x + u t."""
    return Denoiser(
        velocity=lambda x, t: weights[0] * x + weights[1] * t[:, None, None],
        noise=lambda x, t: torch.tensor(noise, dtype=x.dtype),
        kernel=KERNELS[kernel],
        num_steps=num_steps,
    )


def draws(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(shape, generator=generator, dtype=dtype)


def final_moments(denoiser: Denoiser) -> tuple[float, float]:
    """Mean and standard deviation of the actions, exact where the velocity is linear in x."""
    mean, variance = 0.0, 1.0
    x = torch.tensor([0.0, 1.0], dtype=torch.float64)[:, None, None]
    for index in range(denoiser.num_steps):
        after, std = denoiser.step(x, torch.full((2,), index), ALL)
        at_0, at_1 = after.flatten().tolist()
        mean, variance = at_0 + (at_1 - at_0) * mean, (at_1 - at_0) ** 2 * variance + std[0].item() ** 2
    return mean, math.sqrt(variance)


def test_by_hand():
    x, v, t, t_next = (torch.full((1, 1, 1), number) for number in (2.0, 1.0, 0.5, 0.25))
    # a^ = 2 - .5 = 1.5, e^ = 2 + .5 = 2.5
    found = {name: kernel(x, v, t, t_next, torch.tensor(0.5)) for name, kernel in KERNELS.items()}
    numbers = {name: (mean.item(), std.item()) for name, (mean, std) in found.items()}
    assert numbers["ode"] == (1.75, 0.0)
    assert numbers["learned"] == (1.75, 0.5)
    # sigma^2 = .25 * 1; 2 - .25 (1 + .25 * 2.5) and .5 sqrt(.25)
    assert numbers["sde"] == pytest.approx((2 - 0.25 * 1.625, 0.25))
    # .75 * 1.5 + .25 cos(45 degrees) 2.5 and .25 sin(45 degrees)
    assert numbers["cps"] == pytest.approx((1.125 + 0.625 * math.sqrt(0.5), 0.25 * math.sqrt(0.5)))
    for name in KERNELS:  # without noise every kernel is the ODE
        mean, std = KERNELS[name](x, v, t, t_next, torch.tensor(0.0))
        assert mean.item() == pytest.approx(1.75) and std.item() == 0.0


@pytest.mark.parametrize(
    ("kernel", "num_steps", "std"),
    [("ode", 4, 0.096), ("ode", 10, 0.154), ("ode", 50, 0.190), ("ode", 1_000, 0.1995)]
    + [("sde", 4, 0.166), ("sde", 10, 0.174), ("sde", 50, 0.195), ("sde", 1_000, 0.2002)]
    + [(kernel, num_steps, None) for kernel in ("learned", "cps") for num_steps in (1, 10)]
    + [("sde", 1, None)],
)
def test_the_moments_of_a_gaussian_are_those_of_the_recursion(kernel, num_steps, std):
    found = final_moments(gaussian(kernel, num_steps, 0.5))
    assert found == pytest.approx(oracle.final_moments(kernel, num_steps, 0.5, **TARGET), abs=1e-6)
    if std is not None:
        assert found[1] == pytest.approx(std, abs=6e-4)
    if kernel != "cps":
        assert found[0] == pytest.approx(TARGET["m"], abs=1e-6), "the mean is exact at every K"


def test_ten_steps_sampled_have_the_recursions_moments():
    num = 20_000
    draw = draws((num, 1, 1))
    actions = gaussian("sde", 10, 0.5).sample(draw(), ALL.expand(num, 10, 1, 1), draw).states[:, -1]
    mean, std = oracle.final_moments("sde", 10, 0.5, **TARGET)
    assert actions.mean().item() == pytest.approx(mean, abs=5 * std / math.sqrt(num))
    assert actions.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * num))


def test_densities_and_entropies_are_torchs():
    draw = draws((6, 4), dtype=torch.float64)
    x, mean, std = draw(), draw(), draw().exp()
    torch.testing.assert_close(log_density(x, mean, std), Normal(mean, std).log_prob(x), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(entropy(std), Normal(mean, std).entropy(), atol=1e-12, rtol=1e-12)
    single = log_density(x.float(), mean.float(), std.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), log_density(x, mean, std), atol=1e-4, rtol=1e-5)


def test_steps_without_noise_add_nothing_and_have_no_gradient():
    mean = torch.randn(5, requires_grad=True)
    std = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0], requires_grad=True)
    found = log_density(torch.randn(5), mean, std) + entropy(std)
    found.sum().backward()
    assert mean.grad is not None and std.grad is not None and found.isfinite().all()
    for numbers in (found, mean.grad, std.grad):
        assert (numbers[std == 0] == 0).all() and numbers.isfinite().all()
    # the last step of the variance-keeping kernel has none, to the bit, whatever K
    for num_steps in range(1, 60):
        chain = gaussian("cps", num_steps, 0.5).sample(
            draws((1, 1, 1))(), ALL.expand(1, num_steps, 1, 1), draws((1, 1, 1))
        )
        assert chain.is_drawn.flatten().tolist() == [True] * (num_steps - 1) + [False]
        assert chain.log_probs.isfinite().all() and chain.log_probs[0, -1] == 0


@pytest.mark.parametrize("kernel", NOISY)
@pytest.mark.parametrize("num_steps", [1, 4, 10])
def test_a_sampled_log_prob_is_the_one_that_is_found_later(kernel, num_steps):
    weights = torch.tensor([0.4, -0.3])
    denoiser, num = linear(kernel, num_steps, 0.5, weights), 3 * num_steps
    is_noisy = torch.ones(num, num_steps, 5, 3, dtype=torch.bool)
    chain = denoiser.sample(draws((num, 5, 3))(), is_noisy, draws((num, 5, 3), 1))
    # one stored step each, of another number in each row
    first = torch.arange(num) % num_steps
    rows = torch.arange(num)
    stored = torch.stack([chain.states[rows, first], chain.states[rows, first + 1]], dim=1)
    found, _ = denoiser.evaluate(stored, first, is_noisy[:, :1])
    torch.testing.assert_close(found[:, 0], chain.log_probs[rows, first], atol=1e-5, rtol=0)
    # all of them
    found, std = denoiser.evaluate(chain.states, torch.zeros(num, dtype=torch.long), is_noisy)
    torch.testing.assert_close(found, chain.log_probs, atol=1e-5, rtol=0)
    assert torch.equal(std > 0, chain.is_drawn)


@pytest.mark.parametrize("kernel", NOISY)
def test_log_probs_and_gradients_are_those_of_loops_and_of_finite_differences(kernel):
    weights = torch.tensor([0.4, -0.3], dtype=torch.float64, requires_grad=True)
    denoiser = linear(kernel, 4, 0.5, weights)
    scored = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])
    draw = draws((2, 3, 3), dtype=torch.float64)
    chain = denoiser.sample(draw(), scored.expand(2, 4, 3, 3), draw)
    states, first, advantages = chain.states.detach(), torch.tensor([1, 2]), torch.tensor([1.5, -0.5])
    stored = torch.stack([states[0, 1:4], states[1, 2:5]])  # two steps of each: 1 and 2, 2 and 3

    def objective(weights: Tensor) -> Tensor:
        found, _ = linear(kernel, 4, 0.5, weights).evaluate(stored, first, scored.expand(2, 2, 3, 3))
        return (found.sum(dim=(1, 2, 3)) * advantages).sum()

    value = objective(weights)
    (gradient,) = torch.autograd.grad(value, weights)
    expected = torch.zeros(3, dtype=torch.float64)
    for row in range(2):
        parts = oracle.log_prob_and_gradient(
            kernel, stored[row].tolist(), int(first[row]), 4, 0.5, 0.4, -0.3, scored.tolist()
        )
        expected += advantages[row] * torch.tensor(parts, dtype=torch.float64)
    torch.testing.assert_close(torch.cat([value.detach()[None], gradient]), expected, atol=1e-5, rtol=1e-5)
    assert torch.autograd.gradcheck(objective, weights)
    single = objective(weights.detach().float())  # stored states stay float64 here; the weights alone are rounded
    torch.testing.assert_close(single.double(), value.detach(), atol=1e-4, rtol=1e-5)


def test_unscored_elements_change_no_log_prob():
    weights = torch.tensor([0.4, -0.3])
    denoiser = linear("sde", 4, 0.5, weights)
    scored = torch.zeros(5, 4, dtype=torch.bool)
    scored[:3, :2] = True  # 3 steps are run, 2 dimensions are real
    chain = denoiser.sample(draws((2, 5, 4))(), scored.expand(2, 4, 5, 4), draws((2, 5, 4), 1))
    first = torch.zeros(2, dtype=torch.long)
    found, std = denoiser.evaluate(chain.states, first, scored.expand(2, 4, 5, 4))
    other = torch.where(scored, chain.states, chain.states + 7.0)
    again, _ = denoiser.evaluate(other, first, scored.expand(2, 4, 5, 4))
    assert torch.equal(found, again) and torch.equal(std > 0, scored.expand_as(std))
    assert torch.equal(chain.is_drawn, scored.expand_as(std)) and (found[~scored.expand_as(std)] == 0).all()
    # without noise they go the ODE's way
    ode = linear("ode", 4, 0.0, weights).sample(chain.states[:, 0], scored.expand(2, 4, 5, 4), draws((2, 5, 4), 1))
    torch.testing.assert_close(ode.states[:, -1][:, ~scored], chain.states[:, -1][:, ~scored])


def test_a_body_in_bfloat16_has_its_densities_in_float32():
    coarse = Denoiser(
        velocity=lambda x, t: (0.4 * x).bfloat16(),
        noise=lambda x, t: torch.tensor(0.5),
        kernel=KERNELS["sde"],
        num_steps=4,
    )
    chain = coarse.sample(draws((8, 2, 2))(), ALL.expand(8, 4, 2, 2), draws((8, 2, 2), 1))
    assert chain.states.dtype == chain.log_probs.dtype == torch.float32
    found, _ = coarse.evaluate(chain.states, torch.zeros(8, dtype=torch.long), ALL.expand(8, 4, 2, 2))
    assert found.dtype == torch.float32 and torch.equal(found, chain.log_probs)


def test_the_loss_equals_loops_and_skips_padding():
    generator = torch.Generator().manual_seed(2)
    actions, eps = (torch.randn(3, 4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    t = torch.tensor([0.2, 0.7, 1.0], dtype=torch.float64)
    is_real = torch.ones(3, 4, 3, dtype=torch.bool)
    is_real[..., 2] = False  # a padded dimension
    is_real[1, 2:] = False  # an episode's end
    weights = torch.tensor([0.4, -0.3], dtype=torch.float64, requires_grad=True)

    def losses(actions: Tensor) -> Tensor:
        velocity = weights[0] * noised(actions, eps, t) + weights[1] * t[:, None, None]
        return flow_matching_loss(velocity, actions, eps, is_real)

    found = losses(actions)
    gradient = torch.autograd.grad(found.sum(), weights, retain_graph=True)[0]
    parts = [
        oracle.loss_and_gradient(
            actions[row].tolist(), eps[row].tolist(), t[row].item(), 0.4, -0.3, is_real[row].tolist()
        )
        for row in range(3)
    ]
    torch.testing.assert_close(found.detach().tolist(), [part[0] for part in parts], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        gradient.tolist(), [sum(part[i] for part in parts) for i in (1, 2)], atol=1e-5, rtol=1e-5
    )
    assert torch.equal(losses(torch.where(is_real, actions, 99.0)), found)


def test_training_times_are_pi0s_and_stds_keep_within_their_bounds():
    uniform = (torch.arange(10_000) + 0.5) / 10_000
    times = training_times(uniform)
    assert 0.001 <= times.min() and times.max() <= 1.0
    assert times.mean().item() == pytest.approx(0.999 * Beta(1.5, 1.0).mean.item() + 0.001, abs=1e-4)
    stds = bounded_std(torch.tensor([-50.0, 0.0, 50.0]), 0.04, 0.16)
    assert stds.tolist() == pytest.approx([0.04, 0.08, 0.16])


@pytest.mark.parametrize(
    ("which", "ignore_last", "shares"),
    [
        ("all", False, [1, 1, 1, 1]),
        ("all", True, [1, 1, 1, 0]),
        ("last", False, [0, 0, 0, 1]),
        ("last", True, [0, 0, 1, 0]),
        ("one", False, [0.25] * 4),
        ("one", True, [1 / 3] * 3 + [0]),
    ],
)
def test_which_steps_are_noisy(which, ignore_last, shares):
    steps = noisy_steps(4_000, 4, which, ignore_last, torch.Generator().manual_seed(0))
    assert steps.float().mean(dim=0).tolist() == pytest.approx(shares, abs=0.04)
    if which == "one":
        assert (steps.sum(dim=1) == 1).all()


@pytest.mark.parametrize("kernel", NOISY)
def test_the_policy_gradient_finds_the_optimum_of_a_bandit(kernel):
    """The reward -(a - .6)^2 is largest where the action's mean is .6, whatever the noise."""
    shift = torch.zeros((), requires_grad=True)
    num_steps = 2 if kernel == "cps" else 1  # its last step is not noisy
    denoiser = Denoiser(
        velocity=lambda x, t: x - shift + 0 * t[:, None, None],
        noise=lambda x, t: torch.tensor(0.3),
        kernel=KERNELS[kernel],
        num_steps=num_steps,
    )
    optimizer, draw, means = torch.optim.Adam([shift], 0.02), draws((256, 1, 1)), []
    is_noisy, first = ALL.expand(256, num_steps, 1, 1), torch.zeros(256, dtype=torch.long)
    for _ in range(150):
        with torch.no_grad():
            states = denoiser.sample(0.1 * draw(), is_noisy, draw).states
        rewards = -(states[:, -1] - 0.6).square().flatten()
        log_probs, _ = denoiser.evaluate(states, first, is_noisy)
        loss = -((rewards - rewards.mean()) / rewards.std() * log_probs.flatten(1).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        means.append(states[:, -1].mean().item())
    assert sum(means[-30:]) / 30 == pytest.approx(0.6, abs=0.05)
