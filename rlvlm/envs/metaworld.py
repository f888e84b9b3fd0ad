"""MetaWorld tasks as worlds: the stock v3 physics and reward, in a scene changed at run time. Built by the registry.

What differs from the stock envs, all of it in the reference method's paper (Wang et al. 2024, arXiv:2402.03681) or
needed to keep promises of `World`:

1. `start="fixed"` puts object and hand where the paper has them. `start="random"` is the stock start: the hand further
   away and the object drawn anew each episode, by the env's own generator.
2. Pictures leave the robot out (`robot="hidden"`), because the arm covers the object, and never show goal markers.
3. The camera is the paper's. Its 480-pixel picture, cropped to the middle 300, is drawn directly with the narrower
   opening angle at the size asked for. Two departures: the paper's crop is 10 of 300 pixels off the optical axis, ours
   is centred; and the paper's pictures are mirrored left to right by a flip, ours are not.
4. The time limit is `EnvConfig.episode_steps` (the stock envs raise an error at step 501), a truncation.
5. Observations are float32, and the first one of an episode shows the object where it is: the stock envs report where
   it was in the previous episode, because they do not recompute positions after placing it.
"""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.sawyer_xyz_env import SawyerXYZEnv
from numpy.typing import NDArray

from rlvlm.envs.config import EnvConfig
from rlvlm.envs.painter import Camera, Painter
from rlvlm.envs.rendering import ensure_renderer
from rlvlm.envs.world import World
from rlvlm.errors import NumericsError
from rlvlm.types import FloatArray, Frames

_KEY_METRES = 0.25e-3
"""Grain of picture keys, metres or radians: 0.2 of a pixel at 300 pixels, 0.04 at 64."""
_NO_GOAL = np.zeros(3)
_ROBOT_BODIES = ("base", "mocap")
"""Roots of what `robot="hidden"` leaves out."""


def _opening_angle_deg(full_fovy_deg: float, kept: float) -> float:
    """Vertical opening angle of the middle part `kept` (0 to 1) of a picture with `full_fovy_deg`."""
    return 2 * math.degrees(math.atan(kept * math.tan(math.radians(full_fovy_deg) / 2)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One MetaWorld task with one object: everything that sets it apart from the others."""

    env_name: str
    """Name in MetaWorld, e.g. `drawer-open-v3`."""
    goal: str
    """Fills the slot of the prompt."""
    camera: Camera
    hand_start: tuple[float, float, float]
    """Hand at a fixed start, metres."""
    placement: tuple[float, ...]
    """What the stock env would draw at random (its `rand_vec`), at a fixed start, metres."""
    placed_bodies: tuple[str, ...]
    """Bodies without joints that the stock env moves at a reset."""
    progress: Callable[[SawyerXYZEnv], float]
    """How far the task is done, 0 to 1 after clipping."""


def _drawer_extension(env: SawyerXYZEnv) -> float:
    return -env.data.joint("goal_slidey").qpos[0] / 0.16  # the joint's range, metres


DRAWER_OPEN = Scene(
    env_name="drawer-open-v3",
    goal="open the drawer",
    camera=Camera(
        position=(-0.6, 0.2, 0.35),
        right=(1.0, -1.0, 0.0),
        up=(0.2, 0.2, 1.0),
        fovy_deg=_opening_angle_deg(45.0, 300 / 480),
    ),
    hand_start=(0.0, 0.75, 0.15),
    placement=(0.0, 0.9, 0.0),
    placed_bodies=("drawer",),
    progress=_drawer_extension,
)


class MetaWorld(World):
    """One MetaWorld task.

    Observations [39] are the stock ones with the goal left out (zeros); actions [4] move the hand (three axes, 1 cm at
    1) and close the gripper. A snapshot holds the joint positions and the positions of the bodies that a reset moves.

    Args:
        scene: the task.
        config: start, robot and episode length.
        seed: of everything random in this world, until `reset` is given another.

    Raises:
        MachineError: no off-screen renderer works here.
    """

    metadata = {"render_modes": []}

    def __init__(self, scene: Scene, config: EnvConfig, seed: int) -> None:
        ensure_renderer()  # before an hour of training, not after
        self.goal = scene.goal
        self.render_mode = None
        self._scene = scene
        self._episode_steps = config.episode_steps
        self._shows_robot = config.robot == "visible"
        self._stock: SawyerXYZEnv = ALL_V3_ENVIRONMENTS[scene.env_name]()
        self._prepare_start(config.start)
        model = self._stock.model
        self._body_pos = model.body_pos.copy()
        self._placed = np.array([model.body(name).id for name in scene.placed_bodies], int)
        self.snapshot_size = model.nq + 3 * len(self._placed)
        in_picture = np.arange(model.nq) if self._shows_robot else _scene_positions(model)
        self._shown = np.append(in_picture, np.arange(model.nq, self.snapshot_size))
        box = self._stock.sawyer_observation_space
        self._low, self._high = box.low, box.high
        self._hand = self._stock.data.body("hand").xpos  # windows into the simulator's memory
        self._claws = [self._stock.data.body(name).xpos for name in ("rightclaw", "leftclaw")]
        self.observation_space = gym.spaces.Box(box.low.astype(np.float32), box.high.astype(np.float32))
        self.action_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self._steps = 0
        self._painter: Painter | None = None
        self.reset(seed=seed)

    def _prepare_start(self, start: str) -> None:
        """Chooses between the paper's start and the stock one."""
        stock, scene = self._stock, self._scene
        stock._set_task_called = True
        stock.seeded_rand_vec = True
        stock._freeze_rand_vec = start == "fixed"
        if start == "fixed":
            stock.hand_init_pos = np.array(scene.hand_start)
            stock._last_rand_vec = np.array(scene.placement)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """First observation [39] and info of a new episode; `options` is not used."""
        super().reset(seed=seed, options=options)
        stock = self._stock
        stock.np_random = self.np_random
        stock.model.body_pos[:] = self._body_pos  # an episode must not depend on the one before
        mujoco.mj_resetData(stock.model, stock.data)
        stock.reset_model()
        mujoco.mj_kinematics(stock.model, stock.data)  # positions only: see set_state
        stock._prev_obs = stock._get_curr_obs_combined_no_goal()
        self._steps = 0
        return self._observe().astype(np.float32), self._info(success=False)

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Observation [39], the stock reward (0 to 10), never terminated, truncated at the time limit, info.

        Raises:
            NumericsError: the action is not finite; the simulator would not recover from it.
        """
        if not np.isfinite(action).all():
            raise NumericsError(f"actions must be finite, got {action}", "look at the policy's losses before this step")
        stock, data = self._stock, self._stock.data
        stock.set_xyz_action(action[:3])
        data.ctrl[:] = action[3], -action[3]
        mujoco.mj_step(stock.model, data, nstep=stock.frame_skip)
        mujoco.mj_forward(stock.model, data)
        obs = self._observe()
        reward, facts = stock.evaluate_state(obs, action)
        self._steps += 1
        truncated = self._steps >= self._episode_steps
        return obs.astype(np.float32), float(reward), False, truncated, self._info(success=bool(facts["success"]))

    def snapshot(self) -> FloatArray:
        """[S]: joint positions, then the positions of the bodies that a reset moves."""
        model, data = self._stock.model, self._stock.data
        return np.concatenate([data.qpos, model.body_pos[self._placed].ravel()], dtype=np.float32)

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Pictures [N, size_px, size_px, 3] of `snapshots` [N, S].

        Snapshots are rounded to the grain of `picture_key` first, so that equal keys give equal pictures to the bit.

        Raises:
            ValueError: the snapshots are not [N, S].
            MachineError: the renderer could not be opened.
        """
        if snapshots.ndim != 2 or snapshots.shape[1] != self.snapshot_size:
            raise ValueError(f"snapshots must have shape [N, {self.snapshot_size}], got {snapshots.shape}")
        if self._painter is None:
            hidden = _ROBOT_BODIES[1:] if self._shows_robot else _ROBOT_BODIES
            model = self._stock.model
            hidden_geoms = _belongs_to(model, model.geom_bodyid, hidden)
            self._painter = Painter(model, self._scene.camera, hidden_geoms, self._scene.placed_bodies)
        return self._painter.draw(np.rint(snapshots / _KEY_METRES) * np.float32(_KEY_METRES), size_px)

    def picture_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """[N, P]: what the picture shows, in steps of a quarter of a millimetre (or of a milliradian)."""
        return np.rint(snapshots[:, self._shown] / _KEY_METRES).astype(np.int64)

    def get_state(self) -> dict[str, Any]:
        """Physics, moved bodies, the stock env's own bookkeeping, generator and step count."""
        model, data = self._stock.model, self._stock.data
        physics = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(model, data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        state: dict[str, Any] = {
            "physics": physics,
            "placed": model.body_pos[self._placed],
            "steps": self._steps,
            "generator": json.dumps(self.np_random.bit_generator.state),
        }
        return state | {f"stock.{name}": np.copy(value) for name, value in vars(self._stock).items() if _is_own(value)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; observations, rewards and pictures go on bit-identically.

        Positions in world coordinates follow with the next step. `mj_forward` would compute them at once, but it also
        moves the solver's warm start on, and the future with it.
        """
        stock, model, data = self._stock, self._stock.model, self._stock.data
        model.body_pos[self._placed] = state["placed"]
        mujoco.mj_setState(model, data, np.asarray(state["physics"]), mujoco.mjtState.mjSTATE_INTEGRATION)
        for name, value in state.items():
            if name.startswith("stock."):
                _restore(stock, name.removeprefix("stock."), value)
        self._steps = int(state["steps"])
        self.np_random.bit_generator.state = json.loads(state["generator"])

    def close(self) -> None:
        """Frees the renderer; the next picture opens it again."""
        if self._painter is not None:
            self._painter.close()
            self._painter = None

    def _observe(self) -> NDArray[np.float64]:
        """[39] the stock observation, clipped as in the stock step: now, one step ago, and zeros for the goal."""
        stock, now = self._stock, np.zeros(18)
        now[:3] = self._hand
        now[3] = min(np.linalg.norm(self._claws[0] - self._claws[1]) / 0.1, 1.0)  # fully open at 10 cm
        now[4:7] = stock._get_pos_objects()
        now[7:11] = stock._get_quat_objects()
        obs = np.concatenate([now, stock._prev_obs, _NO_GOAL])
        stock._prev_obs = now
        return np.clip(obs, self._low, self._high)

    def _info(self, *, success: bool) -> dict[str, Any]:
        progress = min(max(float(self._scene.progress(self._stock)), 0.0), 1.0)
        return {"snapshot": self.snapshot(), "progress": progress, "success": success}


def make_drawer_open(config: EnvConfig, seed: int) -> MetaWorld:
    """The task `drawer_open`."""
    return MetaWorld(DRAWER_OPEN, config, seed)


def _belongs_to(model: mujoco.MjModel, bodies: NDArray[np.int32], roots: tuple[str, ...]) -> NDArray[np.bool_]:
    """[N] whether each body [N] hangs on one of `roots` (children of the world)."""
    return np.isin(model.body_rootid[bodies], [model.body(name).id for name in roots])


def _scene_positions(model: mujoco.MjModel) -> NDArray[np.int64]:
    """Indices into qpos of the joints that do not belong to the robot."""
    owner = np.searchsorted(model.jnt_qposadr, np.arange(model.nq), side="right") - 1  # a joint may have several
    return np.flatnonzero(~_belongs_to(model, model.jnt_bodyid[owner], _ROBOT_BODIES))


def _is_own(value: object) -> bool:
    """Whether a stock env's attribute is a number or array of its own, not a window into the simulator's memory."""
    if not isinstance(value, np.ndarray):
        return isinstance(value, bool | int | float | np.generic)
    while isinstance(value, np.ndarray):
        value = value.base
    return value is None


def _restore(stock: SawyerXYZEnv, name: str, value: Any) -> None:
    """Sets an attribute without changing its type: NumPy numbers would widen the float32 they are multiplied with."""
    kind = type(getattr(stock, name))
    setattr(stock, name, kind(value) if kind in (bool, int, float) else np.copy(value)[()])
