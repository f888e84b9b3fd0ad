"""Base of envs on MuJoCo (state, images), and scenes as envs: for users' own tasks and for the deformable ones.

A scene defines how a model is used: how an episode starts, what an action does, what is observed, how good a state is.
`SceneEnv` turns it into a `StepEnv`: episodes, bit-exact states, snapshots and images. Your own scene inherits from
`MujocoScene`, which does everything but the start and the judging: docs/mujoco_tasks.md shows a complete one.
`EnvConfig.robot` has no effect here.
"""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import NumericsError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import StepEnv, check_action
from rlvlm.envs.mujoco.renderer import Camera, Renderer
from rlvlm.envs.rendering import ensure_renderer

KEY_GRAIN = 0.25e-3
"""Grain of image keys, metres or radians (or halves of a quaternion's angle): at most 0.2 of a pixel at 300."""


class MujocoEnv(StepEnv):
    """An env whose physics is a running MuJoCo model. A family sets `_model`, `_data` and S, and implements the step.

    Args:
        goal: goal phrase for the prompt.
        action_size: A.
        config: episode length.

    Raises:
        MachineError: no off-screen renderer works here.
    """

    grain = KEY_GRAIN
    _model: mujoco.MjModel
    _data: mujoco.MjData
    _hand: tuple[str, ...] = ()
    """Bodies or sites whose centre is the hand; empty if there is none."""

    def __init__(self, goal: str, action_size: int, config: EnvConfig) -> None:
        ensure_renderer()  # before training starts, rather than an hour into it
        self.goal = goal
        self.action_space = gym.spaces.Box(-1.0, 1.0, (action_size,), np.float32)
        self._episode_steps = config.episode_steps
        self._steps = 0
        self._renderer: Renderer | None = None

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns images [N, size_px, size_px, 3] of `snapshots` [N, S].

        Snapshots are rounded to the grain of `image_key` first, so that equal keys give equal images to the bit.

        Raises:
            ValueError: the snapshots are not [N, S].
            MachineError: the renderer could not be opened.
        """
        if snapshots.ndim != 2 or snapshots.shape[1] != self.snapshot_size:
            raise ValueError(f"snapshots must have shape [N, {self.snapshot_size}], got {snapshots.shape}")
        return self._open_renderer().draw(np.rint(snapshots / self.grain) * np.float32(self.grain), size_px)

    def hand_path(self, snapshots: FloatArray, camera: str = "") -> FloatArray:
        """See `Env.hand_path`."""
        if not self._hand:
            return super().hand_path(snapshots, camera)
        return self._open_renderer().path(snapshots, self._hand)

    def _open_renderer(self) -> Renderer:
        if self._renderer is None:
            self._renderer = self._make_renderer()
        return self._renderer

    def get_state(self) -> dict[str, Any]:
        """Returns physics, generator and step count."""
        # everything that the next step depends on, including the solver's warm start; with less, the future differs
        # slightly
        physics = np.empty(mujoco.mj_stateSize(self._model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(self._model, self._data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        return {"physics": physics, "steps": self._steps, "generator": self.generator_text()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; observations, rewards and images go on bit-identically.

        Positions in world coordinates are updated by the next step. `mj_forward` would compute them at once, but would
        also change the solver's warm start, and with it the future.
        """
        physics = np.array(state["physics"])  # a copy: arrays from Ray are read-only, which MuJoCo refuses
        mujoco.mj_setState(self._model, self._data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        self._steps = int(state["steps"])
        self.set_generator(state["generator"])

    def close(self) -> None:
        """Frees the renderer; the next image opens it again."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    @abstractmethod
    def _make_renderer(self) -> Renderer:
        """Makes the renderer of this env's snapshots; called for the first image."""


DIVERGED = [int(getattr(mujoco.mjtWarning, f"mjWARN_BAD{name}")) for name in ("QPOS", "QVEL", "QACC")]
"""Warnings after which MuJoCo has silently reset the simulation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneState:
    """Ground truth about a state."""

    reward: float
    progress: float
    """Share of the task that is done, 0 to 1 after clipping."""
    success: bool
    is_over: bool = False
    """Whether the episode terminates here, as opposed to the time limit's truncation."""


class MujocoScene(ABC):
    """A task: its model, and what an episode does with it. Your own scene defines `goal`, `judge` and, where episodes
    differ, `place`.

    Everything that changes must be in `data`, from which states are made. A thing that a reset moves and images show,
    such as a target, is best a mocap body: snapshots hold joint and mocap positions, not those of other bodies.

    Args:
        xml: the model, as MJCF or as the path of a file with it; each actuator has a control range.
        camera: camera of the images; None takes the first camera of the model, which must be fixed to the world.
        substeps: steps of the simulation per env step, >= 1.

    Raises:
        ValueError: the model has no camera to take, or an actuator without a range.
    """

    goal: str
    """Goal phrase for the prompt."""
    is_symmetric: bool = False
    """See `Env.is_symmetric`."""
    hand: tuple[str, ...] = ()
    """Names of the bodies or sites whose centre is the hand, for `--env.draw-path`; empty if there is none."""

    def __init__(self, xml: str | Path, camera: Camera | None = None, substeps: int = 10) -> None:
        is_file = isinstance(xml, Path) or xml.endswith(".xml")
        self.model = mujoco.MjModel.from_xml_path(str(xml)) if is_file else mujoco.MjModel.from_xml_string(xml)
        if not self.model.ncam or self.model.cam_bodyid[0] != 0:
            raise ValueError("the model needs a camera that is fixed to the world and comes first: <camera .../>")
        if not self.model.actuator_ctrllimited.all():
            raise ValueError('each actuator needs a range, e.g. <motor joint="elbow" ctrlrange="-1 1"/>')
        axes = np.empty(9)  # axes of the model's own camera, row by row: its columns are right, up and backwards
        mujoco.mju_quat2Mat(axes, self.model.cam_quat[0])
        (x, y, z), fovy = self.model.cam_pos[0].tolist(), float(self.model.cam_fovy[0])
        right, up = (axes[0], axes[3], axes[6]), (axes[1], axes[4], axes[7])
        self.camera = camera or Camera(position=(x, y, z), right=right, up=up, fovy_deg=fovy)
        self.drawn: mujoco.MjModel = self.model
        """Model to draw, with the same joints as `model`."""
        self.action_size: int = self.model.nu
        """A, the numbers in an action."""
        self._substeps = substeps

    @abstractmethod
    def judge(self, data: mujoco.MjData) -> SceneState:
        """Returns how good the state is; positions in world coordinates (`data.site(...).xpos`) are up to date."""

    def place(self, data: mujoco.MjData, rng: np.random.Generator) -> None:
        """Sets up the start of an episode in `data`, which holds the model's initial state; by default as it is."""
        return

    def act(self, data: mujoco.MjData, action: FloatArray) -> None:
        """Stretches `action` [A] from [-1, 1] to the actuators' ranges, and simulates one env step."""
        low, high = self.model.actuator_ctrlrange.T
        data.ctrl[:] = low + (action + 1) / 2 * (high - low)
        mujoco.mj_step(self.model, data, nstep=self._substeps)

    def script(self, obs: FloatArray) -> NDArray[np.floating] | None:
        """Returns [A], the action at `obs` [D] of a script that knows the goal; by default None: no script."""
        return None

    def observe(self, data: mujoco.MjData) -> NDArray[np.float64]:
        """Returns [D]: positions and velocities of the joints, and the positions of mocap bodies."""
        return np.concatenate([data.qpos, data.qvel, data.mocap_pos.ravel()])


class SceneEnv(MujocoEnv):
    """A scene as an env. A snapshot holds joint positions, and positions and orientations of mocap bodies.

    Args:
        scene: scene of the task; not shared with other envs.
        config: episode length; the scene knows its start.
        seed: of everything random in this env, until `reset` is given another.

    Raises:
        MachineError: no off-screen renderer works here.
    """

    def __init__(self, scene: MujocoScene, config: EnvConfig, seed: int) -> None:
        super().__init__(scene.goal, scene.action_size, config)
        self.is_symmetric = scene.is_symmetric
        self.snapshot_size = scene.model.nq + 7 * scene.model.nmocap
        self._scene, self._hand = scene, scene.hand
        self._model, self._data = scene.model, mujoco.MjData(scene.model)
        obs, _ = self.reset(seed=seed)  # determines D from an actual observation
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, obs.shape, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Returns the first observation [D] and info of a new episode; `options` is not used."""
        super().reset(seed=seed, options=options)
        mujoco.mj_resetData(self._model, self._data)  # including user data, where a scene may store what `place` drew
        self._scene.place(self._data, self.np_random)
        self._steps = 0
        obs, _, info = self._look()
        return obs, info

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Returns observation [D], reward, terminated (the task is over), truncated (the time limit), info.

        Raises:
            NumericsError: the action is not finite, or the simulation has diverged.
        """
        check_action(action)
        self._scene.act(self._data, np.clip(action, -1.0, 1.0))
        if self._data.warning.number[DIVERGED].any():
            raise NumericsError(
                f"the simulation diverged in step {self._steps} of an episode, at action {action}",
                "start the run again with another --seed; resumed, it would come to the same step",
            )
        obs, outcome, info = self._look()
        self._steps += 1
        # termination is not truncation: a critic bootstraps beyond the latter, but not beyond the former
        truncated = not outcome.is_over and self._steps >= self._episode_steps
        return obs, outcome.reward, outcome.is_over, truncated, info

    def snapshot(self) -> FloatArray:
        """Returns [S]: joint positions, positions and orientations of mocap bodies, but no (invisible) velocities."""
        data = self._data
        return np.concatenate([data.qpos, data.mocap_pos.ravel(), data.mocap_quat.ravel()], dtype=np.float32)

    def scripted_action(self, obs: FloatArray) -> FloatArray | None:
        """Returns [A], the next action of the scene's own script; None if it has none."""
        action = self._scene.script(obs)
        return None if action is None else np.asarray(action, np.float32)

    def _make_renderer(self) -> Renderer:
        drawn = self._scene.drawn
        return Renderer(drawn, self._scene.camera, np.zeros(drawn.ngeom, bool), (), has_mocaps=True)

    def _look(self) -> tuple[FloatArray, SceneState, dict[str, Any]]:
        """Returns the observation [D], the ground truth about the state just reached, and the info.

        Positions in world coordinates are computed by kinematics alone: `mj_forward` would also change the solver's
        warm start, and with it the future.
        """
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_flex(self._model, self._data)
        obs, outcome = self._scene.observe(self._data).astype(np.float32), self._scene.judge(self._data)
        progress = min(max(outcome.progress, 0.0), 1.0)
        return obs, outcome, {"snapshot": self.snapshot(), "progress": progress, "success": outcome.success}
