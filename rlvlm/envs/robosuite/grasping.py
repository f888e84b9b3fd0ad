"""Grasps of a downward-pointing two-finger hand, planned from collision shapes."""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

from dataclasses import dataclass

import mujoco
import numpy as np

from rlvlm.envs.robosuite.arm import Doubles

_OPENING_M = 0.072  # widest thing that fits between the open fingers, with clearance
_FINGER_M = 0.05  # from the centre of the grasp to an open finger
# sideways offsets tried, and how much of the thing must extend beyond them
_SHIFTS_M, _AT_LEAST_M = np.array([0.0, 0.015, -0.015, 0.03, -0.03]), 0.005
# height of the palm above the finger tips, and half of its length and width, with clearance
_PALM_ABOVE_M, _PALM_M = 0.05, (0.11, 0.04)
# cost of a grasp that would collide; a radian of rotation costs 0.25, a decimetre of opening 0.6
_BLOCKED = 1.0
_ANGLES = 36  # directions of the fingers to try, over half a turn
_ROUND = np.linspace(0, 2 * np.pi, 24, endpoint=False)
_SPACING_M = 0.015  # about half the distance between sampled points of a box
_MESH_POINTS = 300


@dataclass(frozen=True, slots=True)
class Grasp:
    """Target pose for the point between the finger tips."""

    place: Doubles
    """[3] metres, in the world."""
    across: Doubles
    """[2] horizontal direction from finger to finger; the sign does not matter."""
    top: float
    """Height of the thing's highest point, metres."""


def surface_points(model: mujoco.MjModel, data: mujoco.MjData, body: int) -> Doubles:
    """Returns [N, 3] points in the world, on and in all collision shapes of the tree below `body`."""
    inside = [body]
    # MuJoCo numbers a body after its parent, so one pass finds the whole tree
    for other in range(body + 1, model.nbody):
        if model.body_parentid[other] in inside:
            inside.append(other)
    points = []
    for geom in np.flatnonzero(np.isin(model.geom_bodyid, inside)):
        if model.geom_contype[geom] or model.geom_conaffinity[geom]:
            own = _own_points(model, int(geom))
            points.append(own @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom])
    return np.concatenate(points) if points else data.xpos[body][None].copy()


def _own_points(model: mujoco.MjModel, geom: int) -> Doubles:
    """Returns [N, 3] points of one shape, in its own axes; round shapes except cylinders count as their boxes."""
    kind, size = model.geom_type[geom], model.geom_size[geom]
    if kind == mujoco.mjtGeom.mjGEOM_MESH:
        mesh = int(model.geom_dataid[geom])
        first, count = int(model.mesh_vertadr[mesh]), int(model.mesh_vertnum[mesh])
        points = model.mesh_vert[first : first + count : max(1, count // _MESH_POINTS)].astype(np.float64)
        return np.concatenate([points, (points + points.mean(axis=0)) / 2])
    if kind == mujoco.mjtGeom.mjGEOM_CYLINDER:
        rim = np.stack([size[0] * np.cos(_ROUND), size[0] * np.sin(_ROUND)], axis=1)
        disc = np.concatenate([rim, rim / 2])
        return np.concatenate([np.column_stack([disc, np.full(len(disc), z)]) for z in (size[1], -size[1])])
    half = size
    if kind == mujoco.mjtGeom.mjGEOM_SPHERE:
        half = np.repeat(size[0], 3)
    elif kind == mujoco.mjtGeom.mjGEOM_CAPSULE:
        half = np.array([size[0], size[0], size[0] + size[1]])
    edges = [np.linspace(-side, side, 2 + int(side / _SPACING_M)) for side in half]
    return np.array(np.meshgrid(*edges)).reshape(3, -1).T


def plan_grasp(points: Doubles, fingers: Doubles, obstacles: Doubles) -> Grasp:
    """Returns the grasp with little opening and rotation whose fingers come down clear of other things.

    A thing that fits between the fingers is grasped in the middle of its upper part or a little beside it, a wider one
    at its rim.

    Args:
        points: [N, 3] of the thing's surface.
        fingers: [2] present direction from finger to finger.
        obstacles: [M, 3] points of other things' surfaces.
    """
    top, height = points[:, 2].max(), np.ptp(points[:, 2])
    # of a tall thing only the top comes between the fingers
    upper = points[points[:, 2] > top - max(0.035, 0.45 * height), :2] if height > 0.05 else points[:, :2]
    angles = np.arange(_ANGLES) * np.pi / _ANGLES
    across = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    along = upper @ across.T  # [N, angles]
    widths, middles = np.ptp(along, axis=0), (along.max(axis=0) + along.min(axis=0)) / 2
    parts = across * middles[:, None]  # component along each direction; plus the perpendicular one it is the offset
    positions = parts + np.roll(parts, _ANGLES // 2, axis=0)
    # opening costs 0.6 a decimetre; the tips reach 1.2 to 3.5 cm below the top
    costs, depth = 6.0 * widths, min(0.035, max(0.55 * height, 0.012))
    fits = widths < _OPENING_M
    if fits.any():  # in the middle, or a little beside it along the thing
        sideways, slack = across[:, ::-1] * [-1, 1], np.roll(widths, _ANGLES // 2) / 2 - _AT_LEAST_M
        offsets = np.repeat(_SHIFTS_M, fits.sum())
        across, sideways, positions, costs, slack = (
            np.tile(each[fits], (len(_SHIFTS_M), *[1] * (each.ndim - 1)))
            for each in (across, sideways, positions, costs, slack)
        )
        positions = positions + sideways * offsets[:, None]
        costs = costs + 3.0 * np.abs(offsets) + _BLOCKED * 2 * (np.abs(offsets) > np.maximum(slack, 0))
    else:
        # one finger inside and one outside of the rim, on the side that either direction points to
        across, depth = np.concatenate([across, -across]), 0.022
        middle = positions[np.argmin(widths)]
        positions = middle + across * ((upper @ across.T).max(axis=0) - middle @ across.T - 0.008)[:, None]
        costs = np.zeros(len(across))
    z = max(top - depth, points[:, 2].min() + 0.012)  # the tips stay clear of the table
    # rotation of the hand by the smaller angle: the fingers are interchangeable
    costs = costs + 0.25 * np.arccos(np.clip(np.abs(across @ fingers), 0, 1))
    # Positions of obstacles in the axes of each candidate hand: along its fingers and across its palm.
    away = obstacles[:, None, :2] - positions  # [M, angles, 2]
    along, aside = (
        np.abs((away * across).sum(axis=2)),
        np.abs(across[:, 0] * away[..., 1] - across[:, 1] * away[..., 0]),
    )
    height = obstacles[:, 2, None] - z
    meets_finger = (height > -0.01) & (np.abs(along - _FINGER_M) < 0.02) & (aside < 0.02)
    meets_palm = (height > _PALM_ABOVE_M) & (along < _PALM_M[0]) & (aside < _PALM_M[1])
    costs = costs + _BLOCKED * (meets_finger | meets_palm).any(axis=0)
    best = int(np.argmin(costs))
    return Grasp(np.array([*positions[best], z]), across[best], float(top))
