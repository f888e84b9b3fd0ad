"""Base of envs on MuJoCo (state, images), and scenes as envs: for tasks of one's own and for the deformable ones.

A scene defines how a model is used: how an episode starts, what an action does, what is observed, how good a
state is. `SceneEnv` makes a `StepEnv` of it: episodes, states to the bit, snapshots and images. A scene of one's own
inherits from `MujocoScene`, which does everything but the start and the judging: docs/mujoco_tasks.md shows one whole.
`EnvConfig.robot` changes nothing here.
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
    """An env whose physics is a MuJoCo model at work. A family sets `_model`, `_data` and S, and says how it steps.

    Args:
        goal: fills the slot of the prompt.
        action_size: A.
        config: episode length.

    Raises:
        MachineError: no off-screen renderer works here.
    """

    grain = KEY_GRAIN
    _model: mujoco.MjModel
    _data: mujoco.MjData
    _hand: tuple[str, ...] = ()
    """Bodies or sites whose middle is the hand; empty where there is none."""

    def __init__(self, goal: str, action_size: int, config: EnvConfig) -> None:
        ensure_renderer()  # before an hour of training, not after
        self.goal = goal
        self.action_space = gym.spaces.Box(-1.0, 1.0, (action_size,), np.float32)
        self._episode_steps = config.episode_steps
        self._steps = 0
        self._renderer: Renderer | None = None

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Images [N, size_px, size_px, 3] of `snapshots` [N, S].

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
        """Physics, generator and step count."""
        # all that the next step depends on, the solver's warm start too: less, and the future is only nearly the same
        physics = np.empty(mujoco.mj_stateSize(self._model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(self._model, self._data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        return {"physics": physics, "steps": self._steps, "generator": self.generator_text()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; observations, rewards and images go on bit-identically.

        Positions in world coordinates follow with the next step. `mj_forward` would compute them at once, but it also
        moves the solver's warm start on, and the future with it.
        """
        physics = np.array(state["physics"])  # a copy: what comes through Ray is read-only, and MuJoCo refuses that
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
        """Draws this env's snapshots; made for the first image."""


DIVERGED = [int(getattr(mujoco.mjtWarning, f"mjWARN_BAD{name}")) for name in ("QPOS", "QVEL", "QACC")]
"""Warnings after which MuJoCo has started over, as if nothing had happened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneState:
    """The simulator's truth about a state."""

    reward: float
    progress: float
    """How far the task is done, 0 to 1 after clipping."""
    success: bool
    is_over: bool = False
    """Whether nothing can follow: the episode ends for good, and not by the time limit."""


class MujocoScene(ABC):
    """One task: its model, and what an episode does with it. One of your own writes `goal`, `judge` and, where episodes
    differ, `place`.

    Everything that changes must lie in `data`, which is what states are made of. What a reset moves and images show,
    such as a target, is best a mocap body: snapshots hold joint and mocap positions, not those of other bodies.

    Args:
        xml: the model, as MJCF or as the path of a file with it; each actuator has a control range.
        camera: from where images are taken; None takes the first camera of the model, which is fixed to the env.
        substeps: steps of the simulation per env step, >= 1.

    Raises:
        ValueError: the model has no camera to take, or an actuator without a range.
    """

    goal: str
    """Fills the slot of the prompt."""
    is_symmetric: bool = False
    """As of `Env`."""
    hand: tuple[str, ...] = ()
    """Names of the bodies or sites whose middle is the hand, for `--env.draw-path`; empty where there is none."""

    def __init__(self, xml: str | Path, camera: Camera | None = None, substeps: int = 10) -> None:
        is_file = isinstance(xml, Path) or xml.endswith(".xml")
        self.model = mujoco.MjModel.from_xml_path(str(xml)) if is_file else mujoco.MjModel.from_xml_string(xml)
        if not self.model.ncam or self.model.cam_bodyid[0] != 0:
            raise ValueError("the model needs a camera that is fixed to the world and comes first: <camera .../>")
        if not self.model.actuator_ctrllimited.all():
            raise ValueError('each actuator needs a range, e.g. <motor joint="elbow" ctrlrange="-1 1"/>')
        axes = np.empty(9)  # of the model's own camera, row by row: its columns are right, up and backwards
        mujoco.mju_quat2Mat(axes, self.model.cam_quat[0])
        (x, y, z), fovy = self.model.cam_pos[0].tolist(), float(self.model.cam_fovy[0])
        right, up = (axes[0], axes[3], axes[6]), (axes[1], axes[4], axes[7])
        self.camera = camera or Camera(position=(x, y, z), right=right, up=up, fovy_deg=fovy)
        self.drawn: mujoco.MjModel = self.model
        """The model as images show it, with the same joints."""
        self.action_size: int = self.model.nu
        """A."""
        self._substeps = substeps

    @abstractmethod
    def judge(self, data: mujoco.MjData) -> SceneState:
        """How good that state is; positions in world coordinates (`data.site(...).xpos`) are up to date."""

    def place(self, data: mujoco.MjData, rng: np.random.Generator) -> None:
        """Puts the start of an episode into `data`, which holds the model's initial state: by default, that."""
        return

    def act(self, data: mujoco.MjData, action: FloatArray) -> None:
        """Stretches `action` [A] from [-1, 1] to the ranges of the actuators, and lets the simulation run."""
        low, high = self.model.actuator_ctrlrange.T
        data.ctrl[:] = low + (action + 1) / 2 * (high - low)
        mujoco.mj_step(self.model, data, nstep=self._substeps)

    def script(self, obs: FloatArray) -> NDArray[np.floating] | None:
        """[A] the action of a script that knows the goal at `obs` [D]; None, the default, where there is none."""
        return None

    def observe(self, data: mujoco.MjData) -> NDArray[np.float64]:
        """[D]: positions and velocities of the joints, and the places of mocap bodies."""
        return np.concatenate([data.qpos, data.qvel, data.mocap_pos.ravel()])


class SceneEnv(MujocoEnv):
    """A scene as an env. A snapshot holds the positions of joints, and places and turns of mocap bodies.

    Args:
        scene: the task; not shared with other envs.
        config: episode length; the scene has its start.
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
        obs, _ = self.reset(seed=seed)  # a scene says how much it observes by observing
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, obs.shape, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """First observation [D] and info of a new episode; `options` is not used."""
        super().reset(seed=seed, options=options)
        mujoco.mj_resetData(self._model, self._data)  # user data too, in which a scene may keep what `place` drew
        self._scene.place(self._data, self.np_random)
        self._steps = 0
        obs, _, info = self._look()
        return obs, info

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Observation [D], reward, whether the task is over, whether the time is, info.

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
        # an end for good is no time limit: a critic must not look beyond the one, and has to beyond the other
        truncated = not outcome.is_over and self._steps >= self._episode_steps
        return obs, outcome.reward, outcome.is_over, truncated, info

    def snapshot(self) -> FloatArray:
        """[S]: joint positions, then places and turns of mocap bodies. Velocities are not seen, so not kept."""
        data = self._data
        return np.concatenate([data.qpos, data.mocap_pos.ravel(), data.mocap_quat.ravel()], dtype=np.float32)

    def scripted_action(self, obs: FloatArray) -> FloatArray | None:
        """[A] what the scene's own script does next; None where it has none."""
        action = self._scene.script(obs)
        return None if action is None else np.asarray(action, np.float32)

    def _make_renderer(self) -> Renderer:
        drawn = self._scene.drawn
        return Renderer(drawn, self._scene.camera, np.zeros(drawn.ngeom, bool), (), has_mocaps=True)

    def _look(self) -> tuple[FloatArray, SceneState, dict[str, Any]]:
        """The observation [D], the truth about the state just reached, and the info.

        Positions in world coordinates are computed by kinematics alone: `mj_forward` would also move the solver's warm
        start on, and the future with it.
        """
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_flex(self._model, self._data)
        obs, outcome = self._scene.observe(self._data).astype(np.float32), self._scene.judge(self._data)
        progress = min(max(outcome.progress, 0.0), 1.0)
        return obs, outcome, {"snapshot": self.snapshot(), "progress": progress, "success": outcome.success}
