"""One MetaWorld task as an env: the stock v3 physics and reward, in a scene changed at run time.

What differs from the stock envs, all of it in the reference method's paper (Wang et al. 2024, arXiv:2402.03681) or
needed to keep promises of `StepEnv`:

1. `start="fixed"` puts object and hand where the scene has them. `start="random"` is the stock start: the object is
   drawn anew each episode by the env's own generator, and in the paper's tasks the hand is further away. With
   `start="near"` the object is drawn too, and the hand begins as far from it, and on the same side, as in the paper.
2. Images leave the robot out (`robot="hidden"`), because the arm covers the object, and never show goal markers.
3. The camera is the scene's, drawn directly at the size asked for.
4. The time limit is `MetaWorldConfig.episode_steps` (the stock envs raise an error at step 501), a truncation.
5. Observations are float32, and the first one of an episode shows the object where it is: the stock envs report where
   it was in the previous episode, because they do not recompute positions after placing it.
6. Progress is the share of the distance at the start that is gone, 0 where the object went further away.

The paper's three scenes have the starts and cameras of the reference method. It authors its cameras turned by half a
turn and flips the images afterwards, which leaves them mirrored; ours are turned back, so images are upright and not
mirrored. Where the paper crops the middle 300 of 480 pixels, ours have the narrower opening angle; the paper's crop is
10 pixels off the optical axis, ours is centred.

Every stock task has one camera that suits them all. `start="fixed"` is one of the stock starts, the same in every run.
Where the stock env measures no distance to its target, progress follows what its reward counts as in place. Goals that
stock images mark with a coloured point stay unmarked: those of reach, push and pick-place are nowhere to be seen.
"""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.policies.policy import Policy
from metaworld.sawyer_xyz_env import SawyerXYZEnv
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray
from rlvlm.envs.env import check_action
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.envs.metaworld.goals import PAPER_GOALS, STOCK_GOALS
from rlvlm.envs.mujoco.env import MujocoEnv
from rlvlm.envs.mujoco.renderer import Camera, Renderer

Colour = tuple[float, float, float]
"""Red, green and blue in [0, 1]."""


def object_to_target(env: SawyerXYZEnv, facts: dict[str, Any]) -> float:
    """Returns metres between object and target, as measured by the stock env's own success test."""
    return float(facts["obj_to_target"])


@dataclass(frozen=True, kw_only=True, slots=True)
class MetaWorldTask:
    """One MetaWorld task: everything that distinguishes it from the others."""

    env_name: str
    """Name in MetaWorld, e.g. `drawer-open-v3`."""
    goal: str
    """Goal phrase for the prompt."""
    camera: Camera
    hand_start: tuple[float, float, float] | None = None
    """Hand position for a fixed start, metres; None keeps the stock start."""
    placement: tuple[float, ...] | None = None
    """Random vector (`rand_vec`) of the stock env for a fixed start, metres; None takes its first draw."""
    colours: dict[str, Colour] = field(default_factory=dict)
    """Geoms that are drawn in one flat colour instead of their material."""
    distance: Callable[[SawyerXYZEnv, dict[str, Any]], float] = object_to_target
    """Remaining distance, given the env and the facts of its latest step; progress is the share of it that is gone."""


_NO_GOAL = np.zeros(3)
_ROBOT_BODIES = ("base", "mocap")  # roots of the bodies that `robot="hidden"` leaves out
_FURNITURE = ("tablelink", "RetainingWall")
_LEAST_METRES = 1e-3  # starts nearer to the target than this count as this far away


class MetaWorldEnv(MujocoEnv):
    """One MetaWorld task as an env.

    Observations [39] are the stock ones with the goal left out (zeros); actions [4] move the hand (three axes, 1 cm at
    1) and close the gripper. A snapshot holds the joint positions and the positions of the bodies that a reset moves.

    Args:
        scene: the task to play.
        config: start, robot and episode length.
        seed: of everything random in this env, until `reset` is given another.

    Raises:
        MachineError: no off-screen renderer works here.
    """

    _hand = ("rightclaw", "leftclaw")

    def __init__(self, scene: MetaWorldTask, config: MetaWorldConfig, seed: int) -> None:
        super().__init__(scene.goal, 4, config)
        self._scene = scene
        self._shows_robot = config.robot == "visible"
        self._stock: SawyerXYZEnv = ALL_V3_ENVIRONMENTS[scene.env_name]()
        stock = self._stock
        stock._set_task_called = stock.seeded_rand_vec = True
        stock._freeze_rand_vec = config.start == "fixed"  # then every reset places things according to `_last_rand_vec`
        self._hand_from_object: NDArray[np.float64] | None = None
        if config.start == "near" and scene.hand_start is not None and scene.placement is not None:
            self._hand_from_object = np.subtract(scene.hand_start, scene.placement[:3])
        if config.start == "fixed":
            stock.hand_init_pos = np.array(scene.hand_start or stock.hand_init_pos)
            stock._last_rand_vec = np.array(scene.placement or _first_draw(stock))
        self._model, self._data = self._stock.model, self._stock.data
        model = self._model
        for name, colour in scene.colours.items():
            geom = model.geom(name).id
            # a material would override the colour
            model.geom_matid[geom], model.geom_rgba[geom] = -1, (*colour, 1.0)
        self._positions = model.body_pos.copy(), model.site_pos.copy()
        self._placed = _placed_bodies(model)
        self.snapshot_size = model.nq + 3 * len(self._placed)
        shown = np.arange(model.nq)
        if not self._shows_robot:  # its joints change no image: without them more snapshots share a key
            joint_of = np.searchsorted(model.jnt_qposadr, shown, side="right") - 1  # a joint may have several positions
            roots = model.body_rootid[model.jnt_bodyid[joint_of]]
            shown = np.flatnonzero(~np.isin(roots, [model.body(name).id for name in _ROBOT_BODIES]))
        self._shown = np.append(shown, np.arange(model.nq, self.snapshot_size))
        box = self._stock.sawyer_observation_space
        self._low, self._high = box.low, box.high
        self._hand_place = self._data.body("hand").xpos  # views of the simulator's memory
        self._claws = [self._data.body(name).xpos for name in ("rightclaw", "leftclaw")]
        self.observation_space = gym.spaces.Box(box.low.astype(np.float32), box.high.astype(np.float32))
        self._start_distance = 0.0
        self._script: Policy | None = None
        self.reset(seed=seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Returns the first observation [39] and info of a new episode; `options` is not used."""
        super().reset(seed=seed, options=options)
        stock = self._stock
        stock.np_random = self.np_random  # randomness must be part of our state, which is saved
        self._model.body_pos[:], self._model.site_pos[:] = self._positions  # independent of the episode before
        mujoco.mj_resetData(self._model, self._data)
        stock.reset_model()
        if self._hand_from_object is not None:
            # A reset moves the hand before it draws the object's place. A second reset repeats the draw with things
            # already in place, so that the hand pushes nothing on its way.
            assert stock._last_rand_vec is not None, "every reset draws"
            stock.hand_init_pos = stock._last_rand_vec[:3] + self._hand_from_object
            stock._freeze_rand_vec = True
            mujoco.mj_resetData(self._model, self._data)
            stock.reset_model()
            stock._freeze_rand_vec = False
        mujoco.mj_kinematics(self._model, self._data)  # positions only: see set_state
        # the stock env keeps one step of history: at a start both halves show the same moment
        stock._prev_obs = stock._get_curr_obs_combined_no_goal()
        self._steps = 0
        obs = self._observe()
        # Ask the stock env for the facts of this start, then undo what the question changed: some envs store first
        # distances, first contacts and the like when asked, and compute rewards relative to them.
        before = dict(vars(stock))
        facts = stock.evaluate_state(obs, np.zeros(4, np.float32))[1] | {"success": False}
        vars(stock).update(before)
        self._start_distance = max(self._scene.distance(stock, facts), _LEAST_METRES)
        return obs.astype(np.float32), self._info(facts)

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Returns observation [39], the stock reward (0 to 10), never terminated, truncated at the time limit, info.

        Raises:
            NumericsError: the action is not finite.
        """
        check_action(action)
        stock = self._stock
        stock.set_xyz_action(action[:3])
        self._data.ctrl[:] = action[3], -action[3]
        mujoco.mj_step(self._model, self._data, nstep=stock.frame_skip)
        mujoco.mj_forward(self._model, self._data)
        obs = self._observe()
        reward, facts = stock.evaluate_state(obs, action)
        self._steps += 1
        truncated = self._steps >= self._episode_steps
        return obs.astype(np.float32), float(reward), False, truncated, self._info(facts)

    def snapshot(self) -> FloatArray:
        """Returns [S]: joint positions, then the positions of the bodies that a reset moves."""
        return np.concatenate([self._data.qpos, self._model.body_pos[self._placed].ravel()], dtype=np.float32)

    def image_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """Returns [N, P]: what the image shows, in steps of a quarter of a millimetre (or of a milliradian)."""
        return super().image_key(snapshots[:, self._shown])

    def scripted_action(self, obs: FloatArray) -> FloatArray | None:
        """Returns [4], the next action of MetaWorld's own script, which knows the goal."""
        if self._script is None:
            from metaworld.policies import ENV_POLICY_MAP  # sixty modules, imported only when needed

            self._script = ENV_POLICY_MAP[self._scene.env_name]()
        target = self._stock._target_pos
        assert target is not None, "every reset sets it"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that actions are clipped
            informed = np.append(obs[:-3], target).astype(np.float64)
            return np.asarray(self._script.get_action(informed), np.float32)

    def get_state(self) -> dict[str, Any]:
        """Returns physics, moved bodies, the stock env's own bookkeeping, generator and step count."""
        # the stock env keeps values for its reward in attributes: numbers and arrays are saved by name, and so are the
        # names of those not set yet
        state = super().get_state() | {
            "placed": self._model.body_pos[self._placed],
            "sites": self._model.site_pos.copy(),
            "unset": " ".join(name for name, value in vars(self._stock).items() if value is None),
            "start_distance": self._start_distance,
        }
        return state | {f"stock.{name}": np.copy(value) for name, value in vars(self._stock).items() if _is_own(value)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; observations, rewards and images go on bit-identically."""
        self._model.body_pos[self._placed], self._model.site_pos[:] = state["placed"], state["sites"]
        super().set_state(state)
        for name, value in state.items():
            if name.startswith("stock."):
                # keep each value's type: NumPy scalars would widen the float32 arrays that they are multiplied with
                own = name.removeprefix("stock.")
                kind = type(getattr(self._stock, own))
                setattr(self._stock, own, kind(value) if kind in (bool, int, float) else np.copy(value)[()])
        for name in str(state["unset"]).split():
            setattr(self._stock, name, None)
        self._start_distance = float(state["start_distance"])

    def _make_renderer(self) -> Renderer:
        model = self._model
        hidden = _ROBOT_BODIES[1:] if self._shows_robot else _ROBOT_BODIES
        roots = model.body_rootid[model.geom_bodyid]
        hidden_geoms = np.isin(roots, [model.body(name).id for name in hidden])
        placed = tuple(model.body(body).name for body in self._placed)
        return Renderer(model, self._scene.camera, hidden_geoms, placed)

    def _observe(self) -> NDArray[np.float64]:
        """Returns [39], the stock observation, clipped as in the stock step: now, one step ago, zeros as goal."""
        stock, now = self._stock, np.zeros(18)
        now[:3] = self._hand_place
        now[3] = min(np.linalg.norm(self._claws[0] - self._claws[1]) / 0.1, 1.0)  # fully open at 10 cm
        positions, turns = stock._get_pos_objects().reshape(-1, 3), stock._get_quat_objects().reshape(-1, 4)
        objects = np.concatenate([positions, turns], axis=1)  # one or two objects
        now[4 : 4 + objects.size] = objects.ravel()
        obs = np.concatenate([now, stock._prev_obs, _NO_GOAL])
        stock._prev_obs = now
        return np.clip(obs, self._low, self._high)

    def _info(self, facts: dict[str, Any]) -> dict[str, Any]:
        done = 1.0 - self._scene.distance(self._stock, facts) / self._start_distance
        progress = min(max(float(done), 0.0), 1.0)
        return {"snapshot": self.snapshot(), "progress": progress, "success": bool(facts["success"])}


def _first_draw(stock: SawyerXYZEnv) -> NDArray[np.float64]:
    """Returns the stock env's first accepted start from a generator of its own: the same in every run."""
    stock._freeze_rand_vec, stock.np_random = False, np.random.default_rng(0)
    stock.reset_model()
    stock._freeze_rand_vec = True
    assert stock._last_rand_vec is not None, "every reset draws"
    return stock._last_rand_vec


def _placed_bodies(model: mujoco.MjModel) -> NDArray[np.int64]:
    """Returns bodies that a reset may move: all but robot, furniture and those with a free joint."""
    fixed = {*_ROBOT_BODIES, *_FURNITURE, ""}
    free = model.jnt_bodyid[model.jnt_type == mujoco.mjtJoint.mjJNT_FREE]
    children = np.flatnonzero(model.body_parentid == 0)[1:]  # the first is the world body
    return np.array([body for body in children if model.body(body).name not in fixed and body not in free], int)


def _is_own(value: object) -> bool:
    """Returns whether a stock env's attribute is a number or array of its own, not a view of the simulator's memory."""
    if not isinstance(value, np.ndarray):
        return isinstance(value, bool | int | float | np.generic)
    while isinstance(value, np.ndarray):  # the base of a view is the array that it shows; the last base owns the memory
        value = value.base
    return value is None


_FULL_FOVY_DEG = 45.0
# field of view for the middle 300 of the image's 480 pixels: 2 atan(300/480 tan(fovy/2))
_CROPPED_FOVY_DEG = 2 * math.degrees(math.atan(300 / 480 * math.tan(math.radians(_FULL_FOVY_DEG) / 2)))
_DRAWER_RANGE = 0.16  # metres, the joint's

DRAWER_OPEN = MetaWorldTask(
    env_name="drawer-open-v3",
    goal=PAPER_GOALS["drawer_open"][0],
    camera=Camera(
        position=(-0.6, 0.2, 0.35),
        right=(1.0, -1.0, 0.0),
        up=(0.2, 0.2, 1.0),
        fovy_deg=_CROPPED_FOVY_DEG,
    ),
    hand_start=(0.0, 0.75, 0.15),
    placement=(0.0, 0.9, 0.0),
    distance=lambda env, _: _DRAWER_RANGE + env.data.joint("goal_slidey").qpos[0],  # remaining travel
)

SOCCER = MetaWorldTask(
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

SWEEP_INTO = MetaWorldTask(
    env_name="sweep-into-v3",
    goal=PAPER_GOALS["sweep_into"][0],
    camera=Camera(
        position=(0.0, 1.1, 0.75),
        right=(-1.0, 0.0, 0.0),
        up=(0.0, -0.87758, 0.47943),
        fovy_deg=_CROPPED_FOVY_DEG,
    ),
    hand_start=(0.0, 0.53, 0.05),
    placement=(0.0, 0.65, 0.02, 0.0, 0.84, 0.02),
    colours={"objGeom": (0.0, 240 / 255, 0.0)},
)


def make_paper(config: MetaWorldConfig, seed: int, name: str) -> MetaWorldEnv:
    """Makes the env of the task `drawer_open`, `soccer` or `sweep_into`."""
    return MetaWorldEnv({"drawer_open": DRAWER_OPEN, "soccer": SOCCER, "sweep_into": SWEEP_INTO}[name], config, seed)


CAMERA = Camera(
    position=(0.7, 0.35, 0.6),
    right=(0.54990, 0.83318, -0.05844),
    up=(-0.37621, 0.30955, 0.87330),
    fovy_deg=60.0,
)
"""Camera over the right side of the table, nearer than the stock cameras: the one for door-open in the reference
method's code (Wang et al. 2024, arXiv:2402.03681), turned upright."""


def _distance(env: SawyerXYZEnv, facts: dict[str, Any]) -> float:
    """Returns the metres to the target, or the missing share of the reward's in-place term."""
    return object_to_target(env, facts) or 1.0 - float(facts["in_place_reward"])


def make_stock(config: MetaWorldConfig, seed: int, name: str) -> MetaWorldEnv:
    """Makes the env of the task `metaworld/NAME`; `name` is MetaWorld's own, e.g. `door-open-v3`."""
    scene = MetaWorldTask(env_name=name, goal=STOCK_GOALS[name][0], camera=CAMERA, distance=_distance)
    return MetaWorldEnv(scene, config, seed)
