"""The mathematics of a flow policy: its supervised loss, how it denoises a chunk, and the log-density of each step.

Time runs from t = 1, noise, to t = 0, the action, everywhere. Between a standard normal eps and an action a,

    x_t = t eps + (1 - t) a,    v = dx_t / dt = eps - a,

so a network that predicts v from x_t also says where the action lies, a^ = x - t v, and what the noise was,
e^ = x + (1 - t) v. A chunk is denoised in K equal steps from t_k = (K - k) / K to t_{k+1}, each an independent
Gaussian per element given x_k. Its log-density is the log-prob that a policy gradient needs. Letters: B batch, H steps
of a chunk as the network denoises it, D dimensions of an action as the network has them; an env may run fewer of both.

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
Times [B, 1, 1]; what `noise` is, and its range, differ. Noise of 0 is the ODE's step in each of them."""


def ode_step(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Euler's step of the ODE; no noise, whatever `noise` says."""
    mean = x - (t - t_next) * v
    return mean, torch.zeros_like(mean)


def sde_step(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A step of the SDE that has the ODE's distribution at every time; `noise` is its level a >= 0, usually .5."""
    # dx = [v + sigma^2 / (2 t) e^] dt + sigma dw  backwards in time, where -e^ / t is the score of x_t,
    # sigma = a sqrt(t / (1 - t)): what noise adds to the variance, the drift along the score takes away again.
    step = t - t_next
    remaining = torch.maximum(1 - t, step)  # sigma is infinite at t = 1; so the first step's std is a
    mean = x - step * (v + noise.square() / (2 * remaining) * (x + (1 - t) * v))
    return mean, (noise * (t * step / remaining).sqrt()).expand_as(mean)


def learned_step(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The ODE's step with a standard deviation of `noise` >= 0, which a head gives; widens the distribution."""
    mean = x - (t - t_next) * v
    return mean, noise.expand_as(mean)


def cps_step(x: Tensor, v: Tensor, t: Tensor, t_next: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces a part of the noise that is left by fresh noise, so its variance is exact at every K (coefficients
    preserving sampling); `noise` in [0, 1] is that part, as an angle. The last step has no noise.
    """
    # x' = (1 - t') a^ + t' (cos(a pi / 2) e^ + sin(a pi / 2) eps)
    angle = noise * (math.pi / 2)
    mean = (1 - t_next) * (x - t * v) + t_next * angle.cos() * (x + (1 - t) * v)
    return mean, (t_next * angle.sin()).expand_as(mean)


KERNELS: dict[str, Kernel] = {"ode": ode_step, "sde": sde_step, "learned": learned_step, "cps": cps_step}
"""By name."""


def bounded_std(raw: Tensor, low: float, high: float) -> Tensor:
    """A head's outputs `raw` as standard deviations between `low` > 0 and `high`, even in the logarithm."""
    return low * (high / low) ** torch.sigmoid(raw)


def log_density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of x under Normal(mean, std) in nats per element; 0, with a gradient of 0, where std is 0."""
    # -ln s - ln(2 pi) / 2 - ((x - m) / s)^2 / 2
    is_drawn = std > 0
    std = torch.where(is_drawn, std, 1.0)  # inside too: a gradient of 0 / 0 would pass through the mask as NaN
    return torch.where(is_drawn, -0.5 * ((x - mean) / std).square() - std.log() - _HALF_LOG_2PI, 0.0)


def entropy(std: Tensor) -> Tensor:
    """Entropy of a normal distribution in nats per element; 0 where std is 0."""
    return torch.where(std > 0, torch.where(std > 0, std, 1.0).log() + _HALF_LOG_2PI + 0.5, 0.0)


def training_times(uniform: Tensor) -> Tensor:
    """pi0's times in [.001, 1], more of them near noise, from uniform numbers in [0, 1]: .999 Beta(1.5, 1) + .001."""
    # P(T < t) = t^1.5 of a Beta(1.5, 1), so T = u^(1 / 1.5)
    return 0.999 * uniform ** (1 / 1.5) + 0.001


def noised(actions: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """x_t [B, H, D] between `actions` (t = 0) and noise `eps` (t = 1), both [B, H, D], at times t [B]."""
    t = t[:, None, None]
    return t * eps + (1 - t) * actions


def flow_matching_loss(velocity: Tensor, actions: Tensor, eps: Tensor, is_real: Tensor) -> Tensor:
    """[B] mean squared error of the predicted `velocity` [B, H, D] at x_t, over the real elements of each chunk.

    Args:
        velocity: predicted at `noised(actions, eps, t)`.
        actions: [B, H, D] normalised.
        eps: [B, H, D] the noise that was mixed in.
        is_real: bool, broadcast to [B, H, D]; padded steps and dimensions never count.
    """
    # |v - (eps - a)|^2
    is_real = is_real.expand_as(velocity)
    errors = torch.where(is_real, velocity.float() - (eps - actions), 0.0).square()
    return errors.sum(dim=(1, 2)) / is_real.sum(dim=(1, 2)).clamp(min=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The K steps in which B chunks were denoised."""

    states: Tensor
    """[B, K + 1, H, D] x from noise to action; the last one is the action."""
    log_probs: Tensor
    """[B, K, H, D] log-density of each element of each step; 0 where it was not drawn."""
    is_drawn: Tensor
    """[B, K, H, D] bool: where noise was added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Denoiser:
    """Denoises chunks step by step, and says how likely steps that it took earlier are now."""

    velocity: Callable[[Tensor, Tensor], Tensor]
    """v [B, H, D] at x [B, H, D] and times t [B]."""
    noise: Callable[[Tensor, Tensor], Tensor]
    """The kernel's `noise` at x and t, broadcast to [B, H, D]: a constant level, or a head's output."""
    kernel: Kernel
    num_steps: int
    """K >= 1."""

    def step(self, x: Tensor, k: Tensor, is_noisy: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [B, H, D], at least float32, of what follows `x` [B, H, D] after steps `k` [B].

        Elements that are not `is_noisy` (broadcast to [B, H, D]) take the ODE's step.
        """
        # (K - k) / K: exactly 0 after the last step, which a running difference would miss by a rounding error
        t, t_next = ((self.num_steps - k - later).to(x.dtype) / self.num_steps for later in (0, 1))
        v, noise = self.velocity(x, t), self.noise(x, t)
        # the difference of two neighbouring states is small: a body in bfloat16 must not round it
        v, noise = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (v, noise))
        return self.kernel(x, v, t[:, None, None], t_next[:, None, None], noise * is_noisy)

    def sample(self, start: Tensor, is_noisy: Tensor, draw: Callable[[], Tensor]) -> Chain:
        """Denoises B chunks.

        Args:
            start: [B, H, D] standard normal, at least float32.
            is_noisy: bool, broadcast to [B, K, H, D]. Only elements that are run and real should be: noise elsewhere is
                never scored, but would move the scored elements of later steps.
            draw: gives standard normal numbers, broadcast to [B, H, D], for one step.
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
        """Log-densities of stored steps under the velocity as it is now, and their standard deviations.

        Args:
            states: [B, K' + 1, H, D] x before the first stored step, and after each of them.
            first: [B] number of the first stored step, 0 to K - K'.
            is_noisy: bool, broadcast to [B, K', H, D], as when they were sampled.

        Returns:
            Both [B, K', H, D]; the log-density is 0 where the standard deviation is.
        """
        steps = [self.step(states[:, j], first + j, is_noisy[:, j]) for j in range(states.shape[1] - 1)]
        mean, std = (torch.stack(part, 1) for part in zip(*steps, strict=True))
        return log_density(states[:, 1:], mean, std), std


def noisy_steps(num: int, num_steps: int, which: str, ignore_last: bool, generator: torch.Generator) -> Tensor:
    """[num, K] bool: the steps of each chunk that get noise and are learned from.

    Args:
        num: chunks.
        num_steps: K.
        which: one, drawn for each chunk by itself with equal probabilities, all, or the last.
        ignore_last: leave out the last step, whose noise is what an action keeps in the end.
        generator: on the CPU.
    """
    num_candidates = num_steps - ignore_last
    steps = torch.arange(num_steps)
    if which == "all":
        return (steps < num_candidates).expand(num, -1)
    if which == "last":
        return (steps == num_candidates - 1).expand(num, -1)
    return steps == torch.randint(num_candidates, (num, 1), generator=generator)
