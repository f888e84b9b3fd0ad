"""GRPO's update as plain as possible: one episode, one chunk, one token at a time, with Python's own numbers.

It shares no code with rlvlm. Shao et al. 2024, arXiv:2402.03300; Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO);
Ahmadian et al. 2024, arXiv:2402.14740 (RLOO); Yu et al. 2025, arXiv:2503.14476 (two clips); Ye et al. 2020,
arXiv:1912.09729 (dual clip).
"""

import math
from typing import Any


def advantages(scores, baseline="mean", divide_by_std=True):
    """Of the episodes of one group."""
    size, found = len(scores), []
    mean = sum(scores) / size
    std = math.sqrt(sum((score - mean) ** 2 for score in scores) / (size - 1))
    for own, score in enumerate(scores):
        others = [other for index, other in enumerate(scores) if index != own]
        advantage = score - (mean if baseline == "mean" else sum(others) / len(others))
        found.append(advantage / (std + 1e-6) if divide_by_std else advantage)
    return found


def token_loss(ratio, advantage, clip_low, clip_high, dual_clip=None):
    clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
    gain = min(ratio * advantage, clipped * advantage)
    if dual_clip is not None and advantage < 0:
        gain = max(gain, dual_clip * advantage)
    return -gain


def loss(
    episodes,
    *,
    action_size,
    ratio="token",
    average="trajectory",
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    kl_weight=0.0,
    longest_steps=1,
    exp=math.exp,
):
    """The number that an update descends.

    Args:
        episodes: dicts with `advantage` and `chunks`; a chunk is a dict with `steps` (env steps that were run), and
            `new`, `old` and `reference`: log-probabilities of its tokens, all `action_size` of a step before the next.
        action_size: tokens of an env step.
        ratio: token, action or chunk.
        average: trajectory, token or constant.
        clip_low, clip_high, dual_clip, kl_weight: as in the papers.
        longest_steps: of the longest possible episode.
        exp: of whatever the log-probabilities are.
    """
    total_steps = sum(chunk["steps"] for episode in episodes for chunk in episode["chunks"])
    result: Any = 0.0
    for episode in episodes:
        length = sum(chunk["steps"] for chunk in episode["chunks"])
        inner = 0.0
        for chunk in episode["chunks"]:
            run = range(chunk["steps"] * action_size)
            for token in run:
                if ratio == "token":
                    together = [token]
                elif ratio == "action":
                    first = token // action_size * action_size
                    together = range(first, first + action_size)
                else:
                    together = run
                log_ratio = sum(chunk["new"][other] - chunk["old"][other] for other in together)
                inner += token_loss(exp(log_ratio), episode["advantage"], clip_low, clip_high, dual_clip)
                if kl_weight:
                    gap = chunk["reference"][token] - chunk["new"][token]
                    inner += kl_weight * (exp(gap) - gap - 1)
        if average == "trajectory":
            result += inner / (length * action_size) / len(episodes)
        elif average == "token":
            result += inner / (total_steps * action_size)
        else:
            result += inner / (longest_steps * action_size) / len(episodes)
    return result
