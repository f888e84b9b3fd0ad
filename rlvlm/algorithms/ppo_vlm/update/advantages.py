"""What each turn, or each token of its reply, was worth: tensors in, tensors out. Called by `objectives`.

Letters: T turns, W envs played side by side, N tokens of a reply (padded). A turn's value is the critic's answer
before the reply; `ends` marks turns after which the env started a new episode. What comes after a turn is told by
`next_values`: 0 after an end for good, the critic's value of the last state after a time limit.
"""

import torch
from torch import Tensor

_TINY = 1e-6


def turn_gae(rewards: Tensor, values: Tensor, next_values: Tensor, ends: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage of every turn, in reward units.

    Args:
        rewards: [T, W].
        values: [T, W] before each reply.
        next_values: [T, W] of the state that the turn led to, before any reset.
        ends: [T, W] whether the episode ended with this turn.
        gamma: discount per turn, in [0, 1].
        lam: in [0, 1]; 0 trusts the critic, 1 the rewards.

    Returns:
        [T, W].

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16. The last row looks ahead through its `next_values` alone.
    """
    td_errors = rewards + gamma * next_values - values
    advantages = torch.zeros_like(td_errors)
    ahead = torch.zeros_like(td_errors[0])
    for turn in reversed(range(len(td_errors))):
        ahead = td_errors[turn] + gamma * lam * torch.where(ends[turn], 0.0, ahead)
        advantages[turn] = ahead
    return advantages


def token_gae(turn_returns: Tensor, token_values: Tensor, is_reply: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage of every token, each reply by itself: its last token is paid the turn's return.

    Args:
        turn_returns: [...] what the turn was worth in the end.
        token_values: [..., N] the critic before each token.
        is_reply: [..., N] tokens that were sampled; they come first in each row.
        gamma: discount per token.
        lam: in [0, 1].

    Returns:
        [..., N], 0 outside the reply.

    Source: VAGEN's bi-level advantage (Wang et al. 2025, arXiv:2510.16907), the lower level.
    """
    values = token_values * is_reply
    later = torch.cat((is_reply[..., 1:], torch.zeros_like(is_reply[..., :1])), dim=-1)
    next_values = torch.cat((values[..., 1:], torch.zeros_like(values[..., :1])), dim=-1)
    rewards = (is_reply & ~later) * turn_returns.unsqueeze(-1)
    td_errors = rewards + gamma * next_values - values
    advantages = torch.zeros_like(values)
    ahead = torch.zeros_like(values[..., 0])
    for token in reversed(range(values.shape[-1])):
        ahead = (td_errors[..., token] + gamma * lam * ahead) * is_reply[..., token]
        advantages[..., token] = ahead
    return advantages


def returns_to_go(rewards: Tensor, ends: Tensor, gamma: float) -> Tensor:
    """[T, W] discounted sum of the rewards `[T, W]` from each turn to its episode's end, which `ends` marks."""
    return turn_gae(rewards, torch.zeros_like(rewards), torch.zeros_like(rewards), ends, gamma, 1.0)


def group_relative(scores: Tensor, keys: Tensor, is_scaled: bool) -> Tensor:
    """Each score less the mean of the scores that share its key; 0 for a score that is alone.

    Args:
        scores: [B].
        keys: [B] integers; equal ones are compared.
        is_scaled: whether to divide by the standard deviation (of the population) of the scores compared.

    Returns:
        [B].

    Source: Shao et al. 2024, arXiv:2402.03300, eq. 4 (GRPO). Departure: a group of one gives 0, where common code
    keeps the raw score, and so does a group whose scores are all equal.
    """
    _, members = keys.unique(return_inverse=True)
    count = torch.zeros_like(scores).index_add(0, members, torch.ones_like(scores))
    mean = torch.zeros_like(scores).index_add(0, members, scores) / count.clamp_min(1)
    apart = scores - mean[members]
    if is_scaled:
        spread = (torch.zeros_like(scores).index_add(0, members, apart.square()) / count.clamp_min(1)).sqrt()
        apart = apart / (spread[members] + _TINY)
    return torch.where(count[members] > 1, apart, 0.0)


def episode_advantages(rewards: Tensor, groups: Tensor, is_scaled: bool) -> Tensor:
    """[W] return of each env's one episode against its group's.

    Args:
        rewards: [T, W], 0 after the episode's end.
        groups: [W] number of each env's group: envs that started from one seed.
        is_scaled: as in `group_relative`.

    Departure from verl-agent: the group's mean is taken over episodes, not over turns, so long episodes weigh no more.
    """
    return group_relative(rewards.sum(0), groups, is_scaled)


def state_advantages(
    rewards: Tensor, ends: Tensor, is_live: Tensor, states: Tensor, groups: Tensor, gamma: float, is_scaled: bool
) -> Tensor:
    """[T, W] discounted return from each turn on, against turns of the same group that saw the very same thing.

    Args:
        rewards: [T, W].
        ends: [T, W].
        is_live: [T, W] turns that were played.
        states: [T, W] integers >= 0; equal ones mean the same image and prompt.
        groups: [W].
        gamma: discount per turn.
        is_scaled: as in `group_relative`.

    Source: GiGPO, Feng et al. 2025, arXiv:2505.10978, sec. 4.2.
    """
    to_go = returns_to_go(rewards, ends, gamma)
    keys = groups * (int(states.max()) + 1) + states
    advantages = torch.zeros_like(to_go)
    advantages[is_live] = group_relative(to_go[is_live], keys[is_live], is_scaled)
    return advantages


def whiten(values: Tensor, chosen: Tensor) -> Tensor:
    """`values` less their mean and over their deviation, both taken where `chosen` (same shape); 0 elsewhere."""
    kept = values[chosen]
    spread = kept.std(correction=0) if kept.numel() else values.new_ones(())
    return torch.where(chosen, (values - kept.mean()) / (spread + _TINY), 0.0) if kept.numel() else values * 0
