"""What an update of SAC gives the learner: gradients to step along, and readings to log. Members: by hand, autograd."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rlvlm.algorithms.sac_pebble.replay import Batch
from rlvlm.algorithms.sac_pebble.update import losses
from rlvlm.core import metrics


@dataclass(frozen=True, slots=True)
class CriticStats:
    """What an update of the critics computed that is worth logging, when somebody asks."""

    q: Tensor
    """[2, B] of the batch's actions."""
    target: Tensor
    """[B]."""

    def metrics(self) -> dict[str, float]:
        """Loss and mean value by their names in `rlvlm.core.metrics`."""
        return {
            metrics.CRITIC_LOSS: losses.critic_loss(self.q, self.target).item(),
            metrics.Q_MEAN: self.q.mean().item(),
        }


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """What an update of policy and temperature computed that is worth logging."""

    q: Tensor
    """[2, B] of the policy's own actions."""
    log_density: Tensor
    """[B] of those, nats."""
    alpha: Tensor
    """[]."""

    def metrics(self) -> dict[str, float]:
        """Loss, temperature and entropy by their names in `rlvlm.core.metrics`."""
        return {
            metrics.ACTOR_LOSS: losses.actor_loss(self.q, self.log_density, self.alpha).item(),
            metrics.ALPHA: self.alpha.item(),
            metrics.ENTROPY: -self.log_density.mean().item(),
        }


class Update(Protocol):
    """Writes the gradients of SAC's losses into the networks' `grad`; the learner takes the steps.

    Both methods get the same batch and noise, critics first: a member may keep what both need.
    """

    def critic_gradients(self, batch: Batch, noise: Tensor) -> CriticStats:
        """Gradients of both critics.

        Args:
            batch: B transitions.
            noise: [2, B, A] standard normal: of the actions at `batch.next_obs`, then of those at `batch.obs`.
        """
        ...

    def policy_gradients(self, batch: Batch, noise: Tensor) -> PolicyStats:
        """Gradients of policy and temperature, with the critics as they are now; arguments as above."""
        ...
