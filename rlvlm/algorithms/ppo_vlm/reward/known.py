"""Turns and episodes whose worth is known, for a judge to be tried on before anything is learned from its word."""

import numpy as np

from rlvlm.algorithms.env_slots import distance_of
from rlvlm.envs.turn_env import TurnEnv
from rlvlm.rewards.scoring_items import ScoringItem, spread

_TURNS_AT_MOST = 2_000
"""Turns that are played in search of both kinds."""


def known_turns(env: TurnEnv, count: int, seed: int, goal: str = "") -> list[ScoringItem]:
    """Turns whose worth is known, for a judge to be tried on: `is_success` says whether success came nearer.

    Args:
        env: with an expert; it is played half by the expert and half by chance, and left somewhere.
        count: turns of each kind, at most: play ends where a kind does not turn up.
        seed: of episodes and play.
        goal: as of `TurnLabeller`.
    """
    rng = np.random.default_rng(seed)
    found: dict[bool, list[ScoringItem]] = {True: [], False: []}
    turn, info = env.reset(seed=seed)
    for _ in range(_TURNS_AT_MOST):
        if min(map(len, found.values())) >= count:
            break
        before, distance, told = turn.snapshot, distance_of(env), goal or env.goal
        action = env.expert_action() if rng.random() < 0.5 else int(rng.choice(info["legal"]))
        turn, _, terminated, truncated, info = env.step(env.action_text(action))
        is_nearer = distance_of(env) < distance
        kind = found[is_nearer]
        if len(kind) < count:
            kind.append(
                ScoringItem(
                    goal=told,
                    snapshots=np.stack([before, turn.snapshot]),
                    action=env.action_names[action],
                    is_success=is_nearer,
                    progress=float(info["progress"]),
                )
            )
        if terminated or truncated:
            turn, info = env.reset()
    return [*found[True], *found[False]]


def known_episodes(env: TurnEnv, count: int, num_frames: int, seed: int, goal: str = "") -> list[ScoringItem]:
    """Whole episodes whose outcome is known: as `known_turns`, some of the expert and some by chance."""
    rng = np.random.default_rng(seed)
    found: dict[bool, list[ScoringItem]] = {True: [], False: []}
    for number in range(4 * count):
        turn, info = env.reset(seed=seed + number)
        snapshots, is_over = [turn.snapshot], False
        while not is_over:
            action = env.expert_action() if number % 2 else int(rng.choice(info["legal"]))
            turn, _, terminated, truncated, info = env.step(env.action_text(action))
            snapshots.append(turn.snapshot)
            is_over = terminated or truncated
        kind = found[bool(info["success"])]
        if len(kind) < count:
            kind.append(
                ScoringItem(
                    goal=goal or env.goal,
                    snapshots=spread(np.stack(snapshots), num_frames),
                    is_success=bool(info["success"]),
                    progress=float(info["progress"]),
                )
            )
    return [*found[True], *found[False]]
