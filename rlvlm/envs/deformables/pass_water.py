"""The task `pass_water`: move a cup of water to a red disc without spilling.

Source: Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681, its one-dimensional PassWater on SoftGym (Lin et al. 2020,
arXiv:2011.07215). What differs, because the water is 64 balls in MuJoCo and not a fluid of PyFleX's:

1. Balls slide past each other and along the cup without friction; on the table they come to rest. Their waves are lower
   than water's, so the cup is filled nearly to the brim: at full speed two or three of a hundred are lost, moved to and
   fro at random a third.
2. The cup has one size. Starts differ in its place, within 10 cm, and in how the balls lie. `start="fixed"` draws from
   the same 1,000 of them in every run, `start="random"` draws new ones.
3. Heights are z, the cup moves along x. The red disc hangs in the air where the paper paints it over the image.

A step costs 1.5 ms, resets included: 680 env steps/s on one core.
"""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import mujoco
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.deformables.goals import DEFORMABLE_GOALS
from rlvlm.envs.mujoco.env import MujocoScene, SceneEnv, SceneState
from rlvlm.envs.mujoco.renderer import Camera

_PER_SIDE = 4
_NUM_BALLS = _PER_SIDE**3
_RADIUS = 0.0325
_INSIDE = 0.28  # width and depth of the cup's inside, metres
_HEIGHT = 0.24
_WALL = 0.02
_GOAL_X = 1.2
_START_SPREAD = 0.1
_SUB_STEPS = 8  # per env step, of 10 ms each
_SUB_STEP_S = 0.01
_SPEED = 1.1  # of the cup at action 1, metres per second: 11 mm a sub-step
_GENTLE = 0.3  # of an action of the script: at 1 two or three balls in a hundred are spilled
_SPILL_COST = 10.0
_SUCCESS = -0.36
_SETTLING_STEPS = 40
_NUM_FIXED_STARTS = 1_000
_EYE = np.array([0.53, -1.0, 2.0])
_FORWARD, _UP = np.array([0.0, 0.5, -np.sqrt(0.75)]), np.array([0.0, np.sqrt(0.75), 0.5])
_FULL_PX, _FOVY_DEG = 720, 45.0
_DISC_PX, _DISC_RADIUS_PX = (632, 394), 20  # column, row and radius of the disc in the paper's image of 720 pixels
_DISC_AWAY = 1.4  # from the camera along its axis, metres: nearer than the cup ever is


def _disc() -> str:
    """Returns the disc as a geom, upright on the ray from the camera through its pixel."""
    pixel = 2 * np.tan(np.radians(_FOVY_DEG / 2)) / _FULL_PX  # at 1 m
    right, down = (pixel * (at - _FULL_PX / 2) for at in _DISC_PX)
    ray = _FORWARD + right * np.array([1.0, 0.0, 0.0]) - down * _UP
    place, facing = (" ".join(f"{number:.6f}" for number in vector) for vector in (_EYE + _DISC_AWAY * ray, ray))
    size = f"{_DISC_RADIUS_PX * pixel * _DISC_AWAY:.6f} 1e-3"
    return f'<geom type="cylinder" size="{size}" pos="{place}" zaxis="{facing}" rgba="1 0 0 1" class="air"/>'


def _walls() -> str:
    half, middle, out = _INSIDE / 2, _HEIGHT / 2, (_INSIDE + _WALL) / 2
    sides = "".join(
        f'<geom class="wall" pos="{sign * out} 0 {middle}" size="{_WALL / 2} {half + _WALL} {middle}"/>'
        f'<geom class="wall" pos="0 {sign * out} {middle}" size="{half} {_WALL / 2} {middle}"/>'
        for sign in (-1, 1)
    )
    return f'<geom class="wall" pos="0 0 {_WALL / 2}" size="{half} {half} {_WALL / 2}"/>{sides}'


_JOINTS = "".join(f'<joint type="slide" axis="{axis}"/>' for axis in ("1 0 0", "0 1 0", "0 0 1"))
_MODEL = f"""
<mujoco>
  <option timestep="{_SUB_STEP_S}" solver="CG" iterations="20" tolerance="1e-4" jacobian="sparse"/>
  <visual>
    <quality numslices="12" numstacks="6"/>
    <headlight ambient=".4 .4 .4" diffuse=".2 .2 .2" specular="0 0 0"/>
  </visual>
  <default>
    <geom condim="1" solref=".02 .7"/>
    <default class="ball"><geom size="{_RADIUS}" density="1000" rgba=".1 .3 1 1"/></default>
    <default class="wall"><geom type="box" mass="1000" contype="2" rgba=".75 .75 .8 .45"/></default>
    <default class="air"><geom contype="0" conaffinity="0"/></default>
  </default>
  <worldbody>
    <camera name="paper"/>
    <light directional="true" dir=".2 .3 -1" diffuse=".5 .5 .5"/>
    <geom type="plane" size="4 4 .1" rgba=".9 .9 .87 1" contype="2" condim="3" friction=".6"/>
    {_disc()}
    <body name="cup"><joint type="slide" axis="1 0 0"/>{_walls()}</body>
    {f'<body>{_JOINTS}<geom class="ball"/></body>' * _NUM_BALLS}
  </worldbody>
</mujoco>
"""


class WaterScene(MujocoScene):
    """A cup that moves along a line, and what is in it.

    Observations [7] are the cup's x, width, depth and height, the water's height in it, and the shares of the water
    inside and outside. Actions [1] are the cup's speed: 8 times 11 mm a step at 1.

    Args:
        start: see `StepEnvConfig`; `near` is `random` here.
    """

    goal = DEFORMABLE_GOALS["pass_water"][0]
    hand = ("cup",)
    _camera = Camera(position=tuple(_EYE), right=(1.0, 0.0, 0.0), up=tuple(_UP), fovy_deg=_FOVY_DEG)

    def __init__(self, start: str) -> None:
        super().__init__(_MODEL, self._camera)
        self.action_size = 1
        self._is_fixed = start == "fixed"

    def place(self, data: mujoco.MjData, rng: np.random.Generator) -> None:
        """Fills the cup and waits until the water is calm."""
        if self._is_fixed:
            rng = np.random.default_rng(rng.integers(_NUM_FIXED_STARTS))
        data.qpos[0] = rng.uniform(-_START_SPREAD, _START_SPREAD)
        across = (np.arange(_PER_SIDE) - (_PER_SIDE - 1) / 2) * 2.05 * _RADIUS
        upwards = _WALL + (1.0 + 2.05 * np.arange(_PER_SIDE)) * _RADIUS
        # a grid with gaps and a little jitter: balls in exact columns would stand on each other for ever
        lattice = np.stack(np.meshgrid(across, across, upwards), axis=-1).reshape(_NUM_BALLS, 3)
        _balls(data)[:] = lattice + [data.qpos[0], 0.0, 0.0] + rng.uniform(-1e-3, 1e-3, (_NUM_BALLS, 3))
        self._move(data, 0.0, _SETTLING_STEPS)

    def act(self, data: mujoco.MjData, action: FloatArray) -> None:
        """Moves the cup at the speed of `action`."""
        self._move(data, _SPEED * float(action[0]), _SUB_STEPS)

    def observe(self, data: mujoco.MjData) -> NDArray[np.float64]:
        """Returns [7]: the cup's x and size, the water's height, the shares inside and outside."""
        is_inside = _is_inside(data)
        heights = _balls(data)[is_inside, 2]
        height = heights.max() + _RADIUS - _WALL if len(heights) else 0.0
        share = is_inside.mean()
        return np.array([data.qpos[0], _INSIDE, _INSIDE, _HEIGHT, height, share, 1.0 - share])

    def script(self, obs: FloatArray) -> FloatArray:
        """Returns [1], a move to the disc and no farther, at a speed that spills hardly anything."""
        away = (_GOAL_X - obs[:1]) / (_SPEED * _SUB_STEPS * _SUB_STEP_S)  # in steps of action 1
        return np.clip(away, -_GENTLE, _GENTLE)

    def judge(self, data: mujoco.MjData) -> SceneState:
        """Rewards minus the distance to the goal and minus ten times the spilled share; spills lower progress too."""
        kept, away = _is_inside(data).mean(), abs(_GOAL_X - data.qpos[0])
        reward = float(-_SPILL_COST * (1.0 - kept) - away)
        return SceneState(reward=reward, progress=float(kept * (1.0 - away / _GOAL_X)), success=reward > _SUCCESS)

    def _move(self, data: mujoco.MjData, speed: float, num_steps: int) -> None:
        for _ in range(num_steps):
            data.qvel[0] = speed  # the water pushes the cup, although it weighs a thousandth as much
            mujoco.mj_step(self.model, data)


def _balls(data: mujoco.MjData) -> NDArray[np.float64]:
    """Returns [64, 3], a view of the balls' positions."""
    return data.qpos[1:].reshape(_NUM_BALLS, 3)


def _is_inside(data: mujoco.MjData) -> NDArray[np.bool_]:
    """Returns [64], which balls lie in the cup."""
    x, y, z = (_balls(data) - [data.qpos[0], 0.0, 0.0]).T
    return (abs(x) < _INSIDE / 2) & (abs(y) < _INSIDE / 2) & (0.0 < z) & (z < _HEIGHT)


def make_pass_water(config: StepEnvConfig, seed: int) -> SceneEnv:
    """Makes the env of the task `pass_water`."""
    return SceneEnv(WaterScene(config.start), config, seed)
