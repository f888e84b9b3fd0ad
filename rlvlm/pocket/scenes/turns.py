"""Turns of worlds that are talked to, with what each was worth: what the pocket scorer learns to judge.

What a turn was worth follows from the expert's turns to success before and after it; the judge is shown pictures and
the action's name alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlvlm.envs.registry import make_world, task_env, task_goal
from rlvlm.envs.turns import TurnWorld
from rlvlm.pocket.scenes.pairs import Split
from rlvlm.types.steps import FloatArray

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
    """Of both pictures: equal keys look the same."""
    rating: int
    """1, 2, 4 or 5."""


def rating_of(left_before: int, left_after: int) -> int:
    """The rating of a turn, from the expert's turns to success before and after it."""
    if left_after == 0:
        return REACHED
    return NEARER if left_after < left_before else AWAY if left_after > left_before else SAME


def collect_turns(
    task: str, count: int, split: Split, seed: int, *, splits_starts: bool = False
) -> tuple[TurnWorld, list[PlayedTurn]]:
    """A world of `task`, and `count` turns of episodes played half by its expert and half by chance.

    Args:
        task: a world in turns that knows its `turns_left`.
        count: turns.
        split: held out are other seeds.
        seed: of episodes and play.
        splits_starts: whether held-out episodes also begin where no episode of the training does.
    """
    seed += _HELD_OUT_SEED if split == "held_out" else 0
    side: Literal["training", "held_out"] = "training" if split == "train" else "held_out"
    config = task_env(task)
    world: TurnWorld = make_world(task, replace(config, split=side) if splits_starts else config, seed)
    rng = np.random.default_rng(seed)
    turns = list(_play(world, task, count, seed, rng))
    return world, turns


def _play(world: TurnWorld, task: str, count: int, seed: int, rng: np.random.Generator) -> Iterator[PlayedTurn]:
    turn, info = world.reset(seed=seed)
    for _ in range(count):
        left = world.turns_left()
        assert left is not None, f"{task} does not know how many turns its expert would take"
        action: int | None = int(rng.choice(info["legal"]))
        if rng.random() < _P_UNREADABLE:
            action = None
        elif rng.random() < _EXPERT_SHARE:
            action = world.expert_action()
        before = turn.snapshot
        turn, _, terminated, truncated, info = world.step("" if action is None else world.action_text(action))
        after = world.turns_left()
        assert after is not None, f"{task} does not know how many turns its expert would take"
        yield PlayedTurn(
            task=task,
            goal=task_goal(task),
            action="" if action is None else world.action_names[action],
            before=before,
            after=turn.snapshot,
            keys=_keys(world, np.stack([before, turn.snapshot])),
            rating=rating_of(left, after),
        )
        if terminated or truncated or rng.random() < _P_LEAVE:
            turn, info = world.reset()


def _keys(world: TurnWorld, snapshots: FloatArray) -> tuple[bytes, bytes]:
    first, second = (row.tobytes() for row in _picture_key(world, snapshots))
    return first, second


def _picture_key(world: TurnWorld, snapshots: FloatArray) -> NDArray[np.int64]:
    return np.ascontiguousarray(world.picture_key(snapshots), np.int64)
