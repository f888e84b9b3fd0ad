"""The losses of PPO for replies in text, as pure functions: tensors in, tensors out. Called by `objectives`.

Letters: B turns of a minibatch, N tokens of a reply (padded on the right). A mean over turns is a scalar.
"""

import math

import torch
from torch import Tensor

_LARGEST_LOG_RATIO = 20.0
"""Above it exp() is of no use to anybody, and at 89 it is infinite in float32."""


def utterance_log_prob(log_probs: Tensor, is_reply: Tensor, is_action: Tensor, thought_weight: float) -> Tensor:
    """Log-probability of a reply in which thought and action weigh differently, in nats.

    Args:
        log_probs: [B, N] of each sampled token.
        is_reply: [B, N] tokens that were sampled.
        is_action: [B, N] those of them that make the action.
        thought_weight: lambda in [0, 1], the weight of all the others.

    Returns:
        [B] lambda * log p(thought) + log p(action).

    Source: RL4VLM, Zhai et al. 2024, arXiv:2405.10292, eq. 2. Departures: no token of the reply is left out, and the
    action is found in the parsed text instead of by token ids.
    """
    weights = torch.where(is_action, 1.0, thought_weight) * is_reply
    return (log_probs * weights).sum(-1)


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """PPO's loss of each ratio: -min(r A, clip(r, 1 - eps, 1 + eps) A), of any shape.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    ratio = log_ratio.clamp(max=_LARGEST_LOG_RATIO).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def guarded_surrogate(log_ratio: Tensor, advantages: Tensor, clip: float, largest_ratio: float) -> Tensor:
    """`clipped_surrogate` of scalar ratios `[B]`; when any exceeds `largest_ratio`, only the clipped term is kept.

    Source: what RL4VLM's code does with ratios above 10; the paper does not say so.
    """
    ratio = log_ratio.clamp(max=_LARGEST_LOG_RATIO).exp()
    if bool((ratio > largest_ratio).any()):
        return -ratio.clamp(1 - clip, 1 + clip) * advantages
    return clipped_surrogate(log_ratio, advantages, clip)


def per_turn(token_losses: Tensor, is_reply: Tensor) -> Tensor:
    """Scalar: losses `[B, N]` summed over the reply's tokens, mean over turns: the policy gradient of whole replies."""
    return (token_losses * is_reply).sum(-1).mean()


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, >= 0, nats: r - 1 - log r with r = reference / policy.

    Source: Schulman 2020, "Approximating KL divergence", estimator k3. Unbiased where the tokens are the policy's own.
    """
    log_ratio = (reference - log_probs).clamp(max=_LARGEST_LOG_RATIO)
    return log_ratio.exp() - 1 - log_ratio


def surrogate_gain(log_ratio: Tensor, advantages: Tensor, is_reply: Tensor, clip: float) -> Tensor:
    """What each turn adds to the surrogate objective of a policy that has not learned from it yet.

    Args:
        log_ratio: [B, N] of each sampled token, now less when it was sampled.
        advantages: [B, 1] or [B, N].
        is_reply: [B, N] tokens that were sampled.
        clip: ratios farther than this from 1 count as this far, so that no single token decides.

    Returns:
        [B] sum over tokens of (r - 1) A; 0 on average where the advantages are chance.
    """
    change = log_ratio.clamp(max=_LARGEST_LOG_RATIO).exp().clamp(1 - clip, 1 + clip) - 1
    return (change * advantages * is_reply).sum(-1)


def kept_share(gains: Tensor) -> float:
    """Share in [0, 1] of an update that is more than chance, by what it brought to envs it had not learned from.

    With mean m and standard error s of the `gains` it is 1 - (s / m)^2, and 0 where m <= s: the part of m^2 that the
    envs' scatter does not explain. Two gains at least are needed; with fewer all is kept.

    Args:
        gains: [W] `surrogate_gain` of each env's turns, envs being independent of each other.

    Source: the shrinkage of James and Stein 1961, its positive part, for a single number.
    """
    if len(gains) < 2:
        return 1.0
    mean, error = float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))
    return 1 - (error / mean) ** 2 if mean > error else 0.0


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """Half the squared error, of any shape."""
    return 0.5 * (values - returns).square()


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half the larger squared error of the value and of the value kept within `clip` of the old one, of any shape.

    Source: OpenAI baselines' PPO2, which RL4VLM follows.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(value_loss(values, returns), value_loss(near, returns))
