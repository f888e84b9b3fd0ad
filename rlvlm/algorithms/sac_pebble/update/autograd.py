"""The update of SAC as one reads it in the paper: losses, and torch's autograd. What `by_hand` is held to."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sac_pebble.module import SACModule
from rlvlm.algorithms.sac_pebble.replay import Batch
from rlvlm.algorithms.sac_pebble.update import losses
from rlvlm.algorithms.sac_pebble.update.update import CriticStats, PolicyStats


class AutogradUpdate:
    """Somewhat slower than `HandWrittenUpdate`; the place to try a change of the losses.

    Args:
        networks: every trained parameter has memory for its gradient in `grad`.
        sac: discount.
    """

    def __init__(self, networks: SACModule, sac: SACConfig) -> None:
        self._networks = networks
        self._gamma = sac.gamma

    def critic_gradients(self, batch: Batch, noise: Tensor) -> CriticStats:
        """Descends the critics' squared distance from the soft target."""
        networks = self._networks
        with torch.no_grad():
            actions, log_density = networks.policy.sample(batch.next_obs, noise[0])
            next_q = networks.target(batch.next_obs, actions)
            alpha = networks.log_alpha.exp()
            target = losses.td_target(batch.rewards, batch.terminated, next_q, log_density, alpha, self._gamma)
        with torch.enable_grad():
            q = networks.critic(batch.obs, batch.actions)
            _differentiate(losses.critic_loss(q, target), networks.critic.parameters())
        return CriticStats(q.detach(), target)

    def policy_gradients(self, batch: Batch, noise: Tensor) -> PolicyStats:
        """Raises value and entropy of the policy's actions, and moves the temperature towards the target entropy."""
        networks, target_entropy = self._networks, -float(batch.actions.shape[1])
        alpha = networks.log_alpha.detach().exp()
        with torch.enable_grad():
            actions, log_density = networks.policy.sample(batch.obs, noise[1])
            q = networks.critic(batch.obs, actions)
            _differentiate(losses.actor_loss(q, log_density, alpha), networks.policy.parameters())
            temperature_loss = losses.temperature_loss(networks.log_alpha, log_density.detach(), target_entropy)
            _differentiate(temperature_loss, [networks.log_alpha])
        return PolicyStats(q.detach(), log_density.detach(), alpha)


def _differentiate(loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
    """Writes the gradient of `loss` into `grad` of these parameters, and of no others."""
    listed = list(parameters)
    for parameter, gradient in zip(listed, torch.autograd.grad(loss, listed), strict=True):
        assert parameter.grad is not None, "the learner gives every trained parameter memory for its gradient"
        parameter.grad.copy_(gradient)
