"""Draws a MuJoCo scene off-screen from stored joint positions. Used by all envs on MuJoCo."""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import atexit
import copy
import importlib
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mujoco
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import MachineError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.hand_path import project
from rlvlm.envs.rendering import FIX, ensure_renderer

_MAX_GEOMS = 1_000
# geom groups of the renderer's own model; glass is static and transparent
_STILL, _MOVING, _GLASS, _UNSEEN = 0, 1, 2, 5
_PIXEL = np.dtype("V3")  # three bytes copied as one item: thirty times as fast as a mask over channels
_SEEN_BY_DEFAULT = 3  # scenes put invisible geoms (collision shapes) into this group and those above
_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True, slots=True)
class Camera:
    """A fixed pinhole camera in world coordinates, metres."""

    position: tuple[float, float, float]
    right: tuple[float, float, float]
    """Direction of the image's right edge; any length."""
    up: tuple[float, float, float]
    """Direction of the image's upper edge, perpendicular to `right`; any length."""
    fovy_deg: float
    """Full vertical opening angle, degrees."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A partial image with depths, lowest row first."""

    colours: Frames
    """[H, W, 3] colours."""
    depths: FloatArray
    """[H, W] depths: 0 at the near plane, 1 where nothing was drawn."""
    is_glass: NDArray[np.bool_] | Literal[False] = False
    """[H, W] mask of transparent pixels."""


class Renderer:
    """Draws one model from one or several cameras, at any square size.

    It owns a copy of the model and of its data, so drawing never touches a running episode. The first image opens
    OpenGL, whose one buffer grows to the largest size asked for; smaller images use a corner of it, so that memory use
    is that of the largest size alone.

    By default shadows, multisampling and reflections are off: on a CPU they cost several times as much as the rest of
    the image. With `has_effects` they are as in the scene's file, and everything is drawn for each image. Without,
    static geoms are drawn once per size and kept with their depth; an image then costs only its moving parts. It is the
    same image to the bit, except where a moving surface coincides with a static one. Where a moving part meets a
    transparent one, everything is drawn. For a camera that moves with the scene nothing is static; for it, geoms
    outside of its view are left out.

    Args:
        model: model to draw; copied, so that later changes to the original do not show.
        camera: a camera, or names of the model's own cameras, the first of which is the default.
        hidden_geoms: [ngeom] True for geoms to leave out.
        placed_bodies: names of the bodies whose positions are part of a snapshot.
        has_mocaps: whether snapshots end with positions and orientations of the mocap bodies.
        has_effects: whether shadows, multisampling and reflections are drawn.
        copies: False draws `model` itself, which saves memory for a large one but changes the groups of its geoms.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        camera: Camera | Sequence[str],
        hidden_geoms: NDArray[np.bool_],
        placed_bodies: tuple[str, ...],
        *,
        has_mocaps: bool = False,
        has_effects: bool = False,
        copies: bool = True,
    ) -> None:
        self._model = copy.copy(model) if copies else model
        self._data = mujoco.MjData(self._model)
        self._placed = [self._model.body(name).id for name in placed_bodies]
        self._num_mocaps = self._model.nmocap if has_mocaps else 0
        self._has_effects = has_effects
        # Moving geoms cast shadows on static ones and are reflected by them, so then they cannot be drawn separately.
        self._has_still_layer = _sort_geoms(self._model, hidden_geoms, self._placed) and not has_effects
        self._groups = self._model.geom_group.copy()
        if not has_effects:
            self._model.vis.quality.offsamples = 0
            self._model.vis.quality.shadowsize = 0  # no shadow map: 64 MB less
        self._views = (
            {"": aim(self._model, camera)}
            if isinstance(camera, Camera)
            else {name: _fixed_view(self._model.camera(name).id) for name in camera}
        )
        self._scene = mujoco.MjvScene(self._model, maxgeom=_MAX_GEOMS)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = has_effects
        self._canvas: tuple[Any, mujoco.MjrContext] | None = None  # OpenGL's context, and MuJoCo's context inside it
        self._turn = threading.Lock()
        self._still: dict[tuple[int, int], _Layer] = {}  # static layers, by camera and size in pixels

    def draw(self, snapshots: FloatArray, size_px: int, camera: str = "") -> Frames:
        """Returns images [N, size_px, size_px, 3]. Safe to call from several threads.

        Args:
            snapshots: [N, S], each row the joint positions, then the placed bodies' positions in metres, then the
                positions and orientations (quaternions) of mocap bodies.
            size_px: side of the square image, >= 1.
            camera: one of the given names; empty takes the first.

        Raises:
            MachineError: no off-screen renderer works here.
        """
        view = self._views[camera or next(iter(self._views))]
        is_fixed = self._model.body_weldid[self._model.cam_bodyid[view.fixedcamid]] == 0
        frames = np.empty((len(snapshots), size_px, size_px, 3), np.uint8)
        with self._turn:
            self._open(size_px)
            for row, frame in zip(snapshots, frames, strict=True):
                self._pose(row)
                if self._has_still_layer and is_fixed:
                    frame[:] = self._composed(view, size_px)
                else:
                    frame[:] = self._whole(view, size_px)
            if os.environ.get("MUJOCO_GL") == "egl":  # EGL refuses a context to a thread while another thread has it
                egl, gl = importlib.import_module("OpenGL.EGL"), importlib.import_module("mujoco.egl")
                egl.eglMakeCurrent(gl.EGL_DISPLAY, egl.EGL_NO_SURFACE, egl.EGL_NO_SURFACE, egl.EGL_NO_CONTEXT)
        return np.ascontiguousarray(frames[:, ::-1])  # OpenGL's first row is the lowest

    def path(self, snapshots: FloatArray, hand: Sequence[str], camera: str = "") -> FloatArray:
        """Returns [N, 2], the hand's position at each of `snapshots` [N, S], in the image of the last one by `camera`;
        see `hand_path.project`. Nothing is drawn.

        Args:
            snapshots: see `draw`.
            hand: names of bodies or sites; the hand is their centre.
            camera: see `draw`.
        """
        view, data = self._views[camera or next(iter(self._views))], self._data
        sites = {self._model.site(index).name for index in range(self._model.nsite)}
        points = np.empty((len(snapshots), 3))
        with self._turn:
            for point, row in zip(points, snapshots, strict=True):
                self._pose(row)
                places = [data.site(name).xpos if name in sites else data.body(name).xpos for name in hand]
                point[:] = np.mean(places, axis=0)
            place, axes = data.cam_xpos[view.fixedcamid], data.cam_xmat[view.fixedcamid].reshape(3, 3)
            return project(points, place, axes, float(self._model.cam_fovy[view.fixedcamid]))

    def close(self) -> None:
        """Frees OpenGL; the next image opens it again."""
        with self._turn:
            if self._canvas is not None:
                window, context = self._canvas
                window.make_current()
                context.free()
                window.free()
                self._canvas = None

    def _pose(self, snapshot: FloatArray) -> None:
        self._data.qpos[:] = snapshot[: self._model.nq]
        bounds = np.cumsum([self._model.nq, 3 * len(self._placed), 3 * self._num_mocaps])
        _, placed, positions, turns = np.split(snapshot, bounds)
        self._model.body_pos[self._placed] = placed.reshape(-1, 3)
        if self._num_mocaps:
            self._data.mocap_pos[:], self._data.mocap_quat[:] = positions.reshape(-1, 3), turns.reshape(-1, 4)
        # only the computations that positions depend on: forces and contacts are invisible
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_flex(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)

    def _composed(self, view: mujoco.MjvCamera, size_px: int) -> Frames:
        """Returns [H, W, 3], the moving parts in front of or behind the static ones."""
        key = (view.fixedcamid, size_px)
        if key not in self._still:
            self._still[key] = self._still_layer(view, size_px)
        still, moving = self._still[key], self._paint(view, (_MOVING,), size_px)
        # the depth test that OpenGL would make if both were drawn together
        is_in_front = moving.depths < still.depths
        if (is_in_front & still.is_glass).any():  # a part behind or in front of it would need blending
            return self._whole(view, size_px)
        colours = still.colours.copy()
        np.copyto(colours.view(_PIXEL)[:, :, 0], moving.colours.view(_PIXEL)[:, :, 0], where=is_in_front)
        return colours

    def _still_layer(self, view: mujoco.MjvCamera, size_px: int) -> "_Layer":
        """Returns the static scene, with the depths of its opaque parts."""
        layer = self._paint(view, (_STILL, _GLASS), size_px)
        if not (self._groups == _GLASS).any():
            return layer
        # find the glass: drawn alone and opaque, it leaves its depth
        opaque = self._paint(view, (_STILL,), size_px)
        colours, materials = self._model.geom_rgba[:, 3].copy(), self._model.mat_rgba[:, 3].copy()
        self._model.geom_rgba[:, 3] = self._model.mat_rgba[:, 3] = 1.0
        is_glass = self._paint(view, (_GLASS,), size_px).depths < 1
        self._model.geom_rgba[:, 3], self._model.mat_rgba[:, 3] = colours, materials
        return _Layer(layer.colours, opaque.depths, is_glass)

    def _whole(self, view: mujoco.MjvCamera, size_px: int) -> Frames:
        """Returns [H, W, 3] with everything that the camera may see."""
        if not self._has_effects:  # geoms outside of the view may cast shadows into it
            self._model.geom_group[:] = np.where(self._is_in_view(view.fixedcamid), self._groups, _UNSEEN)
        colours = self._paint(view, (_STILL, _MOVING, _GLASS), size_px).colours
        self._model.geom_group[:] = self._groups
        return colours

    def _is_in_view(self, camera: int) -> NDArray[np.bool_]:
        """Returns [ngeom], False where a geom's bounding sphere is outside of a square image, or behind the camera."""
        model, data = self._model, self._data
        if model.cam_orthographic[camera] or model.cam_sensorsize[camera].any():
            return np.ones(model.ngeom, bool)
        offsets = (data.geom_xpos - data.cam_xpos[camera]) @ data.cam_xmat[camera].reshape(3, 3)  # looks along -z
        depths, slope = -offsets[:, 2], np.tan(np.deg2rad(model.cam_fovy[camera]) / 2)
        radii = np.where(model.geom_rbound > 0, model.geom_rbound, np.inf)  # a plane has none
        # distance of a sphere's centre from the plane through the camera and the image's edge
        beside = (np.abs(offsets[:, :2]).max(axis=1) - slope * depths) / np.hypot(1.0, slope)  # metres from the edge
        return (beside <= radii) & (depths >= -radii)

    def _paint(self, view: mujoco.MjvCamera, groups: tuple[int, ...], size_px: int) -> "_Layer":
        """Draws the geoms of `groups` as posed; the sky belongs to the static layer."""
        context = self._open(size_px)
        corner = mujoco.MjrRect(0, 0, size_px, size_px)
        option = mujoco.MjvOption()
        option.sitegroup[:] = 0
        option.geomgroup[:] = [group in groups for group in range(mujoco.mjNGROUP)]
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SKYBOX] = _STILL in groups
        mujoco.mjv_updateScene(self._model, self._data, option, None, view, mujoco.mjtCatBit.mjCAT_ALL, self._scene)
        mujoco.mjr_render(corner, self._scene, context)
        layer = _Layer(np.empty((size_px, size_px, 3), np.uint8), np.empty((size_px, size_px), np.float32))
        mujoco.mjr_readPixels(layer.colours, layer.depths, corner, context)
        return layer

    def _open(self, size_px: int) -> mujoco.MjrContext:
        """Returns the OpenGL context, made current and with a buffer of at least `size_px`."""
        if self._canvas is None:
            # MuJoCo makes the buffer as large as the model says, whatever the window's size
            self._model.vis.global_.offwidth = self._model.vis.global_.offheight = size_px
            backend = ensure_renderer()
            try:
                window = importlib.import_module(f"mujoco.{backend}").GLContext(size_px, size_px)
                window.make_current()
                self._canvas = window, mujoco.MjrContext(self._model, mujoco.mjtFontScale.mjFONTSCALE_50)
            except Exception as error:  # each driver raises its own errors if it is missing or broken
                raise MachineError(f"cannot draw with {backend}: {type(error).__name__}: {error}", FIX) from error
            close_at_exit(self)
        window, context = self._canvas
        window.make_current()
        if size_px > context.offWidth:  # the buffer never shrinks, because sizes alternate
            mujoco.mjr_resizeOffscreen(size_px, size_px, context)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
        return context


def _sort_geoms(model: mujoco.MjModel, hidden: NDArray[np.bool_], placed: list[int]) -> bool:
    """Sorts visible geoms into the groups `_STILL`, `_MOVING`, `_GLASS`; returns whether separate drawing is exact.

    It is not if a moving geom is transparent, and it is useless if deformable parts fill the image.
    """
    visible = (model.geom_group < _SEEN_BY_DEFAULT) & ~hidden
    # a body moves unless it is welded to the world and hangs neither on a placed body nor on a mocap body
    moves = (model.body_weldid != 0) | np.isin(model.body_rootid, model.body_rootid[placed])
    moves |= model.body_mocapid[model.body_rootid] >= 0
    alphas = np.where(model.geom_matid >= 0, model.mat_rgba[model.geom_matid, 3] if model.nmat else 1.0, 1.0)
    is_glass = (0 < model.geom_rgba[:, 3]) & (np.minimum(alphas, model.geom_rgba[:, 3]) < 1)
    groups = np.where(moves[model.geom_bodyid], _MOVING, np.where(is_glass, _GLASS, _STILL))
    model.geom_group[:] = np.where(visible, groups, _UNSEEN)
    return not (visible & is_glass & (groups == _MOVING)).any() and model.nflex == 0 and model.nskin == 0


class Closable(Protocol):
    """An object that holds the OpenGL context."""

    def close(self) -> None:
        """Frees the context."""
        ...


def close_at_exit(renderer: Closable) -> None:
    """Registers `renderer` to be freed before the process ends; call it after the first context is open.

    MuJoCo shuts the display down at exit, and a context freed after that complains on stderr. Exit handlers run in
    reverse order, so ours has to be registered after MuJoCo's.
    """
    if not _open:
        atexit.register(lambda: [renderer.close() for renderer in list(_open)])
    _open.add(renderer)


def aim(model: mujoco.MjModel, camera: Camera) -> mujoco.MjvCamera:
    """Turns the model's first camera, which must be fixed to the env, into `camera`."""
    assert model.ncam and model.cam_bodyid[0] == 0, "the scene file has no camera of the world to turn into ours"
    right, up = (np.asarray(axis) / np.linalg.norm(axis) for axis in (camera.right, camera.up))
    axes = np.stack([right, up, np.cross(right, up)], axis=1)  # columns x, y, z; a MuJoCo camera looks along -z
    model.cam_pos[0] = camera.position
    mujoco.mju_mat2Quat(model.cam_quat[0], axes.ravel())
    model.cam_fovy[0] = camera.fovy_deg
    return _fixed_view(0)


def _fixed_view(camera_id: int) -> mujoco.MjvCamera:
    view = mujoco.MjvCamera()
    view.type = mujoco.mjtCamera.mjCAMERA_FIXED
    view.fixedcamid = camera_id
    return view
