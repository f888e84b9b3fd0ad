"""The update of SAC with its backward passes written out: the one that runs use."""

import torch
from torch import Tensor

from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sac_pebble.module import SACModule
from rlvlm.algorithms.sac_pebble.replay import Batch
from rlvlm.algorithms.sac_pebble.update import losses
from rlvlm.algorithms.sac_pebble.update.stack import DenseStack, Layer
from rlvlm.algorithms.sac_pebble.update.update import CriticStats, PolicyStats
from rlvlm.policies.squashed_gaussian import ActionSample


class HandWrittenUpdate:
    """The gradients of `AutogradUpdate`, without its bookkeeping: every derivative is a formula.

    Args:
        networks: every trained parameter has memory for its gradient in `grad`, and keeps both for good.
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
        self._here: ActionSample  # at batch.obs, from the pass that `critic_gradients` made

    @torch.no_grad()
    def critic_gradients(self, batch: Batch, noise: Tensor) -> CriticStats:
        """Gradients of both critics; draws the actions at `batch.obs` as well, since one pass makes both."""
        outputs = self._policy.forward(torch.cat((batch.next_obs, batch.obs)))
        ahead, self._here = ActionSample.of(outputs[0], noise.flatten(0, 1)).halves()
        # Critic target and loss, with (a', log p') drawn from the policy at s':
        #   y   = r + gamma (1 - terminated) (min_k Q_target_k(s', a') - alpha log p')
        #   L_Q = sum_k mean_B (Q_k(s, a) - y)^2          dL_Q / dQ_k = 2 (Q_k - y) / B
        next_q = self._target.forward(torch.cat((batch.next_obs, ahead.actions), dim=1)).squeeze(2)
        alpha = self._log_alpha.exp()
        target = losses.td_target(batch.rewards, batch.terminated, next_q, ahead.log_density, alpha, self._gamma)
        q = self._critic.forward(batch.obs_and_actions).squeeze(2)
        self._critic.backward(losses.critic_gradient(q, target).unsqueeze(2))
        return CriticStats(q, target)

    @torch.no_grad()
    def policy_gradients(self, batch: Batch, noise: Tensor) -> PolicyStats:
        """Gradients of policy and temperature for the actions that `critic_gradients` drew from this noise."""
        here, alpha = self._here, self._log_alpha.exp()
        count, num_actions = batch.actions.shape
        # Policy loss, with (a, log p) drawn from the policy at s:
        #   L_pi = mean_B (alpha log p - min_k Q_k(s, a))
        #   dL_pi / dQ_k = -1 / B for the smaller critic, else 0;   dL_pi / dlog p = alpha / B
        # From there down to a = tanh(mean + std * noise), and from a and log p down to the policy's outputs.
        q = self._critic.forward(torch.cat((batch.obs, here.actions), dim=1)).squeeze(2)
        action_gradient = self._critic.input_gradient(
            q.new_full((count, 1), -1 / count), losses.smaller_critic(q), first_input=batch.obs.shape[1]
        )
        self._policy.backward(here.output_gradient(action_gradient, alpha / count).unsqueeze(0), first_row=count)
        # Temperature loss, with the target entropy -A:
        #   L_alpha = -alpha mean_B (log p - A)           dL_alpha / dlog alpha = L_alpha, since alpha = exp(log alpha)
        assert self._log_alpha.grad is not None, "the learner gives every trained parameter memory for its gradient"
        self._log_alpha.grad.fill_(losses.temperature_gradient(alpha, here.log_density, -num_actions))
        return PolicyStats(q, here.log_density, alpha)
