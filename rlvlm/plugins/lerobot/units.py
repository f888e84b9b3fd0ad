"""Units of a checkpoint's gripper, which its files do not name: LeRobot's LIBERO opens by -1 and closes by 1, our envs
take 1 for open and 0 for closed. A wrong guess plays, teaches and writes back the opposite of every grasp.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.grippers import OPENNESS, GripperUnits
from rlvlm.envs.env import ChunkEnv
from rlvlm.plugins.lerobot.checkpoint import Checkpoint, Statistics

_ROUNDING = 1e-3
_SETTING = "--policy.lerobot.gripper"


def in_env_units(checkpoint: Checkpoint, said: GripperUnits | None, env: ChunkEnv) -> Checkpoint:
    """Returns the checkpoint with the conversion of its actions to the units of `env`.

    Args:
        checkpoint: with as many numbers in an action as the env has.
        said: units of its gripper; None: the env's.
        env: an unscaled dimension of its actions from 0 to 1 is a gripper.

    Raises:
        ModelUnavailable: by the checkpoint's statistics the gripper has other units, or may have; or `said` has no
            effect.
    """
    low, high = np.asarray(env.action_low), np.asarray(env.action_high)
    grippers = ~np.array(env.scaled_actions) & (low == 0) & (high == 1)
    if not grippers.any():
        if said is not None:
            raise ModelUnavailable(f"{_SETTING} has no effect: no action of the env is a gripper's", "leave it out")
        return checkpoint
    statistics, negative = checkpoint.action, said == "minus_one_opens"
    factor, offset = OPENNESS[said or "one_opens"]
    never_moves = (statistics.scale.range == 0) & (statistics.mode != "IDENTITY")
    for what, is_so in {
        "does not stay in [0, 1]": _leaves_unit_range(statistics) & (not negative),
        "never falls below 0": _is_positive(statistics) & ~never_moves & negative,
        "never moves": never_moves & (said is None),
        "has no statistics": np.full(len(low), statistics.mode == "IDENTITY" and statistics.least is None and not said),
        "is relative to the state": np.array(checkpoint.relative) & ((factor, offset) != (1, 0)),
    }.items():
        if (found := is_so & grippers).any():
            raise ModelUnavailable(
                f"dimension {int(found.argmax())} of the checkpoint's actions, the gripper, {what}, and "
                + (f"its units are said to be {said}" if said else "the env takes 1 for open and 0 for closed"),
                f"say what the data that it was trained on use: {_SETTING} {', '.join(OPENNESS)}; LeRobot's data of "
                "LIBERO: minus_one_opens",
            )
    return replace(checkpoint, to_env=(np.where(grippers, factor, 1), np.where(grippers, offset, 0)))


def _leaves_unit_range(statistics: Statistics) -> NDArray[np.bool_]:
    """Returns for each number whether some of its values must be outside of [0, 1]."""
    first, second = statistics.first, statistics.second
    if statistics.least is not None and statistics.most is not None:
        return (statistics.least < -_ROUNDING) | (statistics.most > 1 + _ROUNDING)
    if statistics.mode == "MEAN_STD":  # numbers in [0, 1] of mean m have a variance of at most m (1 - m)
        return (first < -_ROUNDING) | (second**2 > first * (1 - first) + _ROUNDING)
    return ((first < -_ROUNDING) | (second > 1 + _ROUNDING)) & (statistics.mode != "IDENTITY")


def _is_positive(statistics: Statistics) -> NDArray[np.bool_]:
    """Returns for each number whether hardly any of its values is below 0, as far as the statistics say."""
    if statistics.least is not None:
        return statistics.least >= 0
    return (statistics.first >= 0) & (statistics.mode not in ("IDENTITY", "MEAN_STD"))
