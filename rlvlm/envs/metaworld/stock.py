"""Every stock MetaWorld task by its name, seen by one camera that suits them all. Made by the registry.

`start="fixed"` is one of the stock starts, the same in every run. Where the stock env measures no distance to its
target, progress follows what its reward counts as in place. Goals that stock images mark with a coloured point stay
unmarked: those of reach, push and pick-place are nowhere to be seen.
"""

from typing import Any

from metaworld.sawyer_xyz_env import SawyerXYZEnv

from rlvlm.envs.config import EnvConfig
from rlvlm.envs.metaworld.env import MetaWorldEnv
from rlvlm.envs.metaworld.goals import STOCK_GOALS
from rlvlm.envs.metaworld.scene import Scene, object_to_target
from rlvlm.envs.mujoco.renderer import Camera

CAMERA = Camera(
    position=(0.7, 0.35, 0.6),
    right=(0.54990, 0.83318, -0.05844),
    up=(-0.37621, 0.30955, 0.87330),
    fovy_deg=60.0,
)
"""Over the right side of the table, nearer than the stock cameras: the one for door-open in the reference method's code
(Wang et al. 2024, arXiv:2402.03681), turned upright."""


def _distance(env: SawyerXYZEnv, facts: dict[str, Any]) -> float:
    """Metres to the target, or the share of the reward for the right place that is missing."""
    return object_to_target(env, facts) or 1.0 - float(facts["in_place_reward"])


def make_stock(config: EnvConfig, seed: int, name: str) -> MetaWorldEnv:
    """The task `metaworld/NAME`, `name` being MetaWorld's own, e.g. `door-open-v3`."""
    scene = Scene(env_name=name, goal=STOCK_GOALS[name][0], camera=CAMERA, distance=_distance)
    return MetaWorldEnv(scene, config, seed)
