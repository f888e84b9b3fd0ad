"""The update of SAC: gradients for the learner's steps, written by hand for speed, or by autograd.

Both classes write the gradients of the losses into the networks' `grad`, critics first; the learner takes the steps.
Both methods get the same batch and noise, so a class may keep shared results.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rlvlm.algorithms.sac_pebble import losses
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sac_pebble.dense import DenseStack, Layer
from rlvlm.algorithms.sac_pebble.module import SACModule
from rlvlm.algorithms.sac_pebble.replay import ReplayBatch
from rlvlm.policies.squashed_gaussian import ActionSample

CriticValues = tuple[Tensor, Tensor]
"""[2, B] values of the batch's actions and [B] their targets, for logging the loss."""
PolicyValues = tuple[Tensor, Tensor, Tensor]
"""[2, B] values of the policy's own actions, [B] their log-densities in nats, [] the temperature."""


class HandWrittenUpdate:
    """The gradients of `AutogradUpdate`, without its bookkeeping: every derivative is a formula.

    Args:
        networks: every trained parameter has allocated its `grad`, and both stay in place.
        sac: batch size and discount.
    """

    def __init__(self, networks: SACModule, sac: SACConfig) -> None:
        self._gamma = sac.gamma
        self._log_alpha = networks.log_alpha
        self._policy = DenseStack([Layer.linear(layer) for layer in networks.policy.linears], 2 * sac.batch_size)
        self._critic, self._target = (
            DenseStack(
                [Layer.batched(*pair) for pair in zip(critic.weights, critic.biases, strict=True)], sac.batch_size
            )
            for critic in (networks.critic, networks.target)
        )
        self._here: ActionSample  # at batch.obs, from the pass in `critic_gradients`

    @torch.no_grad()
    def critic_gradients(self, batch: ReplayBatch, noise: Tensor) -> CriticValues:
        """Computes the gradients of both critics, and draws the actions at `batch.obs`, because one pass makes both.

        Args:
            batch: B transitions.
            noise: [2, B, A] standard normal: of the actions at `batch.next_obs`, then of those at `batch.obs`.
        """
        outputs = self._policy.forward(torch.cat((batch.next_obs, batch.obs)))
        ahead, self._here = ActionSample.of(outputs[0], noise.flatten(0, 1)).halves()
        # Critic target and loss, with (a', log p') drawn from the policy at s':
        #   y   = r + gamma (1 - terminated) (min_k Q_target_k(s', a') - alpha log p')
        #   L_Q = sum_k mean_B (Q_k(s, a) - y)^2          dL_Q / dQ_k = 2 (Q_k - y) / B
        next_q = self._target.forward(torch.cat((batch.next_obs, ahead.actions), dim=1)).squeeze(2)
        alpha = self._log_alpha.exp()
        target = losses.td_target(batch.rewards, batch.terminated, next_q, ahead.log_density, alpha, self._gamma)
        q = self._critic.forward(batch.obs_and_actions).squeeze(2)
        self._critic.backward((q - target).mul_(2 / q.shape[1]).unsqueeze(2))
        return q, target

    @torch.no_grad()
    def policy_gradients(self, batch: ReplayBatch, noise: Tensor) -> PolicyValues:
        """Computes the gradients of policy and temperature, with the present critics, for the actions that
        `critic_gradients` drew from this noise.
        """
        here, alpha = self._here, self._log_alpha.exp()
        count, num_actions = batch.actions.shape
        # Policy loss, with (a, log p) drawn from the policy at s:
        #   L_pi = mean_B (alpha log p - min_k Q_k(s, a))
        #   dL_pi / dQ_k = -1 / B for the smaller critic, else 0;   dL_pi / dlog p = alpha / B
        # From there down to a = tanh(mean + std * noise), and from a and log p down to the policy's outputs.
        q = self._critic.forward(torch.cat((batch.obs, here.actions), dim=1)).squeeze(2)
        action_gradient = self._critic.input_gradient(
            q.new_full((count, 1), -1 / count), (q[1] < q[0]).long(), first_input=batch.obs.shape[1]
        )
        self._policy.backward(here.output_gradient(action_gradient, alpha / count).unsqueeze(0), first_row=count)
        # Temperature loss, with the target entropy -A:
        #   L_alpha = -alpha mean_B (log p - A)           dL_alpha / dlog alpha = L_alpha, since alpha = exp(log alpha)
        assert self._log_alpha.grad is not None, "the learner gives every trained parameter memory for its gradient"
        self._log_alpha.grad.fill_(-alpha * (here.log_density.mean() - num_actions))
        return q, here.log_density, alpha


class AutogradUpdate:
    """The same update by autograd, somewhat slower; the place to try a change of the losses.

    Args:
        networks: every trained parameter has allocated its `grad`.
        sac: discount.
    """

    def __init__(self, networks: SACModule, sac: SACConfig) -> None:
        self._networks = networks
        self._gamma = sac.gamma

    def critic_gradients(self, batch: ReplayBatch, noise: Tensor) -> CriticValues:
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
        return q.detach(), target

    def policy_gradients(self, batch: ReplayBatch, noise: Tensor) -> PolicyValues:
        """Raises value and entropy of the policy's actions, and moves the temperature towards the target entropy."""
        networks, target_entropy = self._networks, -float(batch.actions.shape[1])
        alpha = networks.log_alpha.detach().exp()
        with torch.enable_grad():
            actions, log_density = networks.policy.sample(batch.obs, noise[1])
            q = networks.critic(batch.obs, actions)
            _differentiate(losses.actor_loss(q, log_density, alpha), networks.policy.parameters())
            temperature_loss = losses.temperature_loss(networks.log_alpha, log_density.detach(), target_entropy)
            _differentiate(temperature_loss, [networks.log_alpha])
        return q.detach(), log_density.detach(), alpha


def _differentiate(loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
    """Writes the gradient of `loss` into `grad` of these parameters, and of no others."""
    listed = list(parameters)
    for parameter, gradient in zip(listed, torch.autograd.grad(loss, listed), strict=True):
        assert parameter.grad is not None, "the learner gives every trained parameter memory for its gradient"
        parameter.grad.copy_(gradient)


UPDATES = {"by_hand": HandWrittenUpdate, "autograd": AutogradUpdate}
"""Implementations by name, as in `SACConfig.update`."""
