"""What an update descends, as pure functions: tensors in, tensors out. The learner calls `total_loss`.

Letters: B turns of a minibatch, N tokens of an answer (padded on the right).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlvlm.algorithms.policy_gradient.config import Averaging, LossConfig
from rlvlm.core.plugins import find_registered

_LARGEST_LOG_RATIO = 20.0
"""Above it exp() is of no use to anybody, and at 89 it is infinite in float32."""
PolicyLoss = Callable[[Tensor, Tensor, LossConfig], Tensor]
"""Of log-ratios [B, N] (or [B, 1] of whole replies) and advantages of that shape or [B, 1]: the loss of each."""
POLICY_LOSSES: dict[str, PolicyLoss] = {}
"""By name, as `algo.loss.policy` has it."""


def policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Registers the decorated function under `name`."""

    def register(compute: PolicyLoss) -> PolicyLoss:
        POLICY_LOSSES[name] = compute
        return compute

    return register


def find_policy_loss(name: str) -> PolicyLoss:
    """The loss of that name, or `module:FUNCTION` of somebody's own.

    Raises:
        UsageError: there is none, or it takes other arguments than a `PolicyLoss`.
    """
    takes = ("log_ratio", "advantages", "config")
    return find_registered(name, POLICY_LOSSES, "algo.loss.policy", "policy_loss", takes=takes)


def total_loss(  # noqa: PLR0913 - all that a turn is learned from
    config: LossConfig,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    weights: Tensor,
    is_action: Tensor,
    advantages: Tensor,
    action_size: int = 1,
    values: Tensor | None = None,
    old_values: Tensor | None = None,
    returns: Tensor | None = None,
    entropies: Tensor | None = None,
    reference: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of B turns, as they were sampled and as the policy sees them now: weighted sums over their tokens, and
    the mean over turns of the critic's error.

    Args:
        config: what is weighed, and how.
        log_probs: [B, N] of the sampled tokens now, with gradient.
        old_log_probs: [B, N] when they were sampled.
        weights: [B, N] as `token_weights` gives them; 0 for tokens that teach nothing.
        is_action: [B, N] bool, tokens that make the action; all others are a thought.
        advantages: [B] or [B, N].
        action_size: tokens of an action, of answers that hold several.
        values: [B] or [B, N] as the advantages, with gradient; read where there are returns.
        old_values: likewise when they were sampled.
        returns: likewise, the critic's targets; None without a critic.
        entropies: [B, N] of the tokens' distributions, with gradient, where they are weighed.
        reference: [B, N] log-probabilities of the policy that learning started from, where the divergence is weighed.

    Returns:
        Scalars, of which the learner descends the sum of the first three: the policy's loss, the critic's times its
        weight, the weighted divergence from the reference less the weighted entropy; and without gradient the share of
        ratios outside the clip range.

    Raises:
        ValueError: the reference is missing, or given without a weight.
    """
    if (reference is None) != (config.kl_weight == 0):
        raise ValueError(f"kl_weight {config.kl_weight} and log-probs of a reference go together: give both or neither")
    is_token = weights > 0
    log_ratio = log_ratios(log_probs, old_log_probs, is_token, is_action, config, action_size)
    per_token = advantages if advantages.ndim == 2 else advantages.unsqueeze(-1)
    per_ratio = weights[:, : log_ratio.shape[1]]
    policy = (find_policy_loss(config.policy)(log_ratio, per_token, config) * per_ratio).sum()
    # L = sum_n w_n L_pi,n + kl_weight KL(policy || reference) - entropy_weight H + value_weight L_V
    rest = policy.new_zeros(())
    if reference is not None:
        rest = rest + config.kl_weight * (k3(log_probs, reference) * weights).sum()
    if config.entropy_weight:
        assert entropies is not None, "asked for"
        # of actions alone: a thought that is drawn more evenly explores nothing
        rest = rest - config.entropy_weight * (entropies * weights * is_action).sum()
    value = policy.new_zeros(())
    if returns is not None:
        assert values is not None and old_values is not None, "a critic has values"
        errors = value_loss(values, old_values, returns, config.value_clip)
        if errors.ndim == 2:  # mean over each answer's tokens
            errors = (errors * is_token).sum(-1) / is_token.sum(-1).clamp_min(1)
        value = config.value_weight * errors.mean()
    with torch.no_grad():
        ratio = log_ratio.exp()
        is_outside = (ratio < 1 - config.clip_low) | (ratio > 1 + config.clip_high)
        clipped = (is_outside & (per_ratio > 0)).sum() / (per_ratio > 0).sum().clamp_min(1)
    return policy, value, rest, clipped


def log_ratios(
    log_probs: Tensor, old_log_probs: Tensor, is_token: Tensor, is_action: Tensor, config: LossConfig, action_size: int
) -> Tensor:
    """The logarithm of new over old probability: [B, N], equal within an action or an answer, 0 where nothing teaches;
    or [B, 1] of whole replies in which thoughts weigh less. The arguments are those of `total_loss`.

    Source of the weighing: RL4VLM, Zhai et al. 2024, arXiv:2405.10292, eq. 2. Departures: no token of the reply is left
    out, and the action is found in the parsed text instead of by token ids.
    """
    differences = torch.where(is_token, log_probs - old_log_probs, 0.0)
    if config.ratio == "token":
        return differences
    if config.ratio == "weighted":  # log r = lambda log r(thought) + log r(action), eq. 2
        return (differences * torch.where(is_action, 1.0, config.thought_weight)).sum(-1, keepdim=True)
    if config.ratio == "answer":  # one ratio for the whole answer, which every token of it carries
        return differences.sum(dim=1, keepdim=True) * is_token
    per_action = differences.view(len(differences), -1, action_size).sum(dim=2)
    return per_action.repeat_interleave(action_size, dim=1) * is_token


@policy_loss("clipped")
def clipped(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """PPO's pessimistic surrogate: max(-A r, -A clip(r, 1 - low, 1 + high)); at A < 0 at most -A c with a dual clip c.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; Yu et al. 2025, arXiv:2503.14476 (two clips); Ye et al. 2020,
    arXiv:1912.09729 (dual clip).
    """
    # the larger loss of the two: a good token gains nothing more beyond 1 + high, a bad one nothing below 1 - low
    ratio = log_ratio.clamp(max=_LARGEST_LOG_RATIO).exp()
    near = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * near)
    if config.dual_clip is not None:
        # a token that has become likely and is bad would else lose without bound
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * config.dual_clip), loss)
    return loss


@policy_loss("guarded")
def guarded(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """`clipped`, of which only the clipped term is kept when any ratio exceeds `largest_ratio`.

    Source: what RL4VLM's code does with ratios above 10; the paper does not say so.
    """
    ratio = log_ratio.clamp(max=_LARGEST_LOG_RATIO).exp()
    if bool((ratio > config.largest_ratio).any()):
        return -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return clipped(log_ratio, advantages, config)


def token_weights(
    is_token: Tensor,
    episodes: Tensor,
    num_episodes: int,
    average: Averaging,
    *,
    action_size: int = 1,
    longest_steps: int = 1,
) -> Tensor:
    """What each token counts in the mean over a whole update, so that the loss is the weighted sum.

    Args:
        is_token: [M, N] tokens of answers, or of those steps of a chunk that were run.
        episodes: [M] the episode, 0 to num_episodes - 1, that each turn belongs to.
        num_episodes: those that take part; dropped groups are not among them.
        average: see `LossConfig`.
        action_size: tokens of an action.
        longest_steps: actions of the longest possible episode.

    Returns:
        [M, N], 0 where there is no token. For trajectory and token they sum to 1.
    """
    # each so that sum_n w_n L_n is the mean in question; chunks count by actions, of `action_size` tokens each
    mask = is_token.float()
    if average == "turn":
        return mask / len(mask)
    if average == "trajectory":
        steps = mask.sum(dim=1) / action_size
        lengths = torch.zeros(num_episodes, device=mask.device).index_add_(0, episodes, steps)
        weights = mask / (lengths[episodes][:, None] * num_episodes)
    elif average == "token":
        weights = mask / (mask.sum() / action_size)
    else:
        weights = mask / (longest_steps * num_episodes)
    return weights / action_size


def truncated_importance(trainer: Tensor, engine: Tensor, is_token: Tensor, config: LossConfig) -> Tensor:
    """What each token counts, as it came from another policy than the one that learns: min(cap, trainer / engine).

    Args:
        trainer: [B, N] log-probabilities of the sampled tokens under the weights that are trained, before the update.
        engine: [B, N] those that the engine gave with them.
        is_token: [B, N] tokens that were sampled.
        config: `correction` and `correction_cap`.

    Returns:
        [B, N] in (0, cap]; 1 where there is no token. With `sequence` all tokens of an answer count the same.

    Source: truncation of importance weights, Ionides 2008, J. Comput. Graph. Stat. 17(2); in reinforcement learning
    Espeholt et al. 2018 (IMPALA), arXiv:1802.01561. Departure: the trainer's and the engine's weights are of one
    version, so what is corrected is the difference of two programs, and PPO's ratio starts from the trainer's.
    """
    log_ratio = torch.where(is_token, trainer - engine, 0.0)
    if config.correction == "sequence":  # the product over an answer is its own importance weight
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    return torch.where(is_token, log_ratio.clamp(-_LARGEST_LOG_RATIO, math.log(config.correction_cap)).exp(), 1.0)


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, >= 0, nats: r - 1 - log r with r = reference / policy.

    Source: Schulman 2020, "Approximating KL divergence", estimator k3. Unbiased where the tokens are the policy's own.
    """
    log_ratio = (reference - log_probs).clamp(max=_LARGEST_LOG_RATIO)
    return log_ratio.exp() - 1 - log_ratio


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None) -> Tensor:
    """Half the squared error, of any shape; with a clip the larger of it and that of the value kept near the old one.

    Source of the clip: OpenAI baselines' PPO2, which RL4VLM follows.
    """
    plain = 0.5 * (values - returns).square()
    if clip is None:
        return plain
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(plain, 0.5 * (near - returns).square())


def surrogate_gain(log_ratio: Tensor, advantages: Tensor, is_token: Tensor, clip: float) -> Tensor:
    """What each turn adds to the surrogate objective of a policy that has not learned from it yet.

    Args:
        log_ratio: [B, N] of each sampled token, now less when it was sampled.
        advantages: [B, 1] or [B, N].
        is_token: [B, N] tokens that were sampled.
        clip: ratios farther than this from 1 count as this far, so that no single token decides.

    Returns:
        [B] sum over tokens of (r - 1) A; 0 on average where the advantages are chance.
    """
    change = log_ratio.clamp(max=_LARGEST_LOG_RATIO).exp().clamp(1 - clip, 1 + clip) - 1
    return (change * advantages * is_token).sum(-1)


def kept_share(gains: Tensor) -> float:
    """Share in [0, 1] of an update that is more than chance, by what it brought to episodes it had not learned from.

    With mean m and standard error s of the `gains` it is 1 - (s / m)^2, and 0 where m <= s: the part of m^2 that the
    episodes' scatter does not explain. Two gains at least are needed; with fewer all is kept.

    Args:
        gains: [W] `surrogate_gain` of each env's turns, envs being independent of each other.

    Source: the shrinkage of James and Stein 1961, its positive part, for a single number.
    """
    if len(gains) < 2:
        return 1.0
    # E[m^2] = mu^2 + s^2: the share of m^2 that is mu^2 is estimated by 1 - s^2 / m^2
    mean, error = float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))
    return 1 - (error / mean) ** 2 if mean > error else 0.0
