"""Estimators of the advantage of each turn or token, as pure functions by name. The learner calls `estimate`.

An estimator is a function with `@estimator`: it reads `Trajectories` and an `AdvantageConfig` and returns raw
advantages. `estimate` adds the critic's targets and, if configured, centres and scales advantages from a critic.

Letters: T turns (or chunks) of an episode, E episodes or pieces of them, N tokens of an answer (padded). A turn's value
is the critic's prediction before the answer; `ends` marks turns after which the episode was over. `next_values` are the
values after a turn: 0 after termination, the critic's value of the last state after a time limit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlvlm.algorithms.policy_gradient.config import AdvantageConfig
from rlvlm.core.errors import NumericsError, UsageError
from rlvlm.core.references import find_registered

_TINY = 1e-6
_NEEDS = {"values", "token_values", "groups", "states"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectories:
    """Data of a rollout from which advantages are computed."""

    rewards: Tensor
    """[T, E] rewards for learning, 0 where nothing was played."""
    ends: Tensor
    """[T, E] bool, whether the episode ended with the turn."""
    is_live: Tensor
    """[T, E] bool, turns that were played."""
    groups: Tensor
    """[E] group numbers: episodes with the same number had equal starts and are compared."""
    values: Tensor
    """[T, E] the critic's values before each answer; zeros without a critic."""
    next_values: Tensor
    """[T, E] the critic's values after each turn: 0 after termination, of the last state after a time limit."""
    token_values: Tensor | None = None
    """[T, E, N] the critic's values before each token, if the estimator needs them."""
    is_token: Tensor | None = None
    """[T, E, N] bool mask of the answers' tokens, with `token_values`."""
    states: Tensor | None = None
    """[T, E] integers >= 0, equal for identical observations of the policy, if the estimator needs them."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator and its requirements."""

    compute: Callable[[Trajectories, AdvantageConfig], Tensor]
    """Function that returns raw advantages, [T, E] or, with token values, [T, E, N]; those not live are ignored."""
    needs: frozenset[str]
    """Inputs that it uses, out of `values` (a critic), `token_values` (a critic before every token), `groups` (whole
    episodes with equal starts) and `states`. Without `groups` an episode of turns may come in pieces, each in a column
    of its own: an unfinished one (`ends`) continues in the next rollout."""
    is_per_episode: bool = False
    """Whether all turns of an episode get the same advantage."""
    compares_sums: bool = False
    """Whether advantages depend on the sum of an episode's rewards, wherever they were given."""

    @property
    def has_critic(self) -> bool:
        """Whether values are trained."""
        return bool(self.needs & {"values", "token_values"})


ESTIMATORS: dict[str, Estimator] = {}
"""Estimators by name, as in `algo.advantage.estimator`."""


def estimator(
    name: str, *needs: str, is_per_episode: bool = False, compares_sums: bool = False
) -> Callable[[Callable[[Trajectories, AdvantageConfig], Tensor]], Callable[[Trajectories, AdvantageConfig], Tensor]]:
    """Registers the decorated function under `name`; for the other arguments see `Estimator`.

    Raises:
        ValueError: a need is none of these.
    """
    if unknown := set(needs) - _NEEDS:
        raise ValueError(f"estimator {name} needs {', '.join(sorted(unknown))}; there are {', '.join(sorted(_NEEDS))}")

    def register(
        compute: Callable[[Trajectories, AdvantageConfig], Tensor],
    ) -> Callable[[Trajectories, AdvantageConfig], Tensor]:
        ESTIMATORS[name] = Estimator(compute, frozenset(needs), is_per_episode, compares_sums or is_per_episode)
        return compute

    return register


def find_estimator(name: str) -> Estimator:
    """Returns the estimator of that name, or the user's own from `module:FUNCTION`.

    Raises:
        UsageError: there is none, or it takes other arguments than trajectories and a config.
    """
    setting, takes = "algo.advantage.estimator", ("played", "config")
    return find_registered(name, ESTIMATORS, setting, "estimator", lambda estimator: estimator.compute, takes)


def estimate(played: Trajectories, config: AdvantageConfig) -> tuple[Tensor, Tensor | None]:
    """Returns advantages, and the critic's targets or None: [T, E] each or, with a value per token, [T, E, N].

    Raises:
        UsageError: the estimator returned another shape.
        NumericsError: it returned non-finite numbers for finite inputs.
    """
    chosen = find_estimator(config.estimator)
    raw = chosen.compute(played, config)
    whole = played.token_values if "token_values" in chosen.needs else played.rewards
    assert whole is not None, "asked for"
    # checked here rather than in each estimator: one may be a user's own
    if raw.shape != whole.shape:
        raise UsageError(
            f"the estimator {config.estimator} gave {list(raw.shape)}, not {list(whole.shape)}",
            "return an advantage for every turn, or for every token where it needs token_values",
        )
    given = (played.rewards, played.values, played.next_values)
    if not raw[played.is_live].isfinite().all() and all(bool(values.isfinite().all()) for values in given):
        raise NumericsError(
            f"the estimator {config.estimator} gave advantages that are not finite", "mend its function"
        )
    if not chosen.has_critic:
        return raw, None
    values, is_kept = played.values, played.is_live
    if "token_values" in chosen.needs:
        assert played.token_values is not None and played.is_token is not None, "asked for"
        values, is_kept = played.token_values * played.is_token, played.is_token
    return whiten(raw, is_kept) if config.divide_by_std else raw, raw + values


@estimator("gae", "values")
def gae(played: Trajectories, config: AdvantageConfig) -> Tensor:
    """Returns [T, E], generalised advantages of turns or chunks."""
    return turn_gae(
        played.rewards, played.values, played.next_values, played.ends, config.gamma, config.gae_lambda
    )  # fmt: skip


@estimator("bi_level", "token_values", "values")
def bi_level(played: Trajectories, config: AdvantageConfig) -> Tensor:
    """Returns [T, E, N]: advantages of turns become rewards of each answer's last token, spread over its tokens.

    A turn's value is the critic's before its last token, as published; `next_values` are of whole states.

    Source: VAGEN, Wang et al. 2025, arXiv:2510.16907.
    """
    assert played.token_values is not None and played.is_token is not None, "asked for"
    last = (played.is_token.sum(-1, keepdim=True) - 1).clamp_min(0)  # index of each answer's last token
    values = played.token_values.gather(-1, last)[..., 0]
    turns = turn_gae(played.rewards, values, played.next_values, played.ends, config.gamma, config.gae_lambda)
    return token_gae(
        turns + values, played.token_values, played.is_token, config.token_gamma, config.token_lambda
    )  # fmt: skip


@estimator("gae_tokens", "token_values", "values")
def gae_tokens(played: Trajectories, config: AdvantageConfig) -> Tensor:
    """Returns [T, E, N], generalised advantages of an episode's tokens as one sequence: a turn's reward comes with its
    last token, which is discounted like a turn; within an answer tokens are discounted like tokens.
    """
    values, is_token = played.token_values, played.is_token
    assert values is not None and is_token is not None, "asked for"
    advantages, ahead = torch.zeros_like(values), torch.zeros_like(values[0, :, 0])
    last = is_token.sum(-1) - 1  # [T, E]
    for turn in reversed(range(len(values))):
        ahead = torch.where(played.ends[turn], 0.0, ahead)  # nothing flows back over an episode's end
        for token in reversed(range(values.shape[-1])):
            is_last = last[turn] == token
            gamma = is_last * config.gamma + ~is_last * config.token_gamma
            lam = is_last * config.gae_lambda + ~is_last * config.token_lambda
            # an answer's last token leads to the next turn's state, every other one to the token after it
            after = values[turn, :, min(token + 1, values.shape[-1] - 1)]
            after = torch.where(is_last, played.next_values[turn], after)
            td_error = is_last * played.rewards[turn] + gamma * after - values[turn, :, token]
            ahead = torch.where(is_token[turn, :, token], td_error + gamma * lam * ahead, ahead)
            advantages[turn, :, token] = ahead
    return advantages * is_token


@estimator("grpo", "groups", is_per_episode=True)
def grpo(played: Trajectories, config: AdvantageConfig) -> Tensor:
    """Returns [T, E], each episode's return minus its group's mean, for all of its turns, divided by the group's
    unbiased standard deviation if configured.

    Sources: Shao et al. 2024, arXiv:2402.03300; without division: Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO).
    Departure from verl-agent: the mean is over episodes, not over turns, so long episodes weigh no more.
    """
    scores = group_relative(episode_returns(played.rewards), played.groups, config.divide_by_std)
    return scores.to(played.rewards.dtype) * played.is_live


@estimator("rloo", "groups", is_per_episode=True)
def rloo(played: Trajectories, config: AdvantageConfig) -> Tensor:
    """Returns [T, E], each episode's return minus the mean of the others in its group; ignores `divide_by_std`.

    Source: Ahmadian et al. 2024, arXiv:2402.14740.
    """
    # A_i = R_i - mean of R_j over j != i: a baseline that does not depend on R_i leaves the gradient unbiased
    scores = group_relative(episode_returns(played.rewards), played.groups, False, leaves_one_out=True)
    return scores.to(played.rewards.dtype) * played.is_live


@estimator("grpo_turns", "groups")
def grpo_turns(played: Trajectories, config: AdvantageConfig) -> Tensor:
    """Returns [T, E], each turn's return-to-go minus the mean of those of its group at the same turn, divided by their
    unbiased standard deviation if configured. Episodes that are over by then do not count.

    Source: Shao et al. 2024, arXiv:2402.03300, sec. 4.1.3 (process supervision). Departure: they normalise all rewards
    of a group together and sum what is left to come; here these sums are compared at equal turns, so that a turn's
    baseline is a value of the group's states at that time, and rewards may be differences of a score.
    """
    return compared_turns(played, config.gamma, _turn_keys(played), config.divide_by_std)


@estimator("rloo_turns", "groups")
def rloo_turns(played: Trajectories, config: AdvantageConfig) -> Tensor:
    """Returns [T, E], each turn's return-to-go minus the mean of the others of its group at the same turn; ignores
    `divide_by_std`.

    Source: Ahmadian et al. 2024, arXiv:2402.14740. Departure: a baseline for each turn, as in `grpo_turns`.
    """
    return compared_turns(played, config.gamma, _turn_keys(played), False, leaves_one_out=True)


@estimator("gigpo", "groups", "states", compares_sums=True)
def gigpo(played: Trajectories, config: AdvantageConfig) -> Tensor:
    """Returns [T, E], GRPO plus each turn's return-to-go compared with the group's turns in an identical state.

    Source: Feng et al. 2025, arXiv:2505.10978, sec. 4.2; both divide by the population's standard deviation.
    """
    assert played.states is not None, "asked for"
    scaled, live = config.divide_by_std, played.is_live
    episodes = group_relative(episode_returns(played.rewards), played.groups, scaled, correction=0)
    # states are compared within their own group only, so the pair of both is one number
    keys = played.groups * (int(played.states.max()) + 1) + played.states
    turns = compared_turns(played, config.gamma, keys, scaled, correction=0)
    return (episodes + config.step_weight * turns).to(played.rewards.dtype) * live


def turn_gae(rewards: Tensor, values: Tensor, next_values: Tensor, ends: Tensor, gamma: float, lam: float) -> Tensor:
    """Returns the generalised advantage of every turn, in reward units.

    Args:
        rewards: [T, E].
        values: [T, E] values before each answer.
        next_values: [T, E] values of the state after the turn, before any reset.
        ends: [T, E] whether the episode ended with this turn.
        gamma: discount per turn, in [0, 1].
        lam: in [0, 1]; 0 trusts the critic, 1 the rewards.

    Returns:
        [T, E].

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16. The last row looks ahead through its `next_values` alone.
    """
    # d_t = r_t + gamma V(s_t+1) - V(s_t);   A_t = d_t + gamma lam A_t+1, and A_t = d_t where the episode ends
    td_errors = rewards + gamma * next_values - values
    advantages = torch.zeros_like(td_errors)
    ahead = torch.zeros_like(td_errors[0])
    for turn in reversed(range(len(td_errors))):
        ahead = td_errors[turn] + gamma * lam * torch.where(ends[turn], 0.0, ahead)
        advantages[turn] = ahead
    return advantages


def token_gae(turn_returns: Tensor, token_values: Tensor, is_token: Tensor, gamma: float, lam: float) -> Tensor:
    """Returns the generalised advantage of every token, for each answer alone: its last token gets the turn's return.

    Args:
        turn_returns: [...] return of the turn.
        token_values: [..., N] the critic's values before each token.
        is_token: [..., N] tokens that were sampled; they come first in each row.
        gamma: discount per token.
        lam: in [0, 1].

    Returns:
        [..., N], 0 outside the answer.
    """
    # as for turns, with the next token's value as bootstrap, and 0 after the last one, whose return includes the rest
    values = token_values * is_token
    later = torch.cat((is_token[..., 1:], torch.zeros_like(is_token[..., :1])), dim=-1)
    next_values = torch.cat((values[..., 1:], torch.zeros_like(values[..., :1])), dim=-1)
    rewards = (is_token & ~later) * turn_returns.unsqueeze(-1)
    td_errors = rewards + gamma * next_values - values
    advantages = torch.zeros_like(values)
    ahead = torch.zeros_like(values[..., 0])
    for token in reversed(range(values.shape[-1])):
        ahead = (td_errors[..., token] + gamma * lam * ahead) * is_token[..., token]
        advantages[..., token] = ahead
    return advantages


def returns_to_go(rewards: Tensor, ends: Tensor, gamma: float) -> Tensor:
    """Returns [T, E], the discounted sum of `rewards` `[T, E]` from each turn to its episode's end (`ends`)."""
    return turn_gae(rewards, torch.zeros_like(rewards), torch.zeros_like(rewards), ends, gamma, 1.0)


def compared_turns(
    played: Trajectories,
    gamma: float,
    keys: Tensor,
    is_scaled: bool,
    *,
    correction: int = 1,
    leaves_one_out: bool = False,
) -> Tensor:
    """Returns [T, E], the return-to-go of each turn that was played, compared with those of the same key; 0 elsewhere.

    Args:
        played: the rollout.
        gamma: discount per turn, in [0, 1].
        keys: [T, E] integers; turns with equal keys are compared.
        is_scaled: see `group_relative`, as are the others.
        correction: 1 or 0.
        leaves_one_out: whether the mean excludes the turn itself.
    """
    # rounded, so that the order of summation does not matter and equal turns are recognised as equal
    to_go = returns_to_go(played.rewards.double(), played.ends, gamma).float()
    live, turns = played.is_live, torch.zeros_like(to_go, dtype=torch.float64)
    turns[live] = group_relative(
        to_go[live], keys[live], is_scaled, correction=correction, leaves_one_out=leaves_one_out
    )  # fmt: skip
    return turns.to(played.rewards.dtype)


def _turn_keys(played: Trajectories) -> Tensor:
    """Returns [T, E], a number for each pair of group and turn."""
    num_turns = len(played.rewards)
    return played.groups * num_turns + torch.arange(num_turns)[:, None]


def episode_returns(rewards: Tensor) -> Tensor:
    """Returns [E], float32 sums of `rewards` [T, E], added in float64 so that their order makes no difference."""
    return rewards.double().sum(0).float()


def group_relative(
    scores: Tensor, keys: Tensor, is_scaled: bool, *, correction: int = 1, leaves_one_out: bool = False
) -> Tensor:
    """Returns each score minus the mean of the scores with the same key.

    Args:
        scores: [B] scores.
        keys: [B] integers; scores with equal keys are compared.
        is_scaled: whether to divide by the standard deviation of the compared scores.
        correction: 1 for the unbiased deviation, 0 for the population's.
        leaves_one_out: whether the mean excludes the score itself.

    Returns:
        [B] float64. Exactly 0 for a score that is alone in its group, where common code keeps it unchanged, and for
        groups of equal scores, whatever their value: a rounded mean over a deviation of zero would teach noise.
    """
    # A_i = R_i - mean_j R_j, over all j with i's key, divided by their standard deviation if wanted
    wide = scores.double()
    _, members = keys.unique(return_inverse=True)
    zeros = torch.zeros_like(wide)
    count = zeros.index_add(0, members, torch.ones_like(wide))
    mean = zeros.index_add(0, members, wide) / count.clamp_min(1)
    least, most = (zeros.scatter_reduce(0, members, wide, how, include_self=False) for how in ("amin", "amax"))
    apart = wide - mean[members]
    if leaves_one_out:  # (R - mean of the others) = (R - mean) G / (G - 1)
        apart = apart * (count / (count - 1).clamp_min(1))[members]
    if is_scaled:
        spread = zeros.index_add(0, members, (wide - mean[members]).square())
        apart = apart / ((spread / (count - correction).clamp_min(1)).sqrt()[members] + _TINY)
    return torch.where((most == least)[members], 0.0, apart)  # NaN stays NaN, to be noticed later


def whiten(values: Tensor, chosen: Tensor) -> Tensor:
    """Returns `values` minus their mean over their deviation, both over `chosen` (same shape); 0 elsewhere.

    Summed in float64, so that the order of episodes makes no difference.
    """
    kept = values[chosen].double()
    if not kept.numel():
        return values * 0
    return torch.where(chosen, (values - kept.mean()) / (kept.std(correction=0) + _TINY), 0.0).to(values.dtype)
