"""A compiled robosuite env that several of our envs share: loaded quietly, light to draw, its states plain arrays.

On its own robosuite 1.4 warns about optional settings, opens a log file in the system's temporary folder, compiles
helpers into a cache folder, and sets MUJOCO_GL; LIBERO's benchmark prints. None of that happens here. Only drawing is
made lighter: contacts are computed from unchanged hulls and shapes.
"""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import contextlib
import importlib
import importlib.util
import io
import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import mujoco
import numpy as np

from rlvlm.core.errors import MachineError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.mujoco.env import DIVERGED, KEY_GRAIN
from rlvlm.envs.mujoco.renderer import Renderer
from rlvlm.envs.rendering import FIX
from rlvlm.envs.robosuite.arm import Arm, Doubles

_NEEDS = ("robosuite", "libero")
_NO_FOLDER = os.path.join(os.devnull, "libero")
# replaces `robosuite.macros_private`, robosuite's own place for settings
_SETTINGS = {
    "CONSOLE_LOGGING_LEVEL": None,
    "FILE_LOGGING_LEVEL": None,
    "ENABLE_NUMBA": False,
    "MUJOCO_GPU_RENDERING": False,
}


def load(module: str) -> ModuleType:
    """Imports a module of robosuite or LIBERO.

    Raises:
        MachineError: the packages are not installed, or lack a system library.
    """
    if module not in sys.modules:
        missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
        if missing:
            raise MachineError(f"this task needs {' and '.join(missing)}", "pip install '.[libero]'")
        settings = ModuleType("robosuite.macros_private")
        vars(settings).update(_SETTINGS)
        sys.modules.setdefault(settings.__name__, settings)
    # robosuite does not draw here, so it must not choose a renderer other than ours. LIBERO looks for settings in the
    # home folder, which may not exist, unless it is given another folder.
    with silence(), mock.patch.dict(os.environ, MUJOCO_GL="disabled", LIBERO_CONFIG_PATH=_NO_FOLDER):
        if "libero.libero" not in sys.modules and module.startswith("libero"):
            with mock.patch.dict(os.environ, HOME=os.environ.get("HOME", _NO_FOLDER)):
                paths = importlib.import_module("libero.libero")
            # A config.yaml of another checkout, in LIBERO_CONFIG_PATH or the home folder, points to that checkout's
            # files. LIBERO's modules import this function by name, so it is replaced before they do.
            paths.get_libero_path = lambda key: paths.get_default_path_dict()[key]
        try:
            return importlib.import_module(module)
        except ImportError as error:
            if "shared object file" not in str(error):
                raise
            raise MachineError(f"this task needs a library of the system: {error}", FIX) from error


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppresses output and warnings, and restores the global random generators at the end."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


_FEW_FACES = 200  # meshes with fewer faces stay unchanged
_CELLS_ACROSS = 10  # a mesh keeps at least this many cells along its longest side


def thin_meshes(model: mujoco.MjModel, cell_m: float) -> None:
    """Merges, for drawing, the vertices of each mesh that lie in the same cube of side `cell_m`, metres.

    Faces that collapse or coincide are dropped; the others keep their normals and texture coordinates.
    """
    for mesh in range(model.nmesh):
        first, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
        if count < _FEW_FACES:
            continue
        start = int(model.mesh_vertadr[mesh])
        vertices = model.mesh_vert[start : start + int(model.mesh_vertnum[mesh])]
        side = min(cell_m, float(np.ptp(vertices, axis=0).max()) / _CELLS_ACROSS)
        cubes = np.floor(vertices / side).astype(np.int64)
        _, representative, cube_of = np.unique(cubes, axis=0, return_index=True, return_inverse=True)
        faces = representative[cube_of.ravel()][model.mesh_face[first : first + count]]
        # a face is degenerate once two of its corners are merged; equal faces are found by rotating the smallest corner
        # to the front, which keeps the sense of rotation
        is_flat = (faces == np.roll(faces, 1, axis=1)).any(axis=1)
        turned = np.take_along_axis(faces, (faces.argmin(axis=1)[:, None] + np.arange(3)) % 3, axis=1)
        _, distinct = np.unique(turned, axis=0, return_index=True)  # two sides of a thin plate are two faces
        kept = np.setdiff1d(distinct, np.flatnonzero(is_flat))
        if not len(kept):
            continue
        # in place, at the beginning of the mesh's own range: MuJoCo's arrays cannot shrink
        stays = slice(first, first + len(kept))
        model.mesh_face[stays] = faces[kept]
        model.mesh_facenormal[stays] = model.mesh_facenormal[first + kept]
        model.mesh_facetexcoord[stays] = model.mesh_facetexcoord[first + kept]
        model.mesh_facenum[mesh] = len(kept)


def shrink_textures(model: mujoco.MjModel, side_px: int) -> None:
    """Averages flat textures whose smaller side has more than `side_px` pixels down to about that size."""
    for texture in range(model.ntex):
        height, width = int(model.tex_height[texture]), int(model.tex_width[texture])
        factor = min(height, width) // side_px
        if model.tex_type[texture] != mujoco.mjtTexture.mjTEXTURE_2D or factor < 2:
            continue
        channels, first = int(model.tex_nchannel[texture]), int(model.tex_adr[texture])
        rows, columns = height // factor, width // factor
        pixels = model.tex_data[first : first + height * width * channels].reshape(height, width, channels)
        blocks = pixels[: rows * factor, : columns * factor].reshape(rows, factor, columns, factor, channels)
        small = blocks.mean(axis=(1, 3)).astype(np.uint8)
        model.tex_data[first : first + small.size] = small.ravel()
        model.tex_height[texture], model.tex_width[texture] = rows, columns


# rounding for full images: edges of shadows and reflections move by more than the things themselves
_FINE_GRAIN = 0.05e-3
_TEXTURE_PX = 256  # maximum side of textures
_COLLISION_GROUP = 0
_STATE = mujoco.mjtState.mjSTATE_INTEGRATION


class RobosuiteScene:
    """One compiled env. It holds one state at a time: `load` a state before any query.

    Args:
        env: a robosuite env, with one Panda under OSC_POSE and without cameras or renderers.
        cameras: names of the cameras that can draw it, the default first.
        mesh_cell: size of the cells in which mesh points are merged, metres; 0 draws as robosuite's own renderer,
            full meshes, shadows, reflections and multisampling.
    """

    def __init__(self, env: Any, cameras: Sequence[str], mesh_cell: float) -> None:
        self.env = env
        self.model: mujoco.MjModel = env.sim.model._model
        self.data: mujoco.MjData = env.sim.data._data
        self.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_SENSOR
        self.arm = Arm(env)
        self._cameras, self._mesh_cell = tuple(cameras), mesh_cell
        self.grain = KEY_GRAIN if mesh_cell else _FINE_GRAIN
        """Step size to which positions are rounded before drawing, metres or radians."""
        self._size = mujoco.mj_stateSize(self.model, _STATE)
        self._renderer: Renderer | None = None

    def load(self, state: Doubles) -> None:
        """Continues exactly from a `state` of `save`. Does not update positions in world coordinates."""
        mujoco.mj_setState(self.model, self.data, state[: self._size], _STATE)
        self.arm.memory[:] = state[self._size :]
        self.data.warning.number[:] = 0  # earlier warnings do not concern this state

    def save(self) -> Doubles:
        """Returns everything that the future depends on, `[P]`."""
        physics = np.empty(self._size)
        mujoco.mj_getState(self.model, self.data, physics, _STATE)
        return np.concatenate([physics, self.arm.memory])

    def positions(self) -> FloatArray:
        """Returns [S] joint positions: everything that can change the images."""
        return self.data.qpos.astype(np.float32)

    def has_diverged(self) -> bool:
        """Returns whether MuJoCo has reset itself since the last call or load, because numbers had become invalid."""
        warnings = self.data.warning.number
        diverged = bool(warnings[DIVERGED].any())
        warnings[:] = 0
        return diverged

    def draw(self, snapshots: FloatArray, size_px: int, camera: str = "") -> Frames:
        """Returns images [N, size_px, size_px, 3] of joint positions [N, S], upright.

        Positions are rounded to the grain of image keys first, so that equal keys give identical images.
        """
        return self._open_renderer().draw(np.rint(snapshots / self.grain) * np.float32(self.grain), size_px, camera)

    def hand_path(self, snapshots: FloatArray, camera: str = "") -> FloatArray:
        """Returns [N, 2], the point between the finger tips, for joint positions [N, S]; see `Env.hand_path`."""
        return self._open_renderer().path(snapshots, (self.model.site(self.arm.site).name,), camera)

    def _open_renderer(self) -> Renderer:
        if self._renderer is None:
            is_whole = self._mesh_cell == 0
            if not is_whole:
                thin_meshes(self.model, self._mesh_cell)
                shrink_textures(self.model, _TEXTURE_PX)
            hidden = self.model.geom_group == _COLLISION_GROUP
            self._renderer = Renderer(self.model, self._cameras, hidden, (), has_effects=is_whole, copies=False)
        return self._renderer

    def close(self) -> None:
        """Frees OpenGL; the next image opens it again."""
        if self._renderer is not None:
            self._renderer.close()
