"""What sets one MetaWorld task apart from the others. Used by the env, filled in by the scenes of this room."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from metaworld.sawyer_xyz_env import SawyerXYZEnv

from rlvlm.envs.mujoco.renderer import Camera

Colour = tuple[float, float, float]
"""Red, green and blue in [0, 1]."""


def object_to_target(env: SawyerXYZEnv, facts: dict[str, Any]) -> float:
    """Metres between object and target, as the stock env's own success test measures them."""
    return float(facts["obj_to_target"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One MetaWorld task: everything that sets it apart from the others."""

    env_name: str
    """Name in MetaWorld, e.g. `drawer-open-v3`."""
    goal: str
    """Fills the slot of the prompt."""
    camera: Camera
    hand_start: tuple[float, float, float] | None = None
    """Hand at a fixed start, metres; None leaves it at the stock start."""
    placement: tuple[float, ...] | None = None
    """What the stock env would draw at random (its `rand_vec`), at a fixed start, metres; None takes its first draw."""
    colours: dict[str, Colour] = field(default_factory=dict)
    """Geoms that are drawn in one flat colour instead of their material."""
    distance: Callable[[SawyerXYZEnv, dict[str, Any]], float] = object_to_target
    """What is left to do, given the env and the facts of its latest step; progress is the share of it that is done."""
