"""The three MetaWorld tasks of the reference method, with its starts and cameras (Wang et al. 2024, arXiv:2402.03681).

The paper authors its cameras turned by half a turn and flips the images afterwards, which leaves them mirrored. Ours
are turned back, so images are upright and not mirrored. Where the paper crops the middle 300 of 480 pixels, ours have
the narrower opening angle; the paper's crop is 10 pixels off the optical axis, ours is centred.
"""

import math
from typing import Any

from metaworld.sawyer_xyz_env import SawyerXYZEnv

from rlvlm.envs.config import EnvConfig
from rlvlm.envs.metaworld.env import MetaWorldEnv
from rlvlm.envs.metaworld.goals import PAPER_GOALS
from rlvlm.envs.metaworld.scene import Scene
from rlvlm.envs.mujoco.renderer import Camera

_FULL_FOVY_DEG = 45.0
_DRAWER_RANGE = 0.16
"""Metres, the joint's."""


def _opening_angle_deg(kept: float) -> float:
    """Vertical opening angle of the middle part `kept` (0 to 1) of the paper's whole image."""
    return 2 * math.degrees(math.atan(kept * math.tan(math.radians(_FULL_FOVY_DEG) / 2)))


def _drawer_left(env: SawyerXYZEnv, _: dict[str, Any]) -> float:
    """Metres that the drawer can still be drawn out."""
    return _DRAWER_RANGE + env.data.joint("goal_slidey").qpos[0]


DRAWER_OPEN = Scene(
    env_name="drawer-open-v3",
    goal=PAPER_GOALS["drawer_open"][0],
    camera=Camera(
        position=(-0.6, 0.2, 0.35),
        right=(1.0, -1.0, 0.0),
        up=(0.2, 0.2, 1.0),
        fovy_deg=_opening_angle_deg(300 / 480),
    ),
    hand_start=(0.0, 0.75, 0.15),
    placement=(0.0, 0.9, 0.0),
    distance=_drawer_left,
)

SOCCER = Scene(
    env_name="soccer-v3",
    goal=PAPER_GOALS["soccer"][0],
    camera=Camera(
        position=(0.2, 0.6, 0.5),
        right=(0.48847, 0.86900, 0.07893),
        up=(-0.76075, 0.37982, 0.52630),
        fovy_deg=_FULL_FOVY_DEG,
    ),
    hand_start=(0.0, 0.56, 0.05),
    placement=(0.0, 0.65, 0.03, 0.0, 0.85, 0.0),
)

SWEEP_INTO = Scene(
    env_name="sweep-into-v3",
    goal=PAPER_GOALS["sweep_into"][0],
    camera=Camera(
        position=(0.0, 1.1, 0.75),
        right=(-1.0, 0.0, 0.0),
        up=(0.0, -0.87758, 0.47943),
        fovy_deg=_opening_angle_deg(300 / 480),
    ),
    hand_start=(0.0, 0.53, 0.05),
    placement=(0.0, 0.65, 0.02, 0.0, 0.84, 0.02),
    colours={"objGeom": (0.0, 240 / 255, 0.0)},
)


def make_drawer_open(config: EnvConfig, seed: int) -> MetaWorldEnv:
    """The task `drawer_open`."""
    return MetaWorldEnv(DRAWER_OPEN, config, seed)


def make_soccer(config: EnvConfig, seed: int) -> MetaWorldEnv:
    """The task `soccer`."""
    return MetaWorldEnv(SOCCER, config, seed)


def make_sweep_into(config: EnvConfig, seed: int) -> MetaWorldEnv:
    """The task `sweep_into`."""
    return MetaWorldEnv(SWEEP_INTO, config, seed)
