"""The maths of GRPO's update as pure functions: tensors in, tensors out. The learner calls them.

Shapes: B chunks in a batch, L env steps of a chunk, D dimensions of an action, so L * D tokens of a chunk.
"""

import torch
from torch import Tensor

from rlvlm.algorithms.grpo.config import Averaging, Granularity, LossConfig


def step_mask(steps: Tensor, chunk_steps: int) -> Tensor:
    """`[B, L]` 1 for the env steps that were carried out, up to and including the one that ended the episode.

    Args:
        steps: [B] env steps run in each chunk, 0 to L.
        chunk_steps: L.
    """
    return (torch.arange(chunk_steps, device=steps.device) < steps[:, None]).float()


def token_weights(
    steps: Tensor,
    episodes: Tensor,
    num_episodes: int,
    *,
    chunk_steps: int,
    action_size: int,
    average: Averaging,
    longest_steps: int,
) -> Tensor:
    """What each token counts in the mean over a whole update, so that the loss is the weighted sum.

    Args:
        steps: [B] env steps run in each chunk.
        episodes: [B] the episode, 0 to num_episodes - 1, that each chunk belongs to.
        num_episodes: those that take part; dropped groups are not among them.
        chunk_steps: L.
        action_size: D.
        average: see `LossConfig`.
        longest_steps: env steps of the longest possible episode.

    Returns:
        [B, L * D], 0 for tokens of steps that were not run. For trajectory and token they sum to 1.
    """
    mask = step_mask(steps, chunk_steps)
    if average == "trajectory":
        lengths = torch.zeros(num_episodes, device=steps.device).index_add_(0, episodes, mask.sum(dim=1))
        weights = mask / (lengths[episodes][:, None] * num_episodes)
    elif average == "token":
        weights = mask / mask.sum()
    else:
        weights = mask / (longest_steps * num_episodes)
    return (weights / action_size).repeat_interleave(action_size, dim=1)


def log_ratios(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, granularity: Granularity, action_size: int
) -> Tensor:
    """The logarithm of new over old probability, one for each token, each equal within its action or chunk.

    Args:
        log_probs: [B, L * D] of the sampled tokens under the present policy.
        old_log_probs: [B, L * D] under the policy that sampled them.
        mask: [B, L * D] 1 for tokens that were drawn, of steps that were run; others have no part in a chunk's ratio.
        granularity: over how many tokens probabilities are multiplied.
        action_size: D.

    Returns:
        [B, L * D]; 0 where `mask` is.
    """
    differences = (log_probs - old_log_probs) * mask
    if granularity == "token":
        return differences
    if granularity == "chunk":
        return differences.sum(dim=1, keepdim=True) * mask
    per_action = differences.view(len(differences), -1, action_size).sum(dim=2)
    return per_action.repeat_interleave(action_size, dim=1) * mask


def clipped_loss(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """PPO's pessimistic objective for each token, to be descended.

    Args:
        log_ratio: [B, L * D].
        advantages: [B] of the episode that each chunk belongs to.
        config: the clips.

    Returns:
        [B, L * D]: max(-A r, -A clip(r, 1 - low, 1 + high)); at A < 0 at most -A c with a dual clip of c.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; Yu et al. 2025, arXiv:2503.14476 (two clips); Ye et al. 2020,
    arXiv:1912.09729 (dual clip).
    """
    advantage = advantages[:, None]
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - config.clip_low, 1 + config.clip_high))
    if config.dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * config.dual_clip), loss)
    return loss


def kl_k3(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """Estimate of KL(present || other) from samples of the present policy, for each token; never negative.

    q/p - log(q/p) - 1 with p the present and q the other probability of the sampled token.

    Source: Schulman 2020, "Approximating KL divergence", estimator k3; Shao et al. 2024, arXiv:2402.03300, eq. 4.
    """
    log_ratio = other_log_probs - log_probs
    return log_ratio.exp() - log_ratio - 1


def update_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    config: LossConfig,
    action_size: int,
    reference_log_probs: Tensor | None = None,
) -> Tensor:
    """What a minibatch contributes to the loss of its update: a scalar; those of all minibatches add up.

    Args:
        log_probs: [B, L * D] under the present policy.
        old_log_probs: [B, L * D] under the policy that drew the tokens.
        advantages: [B] of the episode that each chunk belongs to.
        weights: [B, L * D] as `token_weights` gives them.
        config: ratio, clips and the weight of the divergence.
        action_size: D.
        reference_log_probs: [B, L * D] under the policy that SFT made; needed when `kl_weight` is above 0.

    Raises:
        ValueError: the reference is missing, or given without a weight.
    """
    if (reference_log_probs is None) != (config.kl_weight == 0):
        raise ValueError(f"kl_weight {config.kl_weight} and log-probs of a reference go together: give both or neither")
    mask = (weights > 0).to(log_probs.dtype)
    ratios = log_ratios(log_probs, old_log_probs, mask, config.ratio, action_size)
    per_token = clipped_loss(ratios, advantages, config)
    if reference_log_probs is not None:
        per_token = per_token + config.kl_weight * kl_k3(log_probs, reference_log_probs)
    return (per_token * weights).sum()
