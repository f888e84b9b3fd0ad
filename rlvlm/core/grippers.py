"""Units of gripper commands in data sets and checkpoints. Our envs take 1 for open and 0 for closed."""

from collections.abc import Mapping
from typing import Literal

GripperUnits = Literal["minus_one_opens", "one_opens", "one_closes"]
OPENNESS: Mapping[GripperUnits, tuple[float, float]] = {
    "minus_one_opens": (-0.5, 0.5),
    "one_opens": (1.0, 0.0),
    "one_closes": (-1.0, 1.0),
}
"""By units: factor and offset that make a command an env's, factor * command + offset. minus_one_opens: -1 opens and 1
closes, as in robosuite and LIBERO, and so in LeRobot's data of LIBERO; the others lie in [0, 1]."""
