"""Estimators and losses of PPO for replies in text, one number at a time: `algorithms.policy_gradient` is held to it.

Written from the papers with loops over turns and tokens and `math` alone; it shares no code with rlvlm. A rollout is a
list of envs, an env a list of turns, a turn a dict. Log-probabilities and values may be torch scalars, so that
autograd gives the gradient of what the loops compute.
"""

import math
from typing import Any

import torch


def gae_of_env(turns, gamma, lam):
    """turns: dicts with reward, value, next_value, end."""
    out = []
    for start in range(len(turns)):
        total, weight = 0.0, 1.0
        for turn in turns[start:]:
            total += weight * (turn["reward"] + gamma * turn["next_value"] - turn["value"])
            weight *= gamma * lam
            if turn["end"]:
                break
        out.append(total)
    return out


def standardise(numbers):
    mean = sum(numbers) / len(numbers)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in numbers) / len(numbers))
    return [(x - mean) / (deviation + 1e-6) for x in numbers]


def turn_critic_credit(envs, gamma, lam):
    raw = [gae_of_env(turns, gamma, lam) for turns in envs]
    returns = [[a + t["value"] for a, t in zip(row, turns, strict=True)] for row, turns in zip(raw, envs, strict=True)]
    flat = iter(standardise([a for row in raw for a in row]))
    return [[next(flat) for _ in row] for row in raw], returns


def bi_level_credit(envs, turn_gamma, turn_lambda, token_gamma, token_lambda):
    """Turns bring `token_values`, one per token of the reply."""
    raw, returns = [], []
    for turns in envs:
        tops = [dict(t, value=t["token_values"][-1]) for t in turns]
        upper = gae_of_env(tops, turn_gamma, turn_lambda)
        for turn, top, advantage in zip(turns, tops, upper, strict=True):
            pay, values = advantage + top["value"], turn["token_values"]
            n = len(values)
            row = []
            for start in range(n):
                total = 0.0
                for k in range(start, n):
                    reward = pay if k == n - 1 else 0.0
                    following = values[k + 1] if k + 1 < n else 0.0
                    total += (token_gamma * token_lambda) ** (k - start) * (
                        reward + token_gamma * following - values[k]
                    )
                row.append(total)
            raw.append(row)
            returns.append([a + v for a, v in zip(row, values, strict=True)])
    flat = iter(standardise([a for row in raw for a in row]))
    return [[next(flat) for _ in row] for row in raw], returns


def compared(score, others, scaled):
    """One score against all of its group, itself included."""
    if len(others) < 2:
        return 0.0
    mean = sum(others) / len(others)
    if not scaled:
        return score - mean
    deviation = math.sqrt(sum((x - mean) ** 2 for x in others) / len(others))
    return (score - mean) / (deviation + 1e-6)


def grpo_credit(envs, groups, scaled):
    totals = [sum(t["reward"] for t in turns) for turns in envs]
    credit = []
    for env, turns in enumerate(envs):
        rivals = [totals[i] for i in range(len(envs)) if groups[i] == groups[env]]
        credit.append([compared(totals[env], rivals, scaled) for _ in turns])
    return credit


def gigpo_credit(envs, groups, gamma, step_weight, scaled):
    """Turns bring `state`."""
    episodes = grpo_credit(envs, groups, scaled)
    to_go = []
    for turns in envs:
        row = []
        for start in range(len(turns)):
            row.append(sum(gamma**k * turn["reward"] for k, turn in enumerate(turns[start:])))
        to_go.append(row)
    credit = []
    for w, turns in enumerate(envs):
        row = []
        for t, turn in enumerate(turns):
            rivals = [
                to_go[i][j]
                for i in range(len(envs))
                for j in range(len(envs[i]))
                if groups[i] == groups[w] and envs[i][j]["state"] == turn["state"]
            ]
            row.append(episodes[w][t] + step_weight * compared(to_go[w][t], rivals, scaled))
        credit.append(row)
    return credit


def bare(number):
    return number.item() if torch.is_tensor(number) else number


def pessimist(ratio, advantage, clip):
    kept = min(max(bare(ratio), 1 - clip), 1 + clip)
    plain, clipped = ratio * advantage, kept * advantage
    return -plain if bare(plain) <= clipped else torch.tensor(-clipped, dtype=torch.float64)


def rl4vlm_loss(turns, thought_weight, clip, value_clip, value_weight, max_ratio):
    """Turns of a minibatch: log_probs, old, action (bools), advantage, value, old_value, ret."""
    ratios = []
    for turn in turns:
        exponent: Any = 0.0
        for now, old, is_action in zip(turn["log_probs"], turn["old"], turn["action"], strict=True):
            exponent = exponent + (1.0 if is_action else thought_weight) * (now - old)
        ratios.append(torch.exp(exponent))
    too_large = any(bare(r) > max_ratio for r in ratios)
    total: Any = 0.0
    for turn, ratio in zip(turns, ratios, strict=True):
        if too_large:
            inside = 1 - clip <= bare(ratio) <= 1 + clip
            kept = ratio if inside else torch.tensor(min(max(bare(ratio), 1 - clip), 1 + clip), dtype=torch.float64)
            policy = -kept * turn["advantage"]
        else:
            policy = pessimist(ratio, turn["advantage"], clip)
        plain = (turn["value"] - turn["ret"]) ** 2 / 2
        step = turn["value"] - turn["old_value"]
        near = turn["old_value"] + (step if abs(bare(step)) <= value_clip else math.copysign(value_clip, bare(step)))
        clipped = (near - turn["ret"]) ** 2 / 2
        value = plain if bare(plain) >= bare(clipped) else clipped
        total = total + policy + value_weight * value
    return total / len(turns)


def token_loss(turns, clip, value_weight=0.0, kl_weight=0.0, entropy_weight=0.0):
    """As above, with `advantage` a number or one per token, `value` and `ret` likewise, `reference`, `entropies`."""
    total: Any = 0.0
    for turn in turns:
        for n, now in enumerate(turn["log_probs"]):
            advantage = turn["advantage"][n] if isinstance(turn["advantage"], list) else turn["advantage"]
            total = total + pessimist(torch.exp(now - turn["old"][n]), advantage, clip)
            difference = turn["reference"][n] - now
            total = total + kl_weight * (torch.exp(difference) - 1 - difference)
            if turn["action"][n]:
                total = total - entropy_weight * turn["entropies"][n]
        values = turn["value"] if isinstance(turn["value"], list) else [turn["value"]]
        targets = turn["ret"] if isinstance(turn["ret"], list) else [turn["ret"]]
        errors = sum((value - target) ** 2 / 2 for value, target in zip(values, targets, strict=True))
        total = total + value_weight * errors / len(values)
    return total / len(turns)
