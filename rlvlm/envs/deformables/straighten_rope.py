"""The task `straighten_rope`: pull a crumpled rope, held by both ends, straight.

Source: Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681, its RopeFlattenEasy on SoftGym (Lin et al. 2020,
arXiv:2011.07215). The rope is a flex of MuJoCo's, a chain of 41 particles as in the paper. What differs:

1. The chain has no stiffness against bending. Held ends are heavy particles that move at the pickers' speed.
2. Starts are drawn as plane curves that do not cross themselves; in the paper they are crumpled by a simulation.
   `start="fixed"` draws from the same 1,000 of them in every run, `start="random"` draws new ones.
3. The table is the plane of x and y, and heights are z. Pickers stay below 5 cm, so that the rope stays in the image.
4. Images show the rope 20 mm thick and not 12.5 mm, which would be a single pixel of 64.

A step costs 1.5 ms, resets included: 640 env steps/s on one core.
"""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import copy

import mujoco
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.deformables.goals import DEFORMABLE_GOALS
from rlvlm.envs.mujoco.env import MujocoScene, SceneEnv, SceneState
from rlvlm.envs.mujoco.renderer import Camera

_NUM_PARTICLES = 41
_LENGTH = 0.5
_SPACING = _LENGTH / (_NUM_PARTICLES - 1)
_RADIUS = 0.00625
_DRAWN_RADIUS = 0.01
_BLUE = ".1 .2 1 1"
_KEYPOINTS = np.rint(np.linspace(0, _NUM_PARTICLES - 1, 10)).astype(int)
_ENDS = [0, -1]
_LOW = (-0.325, -0.325, _RADIUS)  # where pickers may be, metres
_HIGH = (0.325, 0.325, 0.05)
_MOVES = 6  # moves per env step
_MOVE_S = 0.01  # time of a move; its simulation takes two steps
_SPEED = 1.0  # of a picker along each axis at action 1, metres per second: 1 cm a move
_REWARD_CAP = 1.1
_SUCCESS = 0.95
_NUM_FIXED_STARTS = 1_000


def _particle(index: int) -> str:
    is_end = index in (0, _NUM_PARTICLES - 1)  # held: heavy and without gravity, or the rope would drag it along
    joints = "".join(f'<joint type="slide" axis="{axis}"/>' for axis in ("1 0 0", "0 1 0", "0 0 1"))
    mass = 10 if is_end else 0.1 / _NUM_PARTICLES
    return f'''<body name="{index}" gravcomp="{int(is_end)}">
        <inertial pos="0 0 0" mass="{mass}" diaginertia="1e-4 1e-4 1e-4"/>{joints}
        <geom size="{_DRAWN_RADIUS}" rgba="{_BLUE}" contype="0" conaffinity="0"/></body>'''


_MODEL = f"""
<mujoco>
  <option timestep="{_MOVE_S / 2}" solver="CG" iterations="20" tolerance="1e-6"/>
  <visual>
    <quality numslices="12" numstacks="6"/>
    <headlight ambient=".4 .4 .4" diffuse=".2 .2 .2" specular="0 0 0"/>
  </visual>
  <worldbody>
    <camera name="above"/>
    <light directional="true" dir=".2 -.3 -1" diffuse=".5 .5 .5"/>
    <geom type="plane" size="2 2 .1" rgba=".85 .85 .82 1" friction=".5"/>
    {"".join(_particle(index) for index in range(_NUM_PARTICLES))}
  </worldbody>
  <deformable>
    <flex name="rope" dim="1" radius="{_RADIUS}" rgba="{_BLUE}"
        body="{" ".join(str(index) for index in range(_NUM_PARTICLES))}"
        element="{" ".join(f"{index} {index + 1}" for index in range(_NUM_PARTICLES - 1))}">
      <contact friction=".5" selfcollide="auto" internal="false" solref=".01 1"/>
    </flex>
  </deformable>
  <equality><flex flex="rope" solref=".01 1"/></equality>
</mujoco>
"""


class RopeScene(MujocoScene):
    """A rope on a table and two pickers that never let go of its ends.

    Observations [36] are ten points along the rope and both pickers, metres. Actions [8] move the left picker, then the
    right one, along x, y and z, six times 1 cm at 1; the fourth and eighth number, the paper's grasp flags, have no
    effect. A move that would leave the window is not made.

    Args:
        start: see `StepEnvConfig`; `near` is `random` here.
    """

    goal = DEFORMABLE_GOALS["straighten_rope"][0]
    is_symmetric = True
    _camera = Camera(position=(0.0, 0.0, 0.85), right=(1.0, 0.0, 0.0), up=(0.0, 1.0, 0.0), fovy_deg=45.0)

    def __init__(self, start: str) -> None:
        super().__init__(_MODEL, self._camera)
        self.action_size = 8
        # all particles lie at the model's origin, so edges have no length of their own there
        self.model.flexedge_length0[:] = _SPACING
        self.drawn = copy.copy(self.model)  # thicker in images than in the simulation
        self.drawn.flex_radius[:] = _DRAWN_RADIUS
        self._is_fixed = start == "fixed"

    def place(self, data: mujoco.MjData, rng: np.random.Generator) -> None:
        """Lays the rope on the table along a random curve."""
        particles = _particles(data.qpos)
        particles[:, :2] = draw_curve(np.random.default_rng(rng.integers(_NUM_FIXED_STARTS)) if self._is_fixed else rng)
        particles[:, 2] = _RADIUS

    def act(self, data: mujoco.MjData, action: FloatArray) -> None:
        """Makes six moves with both pickers."""
        speeds = _SPEED * action.reshape(2, 4)[:, :3].astype(float)
        pickers, velocities = _particles(data.qpos), _particles(data.qvel)
        for _ in range(_MOVES):
            moved = pickers[_ENDS] + _MOVE_S * speeds
            stays = ((moved >= _LOW) & (moved <= _HIGH)).all(axis=1, keepdims=True)
            for _ in range(2):  # set for each sub-step, because the rope pulls at the pickers during the one before
                velocities[_ENDS] = speeds * stays
                mujoco.mj_step(self.model, data)

    def observe(self, data: mujoco.MjData) -> NDArray[np.float64]:
        """Returns [36]: ten points along the rope, then the pickers, which are its ends."""
        particles = _particles(data.qpos)
        return np.concatenate([particles[_KEYPOINTS].ravel(), particles[_ENDS].ravel()])

    def script(self, obs: FloatArray) -> FloatArray:
        """Returns [8], which moves both ends (the last points of `obs`) away from each other, flat on the table."""
        left, right = obs[-6:-3], obs[-3:]
        away = (right - left) / max(float(np.linalg.norm(right - left)), 1e-6)
        return np.concatenate([-away, [0.0], away, [0.0]])

    def judge(self, data: mujoco.MjData) -> SceneState:
        """Rewards the distance between the ends, up to 1.1 times the rope's length; success from 0.95 times on."""
        first, last = _particles(data.qpos)[_ENDS]
        distance = float(np.linalg.norm(last - first))
        return SceneState(
            reward=min(distance, _REWARD_CAP * _LENGTH),
            progress=distance / _LENGTH,
            success=distance >= _SUCCESS * _LENGTH,
        )


def draw_curve(rng: np.random.Generator) -> NDArray[np.float64]:
    """Returns [41, 2], the particles of a crumpled rope in the plane, metres, centred; it never comes near itself."""
    while True:
        turns = np.zeros(_NUM_PARTICLES - 1)
        for index in range(1, len(turns)):  # each bend lasts for several particles, or the curve would be a zigzag
            turns[index] = 0.9 * turns[index - 1] + rng.normal(0.0, 0.12)
        headings = rng.uniform(-np.pi, np.pi) + np.cumsum(turns)
        steps = _SPACING * np.stack([np.cos(headings), np.sin(headings)], axis=1)
        curve = np.vstack([np.zeros((1, 2)), np.cumsum(steps, axis=0)])
        curve -= curve.mean(axis=0)
        gaps = np.linalg.norm(curve[:, None] - curve[None], axis=-1)
        # only particles at least five apart along the rope are compared: neighbours are always near
        is_apart = gaps[np.triu_indices(_NUM_PARTICLES, 5)].min() > 3 * _RADIUS
        is_crumpled = 0.1 * _LENGTH < gaps[0, -1] < 0.6 * _LENGTH
        if is_apart and is_crumpled and np.abs(curve).max() < 0.25:
            return curve


def _particles(coordinates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns [41, 3], a view of joint positions or velocities [123]; the joints' zero is the origin."""
    return coordinates.reshape(_NUM_PARTICLES, 3)


def make_straighten_rope(config: StepEnvConfig, seed: int) -> SceneEnv:
    """Makes the env of the task `straighten_rope`."""
    return SceneEnv(RopeScene(config.start), config, seed)
