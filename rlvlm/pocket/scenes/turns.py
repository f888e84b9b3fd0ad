"""Turns of envs that are talked to, with what each was worth: what the pocket scorer learns to judge.

What a turn was worth follows from the expert's turns to success before and after it; the judge is shown images and
the action's name alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray
from rlvlm.envs.registry import make_env, task_env, task_goal
from rlvlm.envs.turn_env import TurnEnv
from rlvlm.pocket.scenes.pairs import Split

AWAY, SAME, NEARER, REACHED = 1, 2, 4, 5
"""Ratings of a turn, as the prompt of a step's utility has them."""
_EXPERT_SHARE = 0.5
"""Chance that a turn is the expert's; by chance otherwise."""
_P_UNREADABLE = 0.05
"""Chance that a turn is an unreadable reply, which changes nothing."""
_P_LEAVE = 0.08
"""Chance of leaving an episode early, so that long ones do not crowd out other beginnings."""
_HELD_OUT_SEED = 50_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedTurn:
    """One turn, as it can be judged."""

    task: str
    goal: str
    action: str
    """Its name; empty where the reply could not be read."""
    before: FloatArray
    """[S] the snapshot before it."""
    after: FloatArray
    """[S] and after it."""
    keys: tuple[bytes, bytes]
    """Of both images: equal keys look the same."""
    rating: int
    """1, 2, 4 or 5."""


def rating_of(left_before: int, left_after: int) -> int:
    """The rating of a turn, from the expert's turns to success before and after it."""
    if left_after == 0:
        return REACHED
    return NEARER if left_after < left_before else AWAY if left_after > left_before else SAME


def collect_turns(
    task: str, count: int, split: Split, seed: int, *, splits_starts: bool = False
) -> tuple[TurnEnv, list[PlayedTurn]]:
    """An env of `task`, and `count` turns of episodes played half by its expert and half by chance.

    Args:
        task: an env in turns that knows its `turns_left`.
        count: turns.
        split: held out are other seeds.
        seed: of episodes and play.
        splits_starts: whether held-out episodes also begin where no episode of the training does.
    """
    seed += _HELD_OUT_SEED if split == "held_out" else 0
    side: Literal["training", "held_out"] = "training" if split == "train" else "held_out"
    config = task_env(task)
    env: TurnEnv = make_env(task, replace(config, split=side) if splits_starts else config, seed)
    rng = np.random.default_rng(seed)
    turns = list(_play(env, task, count, seed, rng))
    return env, turns


def _play(env: TurnEnv, task: str, count: int, seed: int, rng: np.random.Generator) -> Iterator[PlayedTurn]:
    turn, info = env.reset(seed=seed)
    for _ in range(count):
        left = env.turns_left()
        assert left is not None, f"{task} does not know how many turns its expert would take"
        action: int | None = int(rng.choice(info["legal"]))
        if rng.random() < _P_UNREADABLE:
            action = None
        elif rng.random() < _EXPERT_SHARE:
            action = env.expert_action()
        before = turn.snapshot
        turn, _, terminated, truncated, info = env.step("" if action is None else env.action_text(action))
        after = env.turns_left()
        assert after is not None, f"{task} does not know how many turns its expert would take"
        yield PlayedTurn(
            task=task,
            goal=task_goal(task),
            action="" if action is None else env.action_names[action],
            before=before,
            after=turn.snapshot,
            keys=_keys(env, np.stack([before, turn.snapshot])),
            rating=rating_of(left, after),
        )
        if terminated or truncated or rng.random() < _P_LEAVE:
            turn, info = env.reset()


def _keys(env: TurnEnv, snapshots: FloatArray) -> tuple[bytes, bytes]:
    first, second = (row.tobytes() for row in _image_key(env, snapshots))
    return first, second


def _image_key(env: TurnEnv, snapshots: FloatArray) -> NDArray[np.int64]:
    return np.ascontiguousarray(env.image_key(snapshots), np.int64)
