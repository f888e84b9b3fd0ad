"""A small policy for continuous actions: a Gaussian squashed into (-1, 1). Plain torch; algorithms/ trains it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

LOG_STD_MIN = -5.0
LOG_STD_MAX = 2.0
_HALF_RANGE = 0.5 * (LOG_STD_MAX - LOG_STD_MIN)


@dataclass(frozen=True, slots=True)
class ActionSample:
    """Actions sampled from squashed Gaussians, with the quantities needed for gradients at the network's outputs."""

    actions: Tensor
    """[B, A] actions in (-1, 1)."""
    log_density: Tensor
    """[B] log-densities of the actions, nats."""
    deviation: Tensor
    """[B, A] distance from the mean by which noise moved the action, before squashing."""
    width: Tensor
    """[B, A] position of log-std between its bounds, in (-1, 1)."""

    @classmethod
    def of(cls, outputs: Tensor, noise: Tensor) -> "ActionSample":
        """Computes the actions for the network's outputs `[B, 2A]` and standard normal `noise` `[B, A]`."""
        # a = tanh(u),  u = mean + std * noise
        mean, raw = outputs.chunk(2, dim=-1)
        width = torch.tanh(raw)
        log_std = _log_std(width)
        deviation = log_std.exp() * noise
        before = mean + deviation
        return cls(torch.tanh(before), log_density(before, noise, log_std), deviation, width)

    def halves(self) -> tuple["ActionSample", "ActionSample"]:
        """Returns the first and the second half of the rows."""
        columns = (self.actions, self.log_density, self.deviation, self.width)
        first, second = zip(*(column.chunk(2) for column in columns), strict=True)
        return ActionSample(*first), ActionSample(*second)

    def output_gradient(self, action_gradient: Tensor, density_gradient: Tensor) -> Tensor:
        """Returns the gradient `[B, 2A]` of a loss at the network's outputs.

        With action a = tanh(u), the log-density's derivative by u is 2a: the Gaussian's own term does not depend on the
        mean, and -d/du log(1 - tanh(u)^2) = 2 tanh(u).

        Args:
            action_gradient: [B, A] gradient of the loss at the actions.
            density_gradient: [] gradient of the loss at every log-density.
        """
        # dL/du = dL/da (1 - a^2) + 2 a dL/dlog p
        before = torch.addcmul(action_gradient, action_gradient, self.actions.square(), value=-1)
        before.addcmul_(density_gradient, self.actions, value=2)
        # du/dlog std = std * noise, and log p contains -log std
        log_std = before * self.deviation - density_gradient
        return torch.cat((before, _HALF_RANGE * log_std * (1 - self.width.square())), dim=-1)


class SquashedGaussian(nn.Module):
    """A tanh-squashed diagonal Gaussian with mean and standard deviation from a ReLU network.

    Args:
        obs_size: D.
        action_size: A.
        hidden: units of each hidden layer.
        generator: draws the initial weights; None takes torch's global one.

    Source: Haarnoja et al. 2018, arXiv:1812.05905, appendix C. As in PEBBLE, log-std is squashed into
    [-5, 2] by a tanh and the layers start orthogonal with zero bias.
    """

    def __init__(
        self, obs_size: int, action_size: int, hidden: Sequence[int], generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.obs_size, self.action_size = obs_size, action_size
        sizes = [obs_size, *hidden, 2 * action_size]
        self.layers = nn.ModuleList(
            nn.Linear(size_in, size_out) for size_in, size_out in zip(sizes, sizes[1:], strict=False)
        )
        for layer in self.linears:
            nn.init.orthogonal_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)

    @property
    def linears(self) -> list[nn.Linear]:
        """Linear layers, from first to last."""
        return list(self.layers)  # pyright: ignore[reportReturnType] a ModuleList does not tell of what

    @torch.no_grad()
    def calibrate(self, centre: Tensor, spread: Tensor) -> None:
        """Makes a fresh network see `(obs - centre) / spread`; both are `[D]`, and are folded into its first layer."""
        first = self.linears[0]
        # W ((x - c) / s) + b = (W / s) x + (b - (W / s) c)
        first.weight.div_(spread)
        first.bias.sub_(first.weight @ centre)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and log-std of the Gaussian before squashing, each `[B, A]`, for `obs` `[B, D]`."""
        mean, raw = self._outputs(obs).chunk(2, dim=-1)
        return mean, _log_std(torch.tanh(raw))

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Samples actions and returns them with their log-densities; gradients flow through both.

        Args:
            obs: [B, D].
            noise: [B, A] standard normal; an argument, so that the caller controls all randomness.

        Returns:
            Actions [B, A] in (-1, 1) and their log-densities [B] in nats.
        """
        draw = ActionSample.of(self._outputs(obs), noise)
        return draw.actions, draw.log_density

    @torch.inference_mode()
    def act(self, obs: Tensor, noise: Tensor | None = None) -> Tensor:
        """Returns actions [B, A] for acting only: the distribution's mode if `noise` is None, else a sample."""
        mean, raw = self._outputs(obs).chunk(2, dim=-1)
        return torch.tanh(mean if noise is None else mean + _log_std(torch.tanh(raw)).exp() * noise)

    def _outputs(self, obs: Tensor) -> Tensor:
        """Returns [B, 2A], the network's output for `obs` [B, D]: means, then the values that become log-std."""
        *inner, last = self.linears
        hidden = obs
        for layer in inner:  # not `layer(hidden)`: for a single row the call of a module costs as much as the product
            hidden = linear(hidden, layer.weight, layer.bias).relu_()
        return linear(hidden, last.weight, last.bias)


def _log_std(width: Tensor) -> Tensor:
    """Returns log-std `[B, A]` for positions between its bounds, -1 to 1."""
    return _HALF_RANGE * width + (LOG_STD_MIN + _HALF_RANGE)


def log_density(before: Tensor, noise: Tensor, log_std: Tensor) -> Tensor:
    """Returns the log-density of `tanh(before)` for `before = mean + exp(log_std) * noise`, in nats.

    Uses log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2x)), which stays finite when tanh saturates.

    Args:
        before: [B, A] actions before squashing.
        noise: [B, A].
        log_std: [B, A].

    Returns:
        [B] sum over the action's dimensions.
    """
    # log p(a) = sum_i  -noise_i^2 / 2 - log std_i - log(2 pi) / 2 - log(1 - tanh(u_i)^2)
    constant = 0.5 * math.log(2 * math.pi) + 2 * math.log(2)
    stretch = before + softplus(-2 * before)
    each = torch.addcmul(2 * stretch - log_std, noise, noise, value=-0.5)
    return each.sum(dim=-1) - constant * noise.shape[-1]
