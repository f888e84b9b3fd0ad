"""What the MuJoCo families share: the physics' state, and images that equal keys make equal to the bit."""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import json
from abc import abstractmethod
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.mujoco.renderer import Renderer
from rlvlm.envs.rendering import ensure_renderer
from rlvlm.envs.step_env import StepEnv

_KEY_GRAIN = 0.25e-3
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

    metadata = {"render_modes": []}
    _model: mujoco.MjModel
    _data: mujoco.MjData

    def __init__(self, goal: str, action_size: int, config: EnvConfig) -> None:
        ensure_renderer()  # before an hour of training, not after
        self.goal = goal
        self.render_mode = None
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
        if self._renderer is None:
            self._renderer = self._make_renderer()
        return self._renderer.draw(np.rint(snapshots / _KEY_GRAIN) * np.float32(_KEY_GRAIN), size_px)

    def image_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """[N, S]: snapshots in steps of a quarter of a millimetre (or of a milliradian)."""
        return np.rint(snapshots / _KEY_GRAIN).astype(np.int64)

    def get_state(self) -> dict[str, Any]:
        """Physics, generator and step count."""
        physics = np.empty(mujoco.mj_stateSize(self._model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(self._model, self._data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        generator = json.dumps(self.np_random.bit_generator.state)
        return {"physics": physics, "steps": self._steps, "generator": generator}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; observations, rewards and images go on bit-identically.

        Positions in world coordinates follow with the next step. `mj_forward` would compute them at once, but it also
        moves the solver's warm start on, and the future with it.
        """
        physics = np.asarray(state["physics"])
        mujoco.mj_setState(self._model, self._data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        self._steps = int(state["steps"])
        self.np_random.bit_generator.state = json.loads(state["generator"])

    def close(self) -> None:
        """Frees the renderer; the next image opens it again."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    @abstractmethod
    def _make_renderer(self) -> Renderer:
        """Draws this env's snapshots; made for the first image."""
