"""The mathematics of a flow policy: its supervised loss, the denoising of a chunk, and the log-density of each step.

Time runs from t = 1, noise, to t = 0, the action, everywhere. Between a standard normal eps and an action a,

    x_t = t eps + (1 - t) a,    v = dx_t / dt = eps - a,

so a network that predicts v from x_t also gives the action, a^ = x - t v, and the noise, e^ = x + (1 - t) v. A chunk is
denoised in K equal steps from t_k = (K - k) / K to t_{k+1}, each an independent Gaussian per element given x_k. Its
log-density is the log-prob for the policy gradient. Letters: B batch, H steps of a chunk in the network, D dimensions
of an action in the network; an env may use fewer of both.

Source: Lipman et al. 2023, arXiv:2210.02747 (flow matching); Black et al. 2024, arXiv:2410.24164 (pi0: the loss and its
times); Liu et al. 2025, arXiv:2505.05470 (Flow-GRPO: the SDE); Zhang et al. 2025, arXiv:2505.22094 (ReinFlow: learned
noise); Chen et al. 2025, arXiv:2510.25889 (pi_RL: one noisy step of each chunk). Departures: ReinFlow runs time the
other way; pi_RL draws one noisy step for a whole batch, here each chunk draws its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`kernel(x, v, t, t_next, noise)`: mean and standard deviation of x at `t_next`, for x and velocity v [B, H, D] at t.
Times [B, 1, 1]; the meaning and range of `noise` differ. Noise of 0 is the ODE's step in all of them."""


def ode_step(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Makes an Euler step of the ODE; ignores `noise`."""
    mean = x - (t - t_next) * v
    return mean, torch.zeros_like(mean)


def sde_step(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Makes a step of the SDE that has the ODE's distribution at every time; `noise` is its level a >= 0, usually
    .5.
    """
    # dx = [v + sigma^2 / (2 t) e^] dt + sigma dw  backwards in time, where -e^ / t is the score of x_t,
    # sigma = a sqrt(t / (1 - t)): the drift along the score removes the variance that the noise adds.
    step = t - t_next
    remaining = torch.maximum(1 - t, step)  # sigma is infinite at t = 1; so the std of the first step is a
    mean = x - step * (v + noise.square() / (2 * remaining) * (x + (1 - t) * v))
    return mean, (noise * (t * step / remaining).sqrt()).expand_as(mean)


def learned_step(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Makes the ODE's step with standard deviation `noise` >= 0 from a head; this widens the distribution."""
    mean = x - (t - t_next) * v
    return mean, noise.expand_as(mean)


def cps_step(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces a part of the remaining noise by fresh noise, so that its variance is exact at every K (coefficients
    preserving sampling); `noise` in [0, 1] is that part, as an angle. The last step has no noise.
    """
    # x' = (1 - t') a^ + t' (cos(a pi / 2) e^ + sin(a pi / 2) eps)
    angle = noise * (math.pi / 2)
    mean = (1 - t_next) * (x - t * v) + t_next * angle.cos() * (x + (1 - t) * v)
    return mean, (t_next * angle.sin()).expand_as(mean)


KERNELS: dict[str, Kernel] = {"ode": ode_step, "sde": sde_step, "learned": learned_step, "cps": cps_step}
"""Kernels by name."""


def bounded_std(raw: Tensor, low: float, high: float) -> Tensor:
    """Maps a head's outputs `raw` to standard deviations between `low` > 0 and `high`, uniformly in the logarithm."""
    return low * (high / low) ** torch.sigmoid(raw)


def log_density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Returns the log-density of x under Normal(mean, std), nats per element; 0, with gradient 0, where std is 0."""
    # -ln s - ln(2 pi) / 2 - ((x - m) / s)^2 / 2
    is_drawn = std > 0
    std = torch.where(is_drawn, std, 1.0)  # inside too: a gradient of 0 / 0 would pass through the mask as NaN
    return torch.where(is_drawn, -0.5 * ((x - mean) / std).square() - std.log() - _HALF_LOG_2PI, 0.0)


def entropy(std: Tensor) -> Tensor:
    """Returns the entropy of a normal distribution, nats per element; 0 where std is 0."""
    return torch.where(std > 0, torch.where(std > 0, std, 1.0).log() + _HALF_LOG_2PI + 0.5, 0.0)


def training_times(uniform: Tensor) -> Tensor:
    """Returns pi0's times in [.001, 1], more of them near noise, from uniform numbers: .999 Beta(1.5, 1) + .001."""
    # P(T < t) = t^1.5 of a Beta(1.5, 1), so T = u^(1 / 1.5)
    return 0.999 * uniform ** (1 / 1.5) + 0.001


def noised(actions: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """Returns x_t [B, H, D] between `actions` (t = 0) and noise `eps` (t = 1), both [B, H, D], at times t [B]."""
    t = t[:, None, None]
    return t * eps + (1 - t) * actions


def flow_matching_loss(velocity: Tensor, actions: Tensor, eps: Tensor, is_real: Tensor) -> Tensor:
    """Returns [B], the mean squared error of `velocity` [B, H, D] at x_t, over the real elements of each chunk.

    Args:
        velocity: prediction at `noised(actions, eps, t)`.
        actions: [B, H, D] normalised actions.
        eps: [B, H, D] noise that was mixed in.
        is_real: bool, broadcast to [B, H, D]; False for padded steps and dimensions.
    """
    # |v - (eps - a)|^2
    is_real = is_real.expand_as(velocity)
    errors = torch.where(is_real, velocity.float() - (eps - actions), 0.0).square()
    return errors.sum(dim=(1, 2)) / is_real.sum(dim=(1, 2)).clamp(min=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The K denoising steps of B chunks."""

    states: Tensor
    """[B, K + 1, H, D] x from noise to action; the last one is the action."""
    log_probs: Tensor
    """[B, K, H, D] log-density of each element of each step; 0 where no noise was added."""
    is_drawn: Tensor
    """[B, K, H, D] bool: where noise was added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Denoiser:
    """Denoises chunks step by step, and evaluates the log-density of earlier steps."""

    velocity: Callable[[Tensor, Tensor], Tensor]
    """Function that returns v [B, H, D] at x [B, H, D] and times t [B]."""
    noise: Callable[[Tensor, Tensor], Tensor]
    """Function that returns the kernel's `noise` at x and t, broadcast to [B, H, D]: a constant, or a head's output."""
    kernel: Kernel
    num_steps: int
    """K, the number of steps, >= 1."""

    def step(self, x: Tensor, k: Tensor, is_noisy: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation [B, H, D], at least float32, of the successor of `x` [B, H, D] at step
        `k` [B].

        Elements that are not `is_noisy` (broadcast to [B, H, D]) take the ODE's step.
        """
        # (K - k) / K: exactly 0 after the last step, which a running difference would miss by rounding
        t, t_next = ((self.num_steps - k - later).to(x.dtype) / self.num_steps for later in (0, 1))
        v, noise = self.velocity(x, t), self.noise(x, t)
        # neighbouring states differ little: a body in bfloat16 must not round the difference
        v, noise = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (v, noise))
        return self.kernel(x, v, t[:, None, None], t_next[:, None, None], noise * is_noisy)

    def sample(self, start: Tensor, is_noisy: Tensor, draw: Callable[[], Tensor]) -> Chain:
        """Denoises B chunks.

        Args:
            start: [B, H, D] standard normal, at least float32.
            is_noisy: bool, broadcast to [B, K, H, D]. Should only be True for executed, real elements: noise elsewhere
                has no log-prob, but would move the other elements of later steps.
            draw: returns standard normal numbers, broadcast to [B, H, D], for one step.
        """
        x, states, log_probs, drawn = start, [start], [], []
        for index in range(self.num_steps):
            k = torch.full((len(x),), index, device=x.device)
            mean, std = self.step(x, k, is_noisy[:, index])
            x = mean + std * draw()
            states.append(x)
            log_probs.append(log_density(x, mean, std))
            drawn.append(std > 0)
        return Chain(states=torch.stack(states, 1), log_probs=torch.stack(log_probs, 1), is_drawn=torch.stack(drawn, 1))

    def evaluate(self, states: Tensor, first: Tensor, is_noisy: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-densities of stored steps under the present velocity, and their standard deviations.

        Args:
            states: [B, K' + 1, H, D] x before the first stored step, and after each of them.
            first: [B] index of the first stored step, 0 to K - K'.
            is_noisy: bool, broadcast to [B, K', H, D], as when they were sampled.

        Returns:
            Both [B, K', H, D]; the log-density is 0 where the standard deviation is.
        """
        steps = [self.step(states[:, j], first + j, is_noisy[:, j]) for j in range(states.shape[1] - 1)]
        mean, std = (torch.stack(part, 1) for part in zip(*steps, strict=True))
        return log_density(states[:, 1:], mean, std), std


def noisy_steps(num: int, num_steps: int, which: str, ignore_last: bool, generator: torch.Generator) -> Tensor:
    """Returns [num, K] bool: the steps of each chunk that get noise and are trained.

    Args:
        num: number of chunks.
        num_steps: K.
        which: one, drawn for each chunk separately with equal probabilities, all, or the last.
        ignore_last: leave out the last step, whose noise remains in the action.
        generator: generator on the CPU.
    """
    num_candidates = num_steps - ignore_last
    steps = torch.arange(num_steps)
    if which == "all":
        return (steps < num_candidates).expand(num, -1)
    if which == "last":
        return (steps == num_candidates - 1).expand(num, -1)
    return steps == torch.randint(num_candidates, (num, 1), generator=generator)
