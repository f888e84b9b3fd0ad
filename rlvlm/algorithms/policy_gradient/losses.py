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
from rlvlm.core.plugins import find_registered

_MAX_LOG_RATIO = 20.0
"""Above it exp() is of no use, and at 89 it is infinite in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """B answers of N elements each (tokens, numbers of a chunk), padded on the right: as they were sampled, and as the
    policy sees them now.
    """

    log_probs: Tensor
    """[B, N] of the sampled elements now, with gradient."""
    old_log_probs: Tensor
    """[B, N] when they were sampled."""
    weights: Tensor
    """[B, N] as `token_weights` gives them; 0 for elements that teach nothing."""
    is_action: Tensor
    """[B, N] bool, elements that make the action; all others are a thought."""
    advantages: Tensor
    """[B] or [B, N]."""
    action_size: int = 1
    """Elements of an action, of answers that hold several."""
    values: Tensor | None = None
    """[B] or [B, N] as the advantages, with gradient; read where there are returns."""
    old_values: Tensor | None = None
    """Values when the answers were sampled, in the shape of `values`."""
    returns: Tensor | None = None
    """The critic's targets, in the shape of `values`; None without a critic."""
    entropies: Tensor | None = None
    """[B, N] of the elements' distributions, with gradient, where they are weighed."""
    reference: Tensor | None = None
    """[B, N] log-probs of the policy that learning started from, where the divergence is weighed."""
    obs: Observations | None = None
    """B, what was observed before each answer."""
    answers: Sequence[Answer] = ()
    """B, as the policy reads them."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """[B, N] or [B] by name: what the episodes carry, and what an own loss asked for, see `policy_loss`."""

    @property
    def mask(self) -> Tensor:
        """[B, N] bool, elements that teach something."""
        return self.weights > 0

    @property
    def advantage_rows(self) -> Tensor:
        """[B, 1] or [B, N]."""
        return self.advantages if self.advantages.ndim == 2 else self.advantages.unsqueeze(-1)

    def log_ratio(self, config: LossConfig) -> Tensor:
        """[B, N] or, of whole answers, [B, 1]: see `log_ratios`."""
        return log_ratios(
            self.log_probs, self.old_log_probs, self.mask, self.is_action, config, self.action_size
        )  # fmt: skip


Compute = Callable[[MiniBatch, LossConfig], tuple[Tensor, Mapping[str, Tensor]]]
"""The loss of each element [B, N], or of each answer [B, 1], and metrics of the minibatch: scalars by name."""
Extras = Callable[[TokenEpisode], Mapping[str, Any]]
"""Tensors that a loss asks for, by name: one number for each of an episode's T turns, `[T]`, or one for each element,
T arrays `[N]` of the lengths of `episode.log_probs`."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss, and what it reads beside what every minibatch has."""

    compute: Compute
    extras: Extras | None = None


POLICY_LOSSES: dict[str, PolicyLoss] = {}
"""By name, as `algo.loss.policy` has it."""


def policy_loss(name: str, extras: Extras | None = None) -> Callable[[Compute], Compute]:
    """Registers the decorated function under `name`.

    Args:
        name: as `algo.loss.policy` has it.
        extras: is asked about each episode before an update; what it gives comes as `MiniBatch.extras`.
    """

    def register(compute: Compute) -> Compute:
        POLICY_LOSSES[name] = PolicyLoss(compute, extras)
        return compute

    return register


def find_policy_loss(name: str) -> PolicyLoss:
    """The loss of that name, or `module:FUNCTION` of the user's own.

    Raises:
        UsageError: there is none, or it takes other arguments than a minibatch and a config.
    """
    setting, takes = "algo.loss.policy", ("batch", "config")
    return find_registered(name, POLICY_LOSSES, setting, "policy_loss", lambda loss: loss.compute, takes)


class LossTerms(NamedTuple):
    """Loss of a minibatch. The learner descends the sum of the first three, which are scalars."""

    policy: Tensor
    """The weighted sum over elements of the policy's loss."""
    value: Tensor
    """The mean over answers of the critic's error, times its weight."""
    rest: Tensor
    """The weighted divergence from the reference less the weighted entropy."""
    clipped: Tensor
    """Share of ratios outside the clip range, without gradient."""
    metrics: Mapping[str, Tensor]
    """The loss's own, scalars without gradient."""


def total_loss(config: LossConfig, batch: MiniBatch) -> LossTerms:
    """Loss of B answers: weighted sums over their elements, and the mean over answers of the critic's error.

    Raises:
        ValueError: the reference is missing, or given without a weight.
        UsageError: a loss of the user's own gave no metrics, or another shape than the ratios have; or entropies are
            weighed, and the policy gives none. Whether the loss is finite the learner looks at, once a step: here it
            would wait for the GPU.
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
        # entropy of actions alone: a thought that is drawn more evenly explores nothing
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
    """The policy's loss and its metrics, checked, as the loss may be the user's own."""
    who, wanted = f"algo.loss.policy {config.policy}", [list(batch.weights.shape), [len(batch.weights), 1]]
    given: Any = find_policy_loss(config.policy).compute(batch, config)
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
    """The logarithm of new over old probability: [B, N], equal within an action or an answer, 0 where nothing teaches;
    or [B, 1] of whole replies in which thoughts weigh less. The arguments are those of `MiniBatch`.

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
def clipped(batch: MiniBatch, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """PPO's pessimistic surrogate: max(-A r, -A clip(r, 1 - low, 1 + high)); at A < 0 at most -A c with a dual clip c.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; Yu et al. 2025, arXiv:2503.14476 (two clips); Ye et al. 2020,
    arXiv:1912.09729 (dual clip).
    """
    # the larger loss of the two: a good token gains nothing more beyond 1 + high, a bad one nothing below 1 - low
    ratio, advantages = batch.log_ratio(config).clamp(max=_MAX_LOG_RATIO).exp(), batch.advantage_rows
    near = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * near)
    if config.dual_clip is not None:
        # a token that has become likely and is bad would else lose without bound
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * config.dual_clip), loss)
    return loss, {}


@policy_loss("guarded")
def guarded(batch: MiniBatch, config: LossConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """`clipped`, of which only the clipped term is kept when any ratio exceeds `max_ratio`.

    Source: what RL4VLM's code does with ratios above 10; the paper does not say so.
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
    """Weight of each token in the mean over a whole update, so that the loss is the weighted sum.

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
    """Importance weight of each token, sampled from another policy than the one that learns.

    It is min(cap, trainer / engine), or with `beyond_cap` mask trainer / engine where that is in [1 / cap, cap] and 0
    elsewhere.

    Args:
        trainer: [B, N] log-probabilities of the sampled tokens under the weights that are trained, before the update.
        engine: [B, N] those that the engine gave with them.
        is_token: [B, N] tokens that were sampled.
        config: `correction`, `correction_cap` and `beyond_cap`.

    Returns:
        [B, N] in [0, cap]; 1 where there is no token. With `sequence` all tokens of an answer count the same.

    Source: truncation of importance weights, Ionides 2008, J. Comput. Graph. Stat. 17(2); in reinforcement learning
    Espeholt et al. 2018 (IMPALA), arXiv:1802.01561. Departure: the trainer's and the engine's weights are of one
    version, so what is corrected is the difference of two programs, and PPO's ratio starts from the trainer's.
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
    """Estimate of KL(policy || reference) at each sampled token, >= 0, nats: r - 1 - log r with r = reference / policy.

    Source: Schulman 2020, "Approximating KL divergence", estimator k3. Unbiased where the tokens are the policy's own.
    """
    log_ratio = (reference - log_probs).clamp(max=_MAX_LOG_RATIO)
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
    """Contribution of each turn to the surrogate objective of a policy that has not learned from it yet.

    Args:
        log_ratio: [B, N] of each sampled token, now less when it was sampled.
        advantages: [B, 1] or [B, N].
        is_token: [B, N] tokens that were sampled.
        clip: ratios farther than this from 1 count as this far, so that no single token decides.

    Returns:
        [B] sum over tokens of (r - 1) A; 0 on average where the advantages are chance.
    """
    change = log_ratio.clamp(max=_MAX_LOG_RATIO).exp().clamp(1 - clip, 1 + clip) - 1
    return (change * advantages * is_token).sum(-1)


def james_stein_share(gains: Tensor) -> float:
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
