"""The task `fold_cloth`: fold a square cloth along its diagonal by moving one corner once.

Source: Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681, its ClothFoldDiagonal on SoftGym (Lin et al. 2020,
arXiv:2011.07215). The cloth is a flex of MuJoCo's, a net of triangles. What differs:

1. 11 x 11 particles stand for 40 x 40, and bending costs nothing.
2. Layers do not touch each other: a folded one sinks to the table. Contacts between layers would take four times the
   time of all else. Images show the cloth's back above its front, as a fold looks from above.
3. Heights are z; the picked corner is the upper left one, its target an x and a y. The goal is where the particles lie
   after the best fold, corner to corner, in this same simulation.
4. `start="random"`, which the paper does not have, turns the cloth by up to 8 degrees and moves it by up to 8 mm.
5. An episode is over after its one fold, whatever the time limit: it ends for good, so that critics learn the fold's
   reward and nothing else.

A fold costs 23 ms: 43 env steps/s on one core.
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

_PER_SIDE = 11
_SIDE = 0.25
_RADIUS = 0.004  # of particles, and height at which the cloth lies, metres
_KEYPOINTS_PER_SIDE = 6
_REACH = 0.15  # targets lie within this distance of the middle along x and y, metres
_LIFT = 0.06
_CARRY_HEIGHT, _DROP_HEIGHT = _RADIUS + _LIFT, 3 * _RADIUS
_SUB_STEP_S = 0.01
_LIFT_SPEED, _CARRY_SPEED = 0.6, 0.5  # metres per second: 6 and 5 mm a sub-step
_SETTLING_STEPS = 30
_COST_PER_METRE = 10.0
_SUCCESS = 0.9
_MAX_TURN = np.radians(8)
_MAX_SHIFT = 0.008
_FRONT, _BACK = "1 .72 .2 1", ".25 .35 .9 1"


def _flat_cloth() -> NDArray[np.float64]:
    """Returns [121, 3] particles of the flat cloth, centred on the table, row by row from the upper left corner."""
    across = np.linspace(-_SIDE / 2, _SIDE / 2, _PER_SIDE)
    y, x = np.meshgrid(-across, across, indexing="ij")
    return np.stack([x, y, np.full_like(x, _RADIUS)], axis=-1).reshape(-1, 3)


def _triangles() -> NDArray[np.int64]:
    """Returns [200, 3] indices of the net's triangles, counterclockwise from above, cut along the fold's direction."""
    index = np.arange(_PER_SIDE**2).reshape(_PER_SIDE, _PER_SIDE)
    upper_left, upper_right, lower_left, lower_right = index[:-1, :-1], index[:-1, 1:], index[1:, :-1], index[1:, 1:]
    halves = (upper_left, lower_left, upper_right), (upper_right, lower_left, lower_right)
    return np.concatenate([np.stack(half, axis=-1).reshape(-1, 3) for half in halves])


def _text(numbers: NDArray[np.float64] | NDArray[np.int64]) -> str:
    return " ".join(f"{number:.6g}" for number in numbers.ravel())


def _particle(index: int) -> str:
    is_picked = index == 0  # heavy and without gravity: it goes where it is moved, whatever the cloth weighs
    joints = "".join(f'<joint type="slide" axis="{axis}"/>' for axis in ("1 0 0", "0 1 0", "0 0 1"))
    mass = 10 if is_picked else 0.1 / _PER_SIDE**2
    return f'''<body name="{index}" gravcomp="{int(is_picked)}">
        <inertial pos="0 0 0" mass="{mass}" diaginertia="1e-4 1e-4 1e-4"/>{joints}</body>'''


def _skin(faces: NDArray[np.int64], colour: str, inflate: float) -> str:
    """Returns one side of the cloth, visible only from that side: OpenGL leaves out triangles that face away."""
    positions = _flat_cloth()
    bones = "".join(
        f'<bone body="{index}" bindpos="{_text(position)}" bindquat="1 0 0 0" vertid="{index}" vertweight="1"/>'
        for index, position in enumerate(positions)
    )
    return f'<skin rgba="{colour}" inflate="{inflate}" vertex="{_text(positions)}" face="{_text(faces)}">{bones}</skin>'


_MODEL = f"""
<mujoco>
  <size nuserdata="3"/>
  <option timestep="{_SUB_STEP_S}" solver="CG" cone="elliptic" iterations="30" tolerance="1e-4" jacobian="sparse"/>
  <visual><headlight ambient=".4 .4 .4" diffuse=".2 .2 .2" specular="0 0 0"/></visual>
  <worldbody>
    <camera name="above"/>
    <light directional="true" dir=".2 -.3 -1" diffuse=".5 .5 .5"/>
    <geom type="plane" size="2 2 .1" rgba=".85 .85 .82 1" friction="1"/>
    {"".join(_particle(index) for index in range(_PER_SIDE**2))}
  </worldbody>
  <deformable>
    <flex name="cloth" dim="2" radius="{_RADIUS}" group="4"
        body="{" ".join(str(index) for index in range(_PER_SIDE**2))}" element="{_text(_triangles())}">
      <contact friction="1" selfcollide="none" internal="false" solref=".02 1"/>
    </flex>
    {_skin(_triangles(), _FRONT, 0.001)}
    {_skin(_triangles()[:, ::-1], _BACK, 0.003)}
  </deformable>
  <equality><flex flex="cloth" solref=".02 1"/></equality>
</mujoco>
"""


class ClothScene(MujocoScene):
    """A cloth on a table and a picker that holds its upper left corner.

    Observations [111] are 6 x 6 points of the cloth and the picker, metres. An action [2] is a whole fold: lift the
    corner, carry it to (x, y) in 15 cm, lower it.

    Args:
        start: see `StepEnvConfig`; `near` is `random` here.
    """

    goal = DEFORMABLE_GOALS["fold_cloth"][0]
    hand = ("0",)  # the corner that the picker holds
    _camera = Camera(position=(0.0, 0.0, 0.42), right=(1.0, 0.0, 0.0), up=(0.0, 1.0, 0.0), fovy_deg=45.0)

    def __init__(self, start: str) -> None:
        super().__init__(_MODEL, self._camera)
        self.action_size = 2
        self._is_random = start != "fixed"
        self._flat = _flat_cloth()
        edges = self._flat[self.model.flex_edge]  # [E, 2, 3]
        # all particles lie at the model's origin, so edges have no length of their own there
        self.model.flexedge_length0[:] = np.linalg.norm(edges[:, 1] - edges[:, 0], axis=1)
        # the goal is found by making the best fold in this same simulation
        best = mujoco.MjData(self.model)
        best.qpos[:] = self._flat.ravel()
        self._fold(best, self._flat[-1, :2])
        self._folded = best.qpos.reshape(-1, 3).copy()
        self._unfolded_distance = self._distance(self._flat)

    def place(self, data: mujoco.MjData, rng: np.random.Generator) -> None:
        """Lays the cloth flat on the table and stores its rotation and shift in the model's user data."""
        if self._is_random:
            data.userdata[:] = *rng.uniform(-_MAX_SHIFT, _MAX_SHIFT, 2), rng.uniform(-_MAX_TURN, _MAX_TURN)
        data.qpos[:] = self._flat.ravel()
        particles = data.qpos.reshape(-1, 3)
        particles[:, :2] = self._flat[:, :2] @ _turn(data).T + data.userdata[:2]

    def act(self, data: mujoco.MjData, action: FloatArray) -> None:
        """Lifts the corner, carries it to the target and lowers it."""
        self._fold(data, _REACH * action.astype(float))

    def observe(self, data: mujoco.MjData) -> NDArray[np.float64]:
        """Returns [111]: 6 x 6 points of the cloth, then the picker, which is its corner."""
        cloth = data.qpos.reshape(_PER_SIDE, _PER_SIDE, 3)
        every = (_PER_SIDE - 1) // (_KEYPOINTS_PER_SIDE - 1)
        return np.concatenate([cloth[::every, ::every].ravel(), cloth[0, 0]])

    def script(self, obs: FloatArray) -> FloatArray:
        """Returns [2], the fold onto the opposite corner, which is the last point of the cloth in `obs` [111]."""
        return obs[-6:-4] / _REACH

    def judge(self, data: mujoco.MjData) -> SceneState:
        """Rewards minus ten times the mean distance of particles to their goals; progress is the share gone."""
        particles = data.qpos.reshape(-1, 3).copy()
        # rotated and shifted back, because the goal was computed with the cloth in the middle
        particles[:, :2] = (particles[:, :2] - data.userdata[:2]) @ _turn(data)
        distance = self._distance(particles)
        progress = 1.0 - distance / self._unfolded_distance
        # nothing has moved in a new episode, and nothing may follow a fold
        return SceneState(
            reward=-_COST_PER_METRE * distance, progress=progress, success=progress >= _SUCCESS, is_over=data.time > 0
        )

    def _fold(self, data: mujoco.MjData, target: NDArray[np.float64]) -> None:
        """Lifts the corner, carries it to `target` [2] and lowers it, in straight lines, and waits for the cloth."""
        lifted, carried, lowered = (*data.qpos[:2], _CARRY_HEIGHT), (*target, _CARRY_HEIGHT), (*target, _DROP_HEIGHT)
        # the last is no movement: the cloth goes on sinking while the corner is held
        for place, speed in ((lifted, _LIFT_SPEED), (carried, _CARRY_SPEED), (lowered, _LIFT_SPEED), (lowered, 0.0)):
            path, num_steps = np.zeros(3), _SETTLING_STEPS
            if speed:
                path = np.array(place) - data.qpos[:3]
                num_steps = max(int(np.ceil(np.linalg.norm(path) / (speed * _SUB_STEP_S))), 1)
            for _ in range(num_steps):
                # the cloth pulls at the picker, although it weighs a hundredth as much
                data.qvel[:3] = path / (num_steps * _SUB_STEP_S)
                mujoco.mj_step(self.model, data)

    def _distance(self, particles: NDArray[np.float64]) -> float:
        """Returns the mean distance of `particles` [121, 3] from their place after the best fold, metres."""
        return float(np.linalg.norm(particles - self._folded, axis=1).mean())


def _turn(data: mujoco.MjData) -> NDArray[np.float64]:
    """Returns [2, 2], the rotation of this episode's cloth."""
    cos, sin = np.cos(data.userdata[2]), np.sin(data.userdata[2])
    return np.array([[cos, -sin], [sin, cos]])


def make_fold_cloth(config: StepEnvConfig, seed: int) -> SceneEnv:
    """Makes the env of the task `fold_cloth`."""
    return SceneEnv(ClothScene(config.start), config, seed)
