"""The losses of SAC as pure functions: tensors in, tensors out.

`AutogradUpdate` differentiates them, they are logged, and the tests compare the gradients of `HandWrittenUpdate` with
theirs.
"""

from torch import Tensor


def td_target(
    rewards: Tensor, terminated: Tensor, next_q: Tensor, next_log_density: Tensor, alpha: Tensor, gamma: float
) -> Tensor:
    """Returns the soft one-step target of both critics, in reward units.

    Args:
        rewards: [B].
        terminated: [B] 1 if the episode terminated; a time limit keeps its future.
        next_q: [2, B] target critics at the next obs and a fresh action there.
        next_log_density: [B] log-density of that action, nats.
        alpha: [] temperature.
        gamma: discount in [0, 1).

    Returns:
        [B].

    Source: Haarnoja et al. 2018, arXiv:1812.05905, eq. 5-6, with the smaller of two target critics.
    """
    # y = r + gamma (1 - terminated) (min_k Q_k(s', a') - alpha log p(a' | s'))
    soft_value = next_q.amin(dim=0) - alpha * next_log_density
    return rewards + gamma * (1 - terminated) * soft_value


def critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """Returns the mean squared error of each critic `[2, B]` to `target` `[B]`, summed over the two: a scalar."""
    return (q - target).square().mean(dim=1).sum()


def actor_loss(q: Tensor, log_density: Tensor, alpha: Tensor) -> Tensor:
    """Returns a scalar whose descent raises value and entropy.

    Args:
        q: [2, B] critics at the policy's own actions.
        log_density: [B] log-densities of those actions, nats.
        alpha: [] temperature.

    Source: Haarnoja et al. 2018, arXiv:1812.05905, eq. 7.
    """
    # the smaller of two critics, because a policy seeks out actions that a critic overrates
    return (alpha * log_density - q.amin(dim=0)).mean()


def temperature_loss(log_alpha: Tensor, log_density: Tensor, target_entropy: float) -> Tensor:
    """Returns a scalar whose descent moves the temperature until the policy's entropy is `target_entropy` nats.

    Source: Haarnoja et al. 2018, arXiv:1812.05905, eq. 18; alpha enters as exp(log_alpha).
    """
    return -(log_alpha.exp() * (log_density.detach() + target_entropy)).mean()
