"""Losses of an update, as pure functions: tensors in, tensors out. The learner calls `total_loss`.

Letters: B turns of a minibatch, N tokens of an answer (padded on the right).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlvlm.algorithms.policy_gradient.config import Averaging, LossConfig
from rlvlm.core.episodes import Answer, Observations, TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.core.references import find_registered

_MAX_LOG_RATIO = 20.0
"""Bound on log-ratios: larger ones are useless, and at 89 exp() is infinite in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """B answers of N elements each (tokens, numbers of a chunk), padded on the right: as they were sampled, and under
    the present policy.
    """

    log_probs: Tensor
    """[B, N] present log-probs of the sampled elements, with gradient."""
    old_log_probs: Tensor
    """[B, N] log-probs at sampling."""
    weights: Tensor
    """[B, N] weights from `token_weights`; 0 for elements without a loss."""
    is_action: Tensor
    """[B, N] bool, elements of the action; all others belong to a thought."""
    advantages: Tensor
    """[B] or [B, N]."""
    action_size: int = 1
    """Elements of an action, for answers with several actions."""
    values: Tensor | None = None
    """[B] or [B, N] values shaped like the advantages, with gradient; used if there are returns."""
    old_values: Tensor | None = None
    """Values at sampling, shaped like `values`."""
    returns: Tensor | None = None
    """Targets of the critic, shaped like `values`; None without a critic."""
    entropies: Tensor | None = None
    """[B, N] entropies of the elements' distributions, with gradient, if they have a weight."""
    reference: Tensor | None = None
    """[B, N] log-probs of the policy from which learning started, if the divergence has a weight."""
    obs: Observations | None = None
    """B observations before the answers."""
    answers: Sequence[Answer] = ()
    """B answers, in the policy's own form."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """[B, N] or [B] by name: tensors of the episodes that a custom loss requests, see `policy_loss`."""

    @property
    def mask(self) -> Tensor:
        """[B, N] bool, elements with a loss."""
        return self.weights > 0

    @property
    def advantage_rows(self) -> Tensor:
        """[B, 1] or [B, N]."""
        return self.advantages if self.advantages.ndim == 2 else self.advantages.unsqueeze(-1)

    def log_ratio(self, config: LossConfig) -> Tensor:
        """Returns [B, N] or, for whole answers, [B, 1]; see `log_ratios`."""
        return log_ratios(
            self.log_probs, self.old_log_probs, self.mask, self.is_action, config, self.action_size
        )  # fmt: skip


Compute = Callable[[MiniBatch, LossConfig], tuple[Tensor, Mapping[str, Tensor]]]
"""Function that returns the loss of each element [B, N], or answer [B, 1], and the minibatch's metrics: scalars by
name."""
Extras = Callable[[TokenEpisode], Mapping[str, Any]]
"""Function that returns a loss's extra tensors by name: one number for each of an episode's T turns, `[T]`, or one for
each element, T arrays `[N]` as long as `episode.log_probs`."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss, and its inputs besides those of every minibatch."""

    compute: Compute
    extras: Extras | None = None


POLICY_LOSSES: dict[str, PolicyLoss] = {}
"""Losses by name, as in `algo.loss.policy`."""


def policy_loss(name: str, extras: Extras | None = None) -> Callable[[Compute], Compute]:
    """Registers the decorated function under `name`.

    Args:
        name: name in `algo.loss.policy`.
        extras: called for each episode before an update; its results become `MiniBatch.extras`.
    """

    def register(compute: Compute) -> Compute:
        POLICY_LOSSES[name] = PolicyLoss(compute, extras)
        return compute

    return register


def find_policy_loss(name: str) -> PolicyLoss:
    """Returns the loss of that name, or the user's own from `module:FUNCTION`.

    Raises:
        UsageError: there is none, or it takes other arguments than a minibatch and a config.
    """
    setting, takes = "algo.loss.policy", ("batch", "config")
    return find_registered(name, POLICY_LOSSES, setting, "policy_loss", lambda loss: loss.compute, takes)


class LossTerms(NamedTuple):
    """Loss of a minibatch. The learner descends the sum of the first three, which are scalars."""

    policy: Tensor
    """Weighted sum of the policy's loss over elements."""
    value: Tensor
    """Mean of the critic's error over answers, times its weight."""
    rest: Tensor
    """Weighted divergence from the reference minus the weighted entropy."""
    clipped: Tensor
    """Share of ratios outside the clip range, without gradient."""
    metrics: Mapping[str, Tensor]
    """Metrics of the loss itself, scalars without gradient."""


def total_loss(config: LossConfig, batch: MiniBatch) -> LossTerms:
    """Computes the loss of B answers: weighted sums over their elements, and the mean of the critic's error.

    Raises:
        ValueError: the reference is missing, or given without a weight.
        UsageError: a user's loss returned no metrics, or another shape than the ratios have; or entropies have a
            weight, but the policy returns none. The learner checks once a step whether the loss is finite: checking
            here would wait for the GPU.
    """
    if (batch.reference is None) != (config.kl_weight == 0):
        raise ValueError(f"kl_weight {config.kl_weight} and log-probs of a reference go together: give both or neither")
    weights, is_token = batch.weights, batch.mask
    log_ratio = batch.log_ratio(config)
    each, own = _computed(config, batch)
    per_ratio = weights[:, : each.shape[1]]
    policy = (each * per_ratio).sum()
    # L = sum_n w_n L_pi,n + kl_weight KL(policy || reference) - entropy_weight H + value_weight L_V
    rest = policy.new_zeros(())
    if batch.reference is not None:
        rest = rest + config.kl_weight * (k3(batch.log_probs, batch.reference) * weights).sum()
    if config.entropy_weight:
        if batch.entropies is None:
            raise UsageError(
                f"algo.loss.entropy_weight is {config.entropy_weight:g}, and this policy gives no entropies",
                "return them from log_probs, or set --algo.loss.entropy-weight 0",
            )
        # entropy of actions only: a more uniform thought explores nothing
        rest = rest - config.entropy_weight * (batch.entropies * weights * batch.is_action).sum()
    value = policy.new_zeros(())
    if batch.returns is not None:
        assert batch.values is not None and batch.old_values is not None, "a critic has values"
        errors = value_loss(batch.values, batch.old_values, batch.returns, config.value_clip)
        if errors.ndim == 2:  # mean over each answer's tokens
            errors = (errors * is_token).sum(-1) / is_token.sum(-1).clamp_min(1)
        value = config.value_weight * errors.mean()
    with torch.no_grad():
        ratio, counted = log_ratio.exp(), weights[:, : log_ratio.shape[1]] > 0
        is_outside = (ratio < 1 - config.clip_low) | (ratio > 1 + config.clip_high)
        share = (is_outside & counted).sum() / counted.sum().clamp_min(1)
    return LossTerms(policy, value, rest, share, {name: metric.detach() for name, metric in own.items()})


def _computed(config: LossConfig, batch: MiniBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Returns the policy's loss and its metrics, checked, because the loss may be the user's own."""
    who, wanted = f"algo.loss.policy {config.policy}", [list(batch.weights.shape), [len(batch.weights), 1]]
    given: object = find_policy_loss(config.policy).compute(batch, config)
    fix = "return (loss [B, N], or [B, 1] of whole answers, and a mapping of scalars, which may be empty)"
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
        raise UsageError(f"{who} gave a {type(given).__name__}, and no loss with metrics", fix)
    loss, own = given
    if list(loss.shape) not in wanted or any(torch.as_tensor(metric).numel() != 1 for metric in own.values()):
        shapes = {name: list(torch.as_tensor(metric).shape) for name, metric in own.items()}
        raise UsageError(f"{who} gave a loss of shape {list(loss.shape)} and metrics of shapes {shapes}", fix)
    return loss, {name: torch.as_tensor(metric).float() for name, metric in own.items()}


def log_ratios(
    log_probs: Tensor, old_log_probs: Tensor, is_token: Tensor, is_action: Tensor, config: LossConfig, action_size: int
) -> Tensor:
    """Returns log of new over old probability: [B, N], equal within an action or an answer, 0 for elements without a
    loss; or [B, 1] for whole replies in which thoughts weigh less. For the arguments see `MiniBatch`.

    Source of the weighting: RL4VLM, Zhai et al. 2024, arXiv:2405.10292, eq. 2. Departures: no token of the reply is
    left out, and the action is located in the parsed text rather than by token ids.
    """
    differences = torch.where(is_token, log_probs - old_log_probs, 0.0)
    if config.ratio == "token":
        return differences
    if config.ratio == "weighted":  # log r = lambda log r(thought) + log r(action), eq. 2
        return (differences * torch.where(is_action, 1.0, config.thought_weight)).sum(-1, keepdim=True)
    if config.ratio == "answer":  # one ratio for the whole answer, repeated for every token
        return differences.sum(dim=1, keepdim=True) * is_token
    per_action = differences.view(len(differences), -1, action_size).sum(dim=2)
    return per_action.repeat_interleave(action_size, dim=1) * is_token


@policy_loss("clipped")
def clipped(batch: MiniBatch, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes PPO's surrogate max(-A r, -A clip(r, 1 - low, 1 + high)); at A < 0 at most -A c with a dual clip c.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; Yu et al. 2025, arXiv:2503.14476 (two clips); Ye et al. 2020,
    arXiv:1912.09729 (dual clip).
    """
    # the larger of the two losses: a good token gains nothing above 1 + high, a bad one nothing below 1 - low
    ratio, advantages = batch.log_ratio(config).clamp(max=_MAX_LOG_RATIO).exp(), batch.advantage_rows
    near = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * near)
    if config.dual_clip is not None:
        # otherwise a bad token that has become likely would have an unbounded loss
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * config.dual_clip), loss)
    return loss, {}


@policy_loss("guarded")
def guarded(batch: MiniBatch, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes `clipped`, but keeps only the clipped term if any ratio exceeds `max_ratio`.

    Source: RL4VLM's code for ratios above 10; the paper does not mention it.
    """
    ratio = batch.log_ratio(config).clamp(max=_MAX_LOG_RATIO).exp()
    if bool((ratio > config.max_ratio).any()):
        return -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * batch.advantage_rows, {}
    return clipped(batch, config)


def token_weights(
    is_token: Tensor,
    episodes: Tensor,
    num_episodes: int,
    average: Averaging,
    *,
    action_size: int = 1,
    longest_steps: int = 1,
) -> Tensor:
    """Returns the weight of each token in the mean over a whole update, so that the loss is the weighted sum.

    Args:
        is_token: [M, N] tokens of answers, or of the executed steps of a chunk.
        episodes: [M] index of the episode, 0 to num_episodes - 1, of each turn.
        num_episodes: number of episodes, without dropped groups.
        average: see `LossConfig`.
        action_size: tokens of an action.
        longest_steps: actions of the longest possible episode.

    Returns:
        [M, N], 0 where there is no token. For trajectory and token they sum to 1.
    """
    # each such that sum_n w_n L_n is the mean in question; chunks count by actions, of `action_size` tokens each
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
    """Returns the importance weight of each token, sampled by another policy than the one in training.

    It is min(cap, trainer / engine) or, with `beyond_cap` mask, trainer / engine where that is in [1 / cap, cap] and 0
    elsewhere.

    Args:
        trainer: [B, N] log-probabilities of the sampled tokens under the weights in training, before the update.
        engine: [B, N] log-probabilities from the engine.
        is_token: [B, N] tokens that were sampled.
        config: `correction`, `correction_cap` and `beyond_cap`.

    Returns:
        [B, N] in [0, cap]; 1 where there is no token. With `sequence` all tokens of an answer have the same weight.

    Source: truncation of importance weights, Ionides 2008, J. Comput. Graph. Stat. 17(2); in reinforcement learning
    Espeholt et al. 2018 (IMPALA), arXiv:1802.01561. Departure: the trainer's and the engine's weights are of one
    version, so this corrects the difference between two programs, and PPO's ratio is relative to the trainer's.
    """
    log_ratio = torch.where(is_token, trainer - engine, 0.0)
    if config.correction == "sequence":  # the product over an answer is its own importance weight
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    bound = math.log(config.correction_cap)
    counts = log_ratio.clamp(-_MAX_LOG_RATIO, bound).exp()
    if config.beyond_cap == "mask":
        counts = torch.where(log_ratio.abs() <= bound, counts, 0.0)
    return torch.where(is_token, counts, 1.0)


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimates KL(policy || reference) at each sampled token, >= 0, nats: r - 1 - log r with r = reference / policy.

    Source: Schulman 2020, "Approximating KL divergence", estimator k3. Unbiased where the tokens are the policy's own.
    """
    log_ratio = (reference - log_probs).clamp(max=_MAX_LOG_RATIO)
    return log_ratio.exp() - 1 - log_ratio


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None) -> Tensor:
    """Returns half the squared error, of any shape; with a clip the larger of it and that of the clipped value.

    Source of the clip: OpenAI baselines' PPO2, which RL4VLM follows.
    """
    plain = 0.5 * (values - returns).square()
    if clip is None:
        return plain
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(plain, 0.5 * (near - returns).square())


def surrogate_gain(log_ratio: Tensor, advantages: Tensor, is_token: Tensor, clip: float) -> Tensor:
    """Returns each turn's contribution to the surrogate objective of a policy that has not been trained on it yet.

    Args:
        log_ratio: [B, N] present log-probability of each sampled token minus that at sampling.
        advantages: [B, 1] or [B, N].
        is_token: [B, N] tokens that were sampled.
        clip: distance from 1 to which ratios are clipped, so that no single token dominates.

    Returns:
        [B] sum over tokens of (r - 1) A; 0 on average if the advantages are noise.
    """
    change = log_ratio.clamp(max=_MAX_LOG_RATIO).exp().clamp(1 - clip, 1 + clip) - 1
    return (change * advantages * is_token).sum(-1)


def james_stein_share(gains: Tensor) -> float:
    """Returns the share in [0, 1] of an update that exceeds noise, from its gain on episodes it was not trained on.

    With mean m and standard error s of the `gains` it is 1 - (s / m)^2, and 0 if m <= s: the part of m^2 that the
    scatter of episodes does not explain. At least two gains are needed; with fewer everything is kept.

    Args:
        gains: [W] `surrogate_gain` of each env's turns; envs are independent of each other.

    Source: the positive part of James and Stein's 1961 shrinkage, for a single number.
    """
    if len(gains) < 2:
        return 1.0
    # E[m^2] = mu^2 + s^2: the share of m^2 that is mu^2 is estimated by 1 - s^2 / m^2
    mean, error = float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))
    return 1 - (error / mean) ** 2 if mean > error else 0.0
