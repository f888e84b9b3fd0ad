"""The networks of SAC as one RLlib module: everything that is trained, and nothing else."""

from collections.abc import Sequence
from typing import Any

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn

from rlvlm.policies.squashed_gaussian import SquashedGaussian

_MIN_SHARE, _MIN_SPREAD = 0.1, 0.01
"""Minimum spread of a dimension, as a share of the largest spread and in units; smaller spreads are raised to it."""


def centre_and_spread(obs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation, `[D]` each, of observations `[N, D]`, the latter with a minimum.

    Initial weights expect inputs of spread 1. For them, positions that differ by centimetres look all alike, although a
    centimetre decides whether a thing is touched.
    """
    spread = obs.std(dim=0, correction=0)
    return obs.mean(dim=0), spread.clamp_min(max(_MIN_SHARE * float(spread.max()), _MIN_SPREAD))


class TwinCritic(nn.Module):
    """Two independent Q networks evaluated together: each layer is one batched matrix product.

    Args:
        obs_size: D.
        action_size: A.
        hidden: units of each hidden layer.
        generator: draws the weights; None takes torch's global one.
    """

    def __init__(
        self, obs_size: int, action_size: int, hidden: Sequence[int], generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        sizes = [obs_size + action_size, *hidden, 1]
        pairs = list(zip(sizes, sizes[1:], strict=False))
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(2, *pair)) for pair in pairs)
        self.biases = nn.ParameterList(nn.Parameter(torch.empty(2, 1, size_out)) for _, size_out in pairs)
        self.reset(generator)

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        """Draws all weights anew: orthogonal, with zero bias."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            for matrix in weight:
                nn.init.orthogonal_(matrix, generator=generator)
            bias.zero_()

    @torch.no_grad()
    def calibrate(self, centre: Tensor, spread: Tensor) -> None:
        """Makes fresh networks see `(obs - centre) / spread`; both are `[D]`."""
        # W ((s - c) / d) + b  =  (W / d) s + (b - (W / d) c): the scale is folded into the weights, and costs no time
        from_obs = self.weights[0][:, : len(spread)]  # [2, D, H], a view
        from_obs.div_(spread[:, None])
        self.biases[0].sub_((centre @ from_obs)[:, None])

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Returns values `[2, B]` of `obs` `[B, D]` and `actions` `[B, A]`."""
        hidden = torch.cat((obs, actions), dim=1).expand(2, -1, -1)
        *inner, (last_weight, last_bias) = zip(self.weights, self.biases, strict=True)
        for weight, bias in inner:
            hidden = torch.relu_(torch.baddbmm(bias, hidden, weight))
        # one output unit: a weighted sum is several times faster here than a matrix product with one column
        return (hidden * last_weight.transpose(1, 2)).sum(dim=-1) + last_bias.squeeze(-1)


class SACModule(TorchRLModule):
    """Policy, twin critic, its slow copy, and the temperature.

    `model_config` contains `hidden` (units per layer) and `initial_alpha`.
    """

    def setup(self) -> None:
        """Builds the networks; RLlib calls it once, after the spaces and `model_config` are known."""
        obs_size, action_size = self.observation_space.shape[0], self.action_space.shape[0]
        hidden = self.model_config["hidden"]
        self.policy = SquashedGaussian(obs_size, action_size, hidden)
        self.critic = TwinCritic(obs_size, action_size, hidden)
        self.target = TwinCritic(obs_size, action_size, hidden).requires_grad_(False)
        self.target.load_state_dict(self.critic.state_dict())
        self.log_alpha = nn.Parameter(torch.tensor(self.model_config["initial_alpha"]).log())

    def calibrate(self, obs: Tensor) -> None:
        """Makes policy, critic and target, all fresh, see observations centred and scaled by `obs` `[N, D]`."""
        for network in (self.policy, self.critic, self.target):
            network.calibrate(*centre_and_spread(obs))

    def restart_critics(self, generator: torch.Generator | None, obs: Tensor | None, value: float) -> None:
        """Gives critic and target the same fresh weights; policy and temperature stay.

        Args:
            generator: draws the weights.
            obs: [N, D] by which their observations are centred and scaled; None keeps the present scale.
            value: approximate initial value of every state.
        """
        self.critic.reset(generator)
        if obs is not None:
            self.critic.calibrate(*centre_and_spread(obs))
        # fresh weights give values near 0: the last bias alone shifts them all
        self.critic.biases[-1].detach().fill_(value)
        self.target.load_state_dict(self.critic.state_dict())

    def _forward(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Returns the policy's modes, for RLlib's own tools; training calls the networks directly."""
        return {Columns.ACTIONS: self.policy.act(batch[Columns.OBS])}
