"""A compiled robosuite env as something that is lent to envs: states are arrays, images come from joint positions."""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.mujoco.renderer import Renderer
from rlvlm.envs.robosuite.arm import Arm
from rlvlm.envs.robosuite.lightening import shrink_textures, thin_meshes

KEY_GRAIN = 0.25e-3
"""Grain of images, metres or radians: at most 0.2 of a pixel at 300."""
_TEXTURE_PX = 256
"""Side of textures, at most."""
_COLLISION_GROUP = 0
_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
_DIVERGED = [int(getattr(mujoco.mjtWarning, f"mjWARN_BAD{name}")) for name in ("QPOS", "QVEL", "QACC")]

Doubles = NDArray[np.float64]


class RobosuiteScene:
    """One compiled env. It holds one state at a time: `load` a state before anything else is asked.

    Args:
        env: of robosuite, with one Panda under OSC_POSE and without cameras or renderers.
        cameras: names of those that can draw it, the default first.
        mesh_cell: how finely things are drawn, metres.
    """

    def __init__(self, env: Any, cameras: Sequence[str], mesh_cell: float) -> None:
        self.env = env
        self.model: mujoco.MjModel = env.sim.model._model
        self.data: mujoco.MjData = env.sim.data._data
        self.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_SENSOR
        self.arm = Arm(env)
        self._cameras, self._mesh_cell = tuple(cameras), mesh_cell
        self._size = mujoco.mj_stateSize(self.model, _STATE)
        self._renderer: Renderer | None = None

    @property
    def num_positions(self) -> int:
        """Joint positions: what a snapshot holds."""
        return self.model.nq

    def load(self, state: Doubles) -> None:
        """Continues from `state`, which `save` returned, to the bit. Positions in world coordinates do not follow."""
        mujoco.mj_setState(self.model, self.data, state[: self._size], _STATE)
        self.arm.set_memory(state[self._size :])
        self.data.warning.number[:] = 0  # what went wrong before is not this state's

    def save(self) -> Doubles:
        """All that the future depends on, `[P]`."""
        physics = np.empty(self._size)
        mujoco.mj_getState(self.model, self.data, physics, _STATE)
        return np.concatenate([physics, self.arm.get_memory()])

    def positions(self) -> FloatArray:
        """[S] joint positions: everything that can change the images."""
        return self.data.qpos.astype(np.float32)

    def has_diverged(self) -> bool:
        """Whether MuJoCo has started over since last asked or loaded, because numbers had become impossible."""
        warnings = self.data.warning.number
        diverged = bool(warnings[_DIVERGED].any())
        warnings[:] = 0
        return diverged

    def draw(self, snapshots: FloatArray, size_px: int, camera: str = "") -> Frames:
        """Images [N, size_px, size_px, 3] of joint positions [N, S], the right way up.

        Positions are rounded to the grain of `image_key` first, so that equal keys give equal images to the bit.
        """
        if self._renderer is None:
            thin_meshes(self.model, self._mesh_cell)
            shrink_textures(self.model, _TEXTURE_PX)
            hidden = self.model.geom_group == _COLLISION_GROUP
            self._renderer = Renderer(self.model, self._cameras, hidden, (), copies=False)
        return self._renderer.draw(np.rint(snapshots / KEY_GRAIN) * np.float32(KEY_GRAIN), size_px, camera)

    def close(self) -> None:
        """Frees OpenGL; the next image opens it again."""
        if self._renderer is not None:
            self._renderer.close()


def image_key(snapshots: FloatArray) -> NDArray[np.int64]:
    """[N, S]: joint positions in steps of a quarter of a millimetre (or of a milliradian)."""
    return np.rint(snapshots / KEY_GRAIN).astype(np.int64)
