"""Estimators of advantages with their losses, behind one interface; `build_objective` makes the one a config names.

An objective says what it needs of a rollout, gives each turn or token its credit, and turns a minibatch into a loss.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from rlvlm.algorithms.ppo_vlm.config import (
    BiLevelConfig,
    GiGPOConfig,
    GRPOConfig,
    HeadConfig,
    ObjectiveConfig,
    RL4VLMConfig,
    TokenPPOConfig,
)
from rlvlm.algorithms.ppo_vlm.update import advantages, losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a rollout of W envs and T turns; the part of it that decides advantages."""

    rewards: Tensor
    """[T, W] as they are learned from, 0 where nothing was played."""
    ends: Tensor
    """[T, W] bool, whether the episode ended with the turn."""
    is_live: Tensor
    """[T, W] bool, turns that were played."""
    values: Tensor
    """[T, W] the critic before each reply."""
    next_values: Tensor
    """[T, W] the critic after each turn: 0 after an end for good, of the last state after a time limit."""
    token_values: Tensor | None = None
    """[T, W, N] the critic before each token, where the objective asks for it."""
    is_reply: Tensor | None = None
    """[T, W, N] bool, with `token_values`."""
    states: Tensor | None = None
    """[T, W] integers, equal where image and prompt were, where the objective has groups."""
    groups: Tensor | None = None
    """[W] group of each env, where the objective has groups."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What turns or tokens were worth."""

    advantages: Tensor
    """[T, W] or [T, W, N]."""
    returns: Tensor | None
    """The critic's targets, of the same shape; None where there is no critic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """B turns as they were sampled and as the policy sees them now."""

    log_probs: Tensor
    """[B, N] of the sampled tokens now, with gradient."""
    old_log_probs: Tensor
    """[B, N] when they were sampled."""
    is_reply: Tensor
    """[B, N] bool."""
    is_action: Tensor
    """[B, N] bool."""
    advantages: Tensor
    """[B] or [B, N]."""
    values: Tensor
    """[B] or [B, N] as the advantages, with gradient."""
    old_values: Tensor
    """Likewise when they were sampled."""
    returns: Tensor | None = None
    """Likewise, the critic's targets."""
    entropies: Tensor | None = None
    """[B, N] of the tokens' distributions, with gradient, where the objective asks for them."""
    reference: Tensor | None = None
    """[B, N] log-probabilities of the policy that PPO started with, where the objective asks for them."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Scalars with gradient; the learner descends their sum."""

    policy: Tensor
    value: Tensor
    """Weighted."""
    rest: Tensor
    """Weighted divergence from the reference less weighted entropy."""
    clipped: float
    """Share of ratios outside the clip range."""


Config = TypeVar("Config", bound=ObjectiveConfig)


class Objective(ABC, Generic[Config]):
    """One way to learn from a rollout.

    Args:
        config: its hyperparameters.
    """

    judges_tokens = False
    """Whether the critic is asked before every token."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def group_size(self) -> int:
        """Envs that play from one seed; 1 where episodes are not compared."""
        return int(getattr(self.config, "group_size", 1))

    @property
    def has_critic(self) -> bool:
        """Whether a value is learned."""
        return hasattr(self.config, "value_weight")

    @property
    def value_warm_up(self) -> int:
        """Updates at the start in which only the critic learns."""
        return int(getattr(self.config, "value_warm_up", 0))

    @property
    def is_shrunk(self) -> bool:
        """Whether the part of an update that may be chance is taken back."""
        return bool(getattr(self.config, "is_shrunk", False))

    @property
    def needs_reference(self) -> bool:
        """Whether minibatches must bring the reference's log-probabilities."""
        return getattr(self.config, "kl_weight", 0.0) > 0

    @property
    def needs_entropies(self) -> bool:
        """Whether minibatches must bring entropies."""
        return getattr(self.config, "entropy_weight", 0.0) > 0

    @abstractmethod
    def credit(self, outcome: Outcome) -> Credit:
        """What each turn or token was worth; advantages are of a size that needs no further scaling."""

    @abstractmethod
    def loss(self, batch: Minibatch) -> Loss:
        """The loss of a minibatch."""


class _TurnCritic(Objective[Config]):
    """Advantages by GAE over turns, whitened over the rollout."""

    def credit(self, outcome: Outcome) -> Credit:
        gamma, lam = (getattr(self.config, name) for name in ("gamma", "gae_lambda"))
        raw = advantages.turn_gae(outcome.rewards, outcome.values, outcome.next_values, outcome.ends, gamma, lam)
        return Credit(advantages.whiten(raw, outcome.is_live), raw + outcome.values)


class RL4VLM(_TurnCritic[RL4VLMConfig]):
    """One ratio per reply, in which thoughts weigh less."""

    def loss(self, batch: Minibatch) -> Loss:
        """See `Objective`."""
        now, then = (
            losses.utterance_log_prob(each, batch.is_reply, batch.is_action, self.config.thought_weight)
            for each in (batch.log_probs, batch.old_log_probs)
        )
        policy = losses.guarded_surrogate(now - then, batch.advantages, self.config.clip, self.config.largest_ratio)
        assert batch.returns is not None, "an objective with a critic has returns"
        value = losses.clipped_value_loss(batch.values, batch.old_values, batch.returns, self.config.value_clip)
        clipped = ((now - then).exp() - 1).abs() > self.config.clip
        return Loss(
            policy.mean(), self.config.value_weight * value.mean(), now.new_zeros(()), float(clipped.float().mean())
        )


class TokenPPO(_TurnCritic[TokenPPOConfig]):
    """A ratio per token; all tokens of a reply share the turn's advantage."""

    def loss(self, batch: Minibatch) -> Loss:
        """See `Objective`."""
        assert batch.returns is not None, "an objective with a critic has returns"
        value = self.config.value_weight * losses.value_loss(batch.values, batch.returns).mean()
        return _token_loss(
            batch, batch.advantages.unsqueeze(-1), self.config.clip, value, self.config.kl_weight,
            self.config.entropy_weight,
        )  # fmt: skip


class BiLevel(Objective[BiLevelConfig]):
    """Advantages of turns become the pay of each reply's last token, and are spread over its tokens from there."""

    judges_tokens = True

    def credit(self, outcome: Outcome) -> Credit:
        """See `Objective`. A turn's value is the critic's before its last token; `next_values` are of whole states.

        Departure from VAGEN: the value of the following turn is taken before its reply, as PPO's is.
        """
        assert outcome.token_values is not None and outcome.is_reply is not None, "the rollout brings both"
        last = (outcome.is_reply.sum(-1, keepdim=True) - 1).clamp_min(0)
        values = outcome.token_values.gather(-1, last).squeeze(-1)
        config = self.config
        turns = advantages.turn_gae(
            outcome.rewards, values, outcome.next_values, outcome.ends, config.turn_gamma, config.turn_lambda
        )
        raw = advantages.token_gae(
            turns + values, outcome.token_values, outcome.is_reply, config.token_gamma, config.token_lambda
        )
        return Credit(advantages.whiten(raw, outcome.is_reply), raw + outcome.token_values * outcome.is_reply)

    def loss(self, batch: Minibatch) -> Loss:
        """See `Objective`."""
        assert batch.returns is not None, "an objective with a critic has returns"
        tokens = losses.value_loss(batch.values, batch.returns) * batch.is_reply
        value = self.config.value_weight * (tokens.sum(-1) / batch.is_reply.sum(-1).clamp_min(1)).mean()
        return _token_loss(
            batch, batch.advantages, self.config.clip, value, self.config.kl_weight, self.config.entropy_weight
        )


class GRPO(Objective[GRPOConfig]):
    """Each episode's return against those of its group, for all tokens of all its turns."""

    def credit(self, outcome: Outcome) -> Credit:
        """See `Objective`."""
        assert outcome.groups is not None, "the rollout brings them"
        episodes = advantages.episode_advantages(outcome.rewards, outcome.groups, self.config.is_scaled)
        return Credit(episodes.expand_as(outcome.rewards) * outcome.is_live, None)

    def loss(self, batch: Minibatch) -> Loss:
        """See `Objective`."""
        return _token_loss(
            batch, batch.advantages.unsqueeze(-1), self.config.clip, batch.log_probs.new_zeros(()),
            self.config.kl_weight, self.config.entropy_weight,
        )  # fmt: skip


class GiGPO(Objective[GiGPOConfig]):
    """GRPO and, beside it, each turn against turns of its group in the very same state."""

    def credit(self, outcome: Outcome) -> Credit:
        """See `Objective`."""
        assert outcome.groups is not None and outcome.states is not None, "the rollout brings both"
        scaled = self.config.is_scaled
        episodes = advantages.episode_advantages(outcome.rewards, outcome.groups, scaled)
        turns = advantages.state_advantages(
            outcome.rewards, outcome.ends, outcome.is_live, outcome.states, outcome.groups, self.config.gamma, scaled
        )
        return Credit((episodes + self.config.step_weight * turns) * outcome.is_live, None)

    def loss(self, batch: Minibatch) -> Loss:
        """See `Objective`."""
        return _token_loss(
            batch, batch.advantages.unsqueeze(-1), self.config.clip, batch.log_probs.new_zeros(()),
            self.config.kl_weight, self.config.entropy_weight,
        )  # fmt: skip


class Head(_TurnCritic[HeadConfig]):
    """PPO over actions: a reply is one token, the action itself."""

    def loss(self, batch: Minibatch) -> Loss:
        """See `Objective`."""
        assert batch.returns is not None, "an objective with a critic has returns"
        value = self.config.value_weight * losses.value_loss(batch.values, batch.returns).mean()
        return _token_loss(
            batch, batch.advantages.unsqueeze(-1), self.config.clip, value, 0.0, self.config.entropy_weight
        )


def _token_loss(
    batch: Minibatch, credit: Tensor, clip: float, value: Tensor, kl_weight: float, entropy_weight: float
) -> Loss:
    """Clipped ratios of tokens under `credit` `[B, 1]` or `[B, N]`, with divergence and entropy where weighted."""
    log_ratio = torch.where(batch.is_reply, batch.log_probs - batch.old_log_probs, 0.0)
    policy = losses.per_turn(losses.clipped_surrogate(log_ratio, credit, clip), batch.is_reply)
    rest = policy.new_zeros(())
    if kl_weight:
        assert batch.reference is not None, "an objective that weighs the divergence asks for the reference"
        rest = rest + kl_weight * losses.per_turn(losses.k3(batch.log_probs, batch.reference), batch.is_reply)
    if entropy_weight:
        assert batch.entropies is not None, "an objective that weighs the entropy asks for it"
        rest = rest - entropy_weight * losses.per_turn(batch.entropies, batch.is_action)
    clipped = (log_ratio.detach().exp() - 1).abs()[batch.is_reply] > clip
    return Loss(policy, value, rest, float(clipped.float().mean()))


_MEMBERS: dict[type, type[Objective]] = {
    RL4VLMConfig: RL4VLM,
    TokenPPOConfig: TokenPPO,
    BiLevelConfig: BiLevel,
    GRPOConfig: GRPO,
    GiGPOConfig: GiGPO,
    HeadConfig: Head,
}


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective that `config` is the hyperparameters of."""
    return _MEMBERS[type(config)](config)
