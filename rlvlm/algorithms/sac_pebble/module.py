"""The networks of SAC as one RLlib module: everything that is trained, and nothing else."""

from collections.abc import Sequence
from typing import Any

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn

from rlvlm.policies.squashed_gaussian import SquashedGaussian


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
            for one in weight:
                nn.init.orthogonal_(one, generator=generator)
            bias.zero_()

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Values `[2, B]` of `obs` `[B, D]` and `actions` `[B, A]`."""
        hidden = torch.cat((obs, actions), dim=1).expand(2, -1, -1)
        *inner, (last_weight, last_bias) = zip(self.weights, self.biases, strict=True)
        for weight, bias in inner:
            hidden = torch.relu_(torch.baddbmm(bias, hidden, weight))
        # One output unit: a weighted sum is several times faster here than a matrix product with one column.
        return (hidden * last_weight.transpose(1, 2)).sum(dim=-1) + last_bias.squeeze(-1)


class SACModule(TorchRLModule):
    """Policy, twin critic, its slow copy, and the temperature.

    `model_config` holds `hidden` (units per layer) and `initial_alpha`.
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

    def restart_critics(self, generator: torch.Generator | None) -> None:
        """Forgets all values: critic and target get the same fresh weights; policy and temperature stay."""
        self.critic.reset(generator)
        self.target.load_state_dict(self.critic.state_dict())

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The policy's modes, for RLlib's own tools; our hot path calls the networks directly."""
        return {Columns.ACTIONS: self.policy.act(batch[Columns.OBS])}
