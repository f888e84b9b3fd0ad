"""GRPO in one file, as simple as possible: one episode, one chunk, one token at a time, with Python's own numbers.

    python examples/grpo_in_one_file.py     # a policy learns to reach a target by chunks of two moves, in a minute

It shares no code with rlvlm, whose losses and advantages are held to it. Shao et al. 2024, arXiv:2402.03300; Liu et al.
2025, arXiv:2503.20783 (Dr. GRPO); Ahmadian et al. 2024, arXiv:2402.14740 (RLOO); Yu et al. 2025, arXiv:2503.14476 (two
clips); Ye et al. 2020, arXiv:1912.09729 (dual clip).
"""

import math
import random
from typing import Any

import torch


def advantages(scores, baseline="mean", divide_by_std=True):
    """Advantages of the episodes of a group."""
    size, found = len(scores), []
    mean = sum(scores) / size
    std = math.sqrt(sum((score - mean) ** 2 for score in scores) / (size - 1))
    for own, score in enumerate(scores):
        others = [other for index, other in enumerate(scores) if index != own]
        advantage = score - (mean if baseline == "mean" else sum(others) / len(others))
        found.append(advantage / (std + 1e-6) if divide_by_std else advantage)
    return found


def token_loss(ratio, advantage, clip_low, clip_high, dual_clip=None):
    """What a token costs: the clipped surrogate, at a bad token no worse than `dual_clip` allows."""
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


MOVES = (-2, -1, 0, 1, 2)
STEPS = 2  # of a chunk: both moves are chosen at once, as a vision-language-action policy does


def play(policy, start):
    """One episode of two chunks: 1 for ending at 0, else 0. Each chunk keeps its tokens and their log-probs."""
    place, chunks = start, []
    for _ in range(2):
        logits = policy(torch.nn.functional.one_hot(torch.tensor(place % 19), 19).float()).view(STEPS, len(MOVES))
        tokens = torch.distributions.Categorical(logits=logits).sample().tolist()
        old = logits.log_softmax(-1)[range(STEPS), tokens].tolist()
        chunks.append({"place": place, "tokens": tokens, "steps": STEPS, "old": old})
        place += sum(MOVES[token] for token in tokens)
    return float(place == 0), chunks


def main(updates=150, groups=8, size=6, seed=0):
    """Groups of episodes from one start each; those whose scores differ teach something."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    policy = torch.nn.Linear(19, STEPS * len(MOVES))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    success = []
    for update in range(updates):
        learned, scores = [], []
        for start in [rng.randint(-6, 6) for _ in range(groups)]:
            group = [play(policy, start) for _ in range(size)]
            scores += [score for score, _ in group]
            if len({score for score, _ in group}) > 1:
                found = advantages([score for score, _ in group])
                learned += [{"advantage": own, "chunks": chunks} for own, (_, chunks) in zip(found, group, strict=True)]
        success.append(sum(scores) / len(scores))
        if learned:
            for chunk in [chunk for episode in learned for chunk in episode["chunks"]]:
                seen = torch.nn.functional.one_hot(torch.tensor(chunk["place"] % 19), 19).float()
                logits = policy(seen).view(STEPS, len(MOVES))
                chunk["new"] = logits.log_softmax(-1)[range(STEPS), chunk["tokens"]]
            optimizer.zero_grad()
            loss(learned, action_size=1, exp=torch.exp).backward()
            optimizer.step()
        if update % 30 == 29:
            print(f"update {update + 1}: success {sum(success[-30:]) / 30:.2f}")
    return success


if __name__ == "__main__":
    main()
