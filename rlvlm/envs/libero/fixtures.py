"""Knobs and drawers of LIBERO's fixtures: where a hand takes them, and how far they have to be moved for a goal."""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import math
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from rlvlm.envs.libero.scene import LiberoScene
from rlvlm.envs.robosuite.grasping import surface_points

Doubles = NDArray[np.float64]

_SLIDE = int(mujoco.mjtJoint.mjJNT_SLIDE)
_BAR_M = 0.02
"""Depth of a drawer's handle, its outermost part."""
_KNOB_M = 0.03
"""Height of a knob's upper part, by which it is taken."""
_BEYOND_M, _BEYOND_RAD = 0.03, 0.35
"""How much farther a hand goes than would be enough."""
_STEEP = {"open": math.radians(20.0), "close": math.radians(55.0)}
"""By how much the hand points below the horizontal at a drawer's handle: a pull wants the fingers above and below it, a
push room for the wrist.
"""
_UP = np.array([0.0, 0.0, 1.0])


def is_drawer(scene: LiberoScene, name: str) -> bool:
    """Whether the region `name` is the inside of a drawer, open or shut."""
    region = scene.env.object_sites_dict.get(name)
    joints = None if region is None else region.joints
    return any(scene.model.joint(joint).type[0] == _SLIDE for joint in joints or ())


class _Jointed:
    """What hangs on one joint."""

    def __init__(self, scene: LiberoScene, verb: str, name: str, joint: str) -> None:
        self._scene, self._verb = scene, verb
        self._joint: Any = scene.model.joint(joint)
        parent = getattr(scene.env.object_states_dict[name], "parent_name", name)
        self._bounds: Any = scene.env.get_object(parent).object_properties["articulation"]

    def bounds(self, verb: str) -> tuple[float, float]:
        """The joint's positions between which the benchmark calls `verb` done."""
        low, high = sorted(self._bounds[f"default_{verb}_ranges"])
        return low, high

    @property
    def position(self) -> float:
        """The joint's, in metres or radians."""
        return float(self._scene.data.qpos[self._joint.qposadr[0]])

    @property
    def axis(self) -> Doubles:
        """[3] the joint's, in the world."""
        return self._scene.data.xaxis[self._joint.id]

    def points(self) -> Doubles:
        """[N, 3] of its surface, in the world."""
        return surface_points(self._scene.model, self._scene.data, int(self._joint.bodyid[0]))


class Knob(_Jointed):
    """A knob that is turned from above.

    Args:
        scene: whose positions in world coordinates are up to date.
        verb: `turnon` or `turnoff`.
        name: of the fixture that it belongs to.
    """

    def __init__(self, scene: LiberoScene, verb: str, name: str) -> None:
        super().__init__(scene, verb, name, scene.env.get_object(name).joints[0])

    def bar(self) -> Doubles:
        """[N, 3] points of the upper part, which fits between two fingers."""
        points = self.points()
        return points[points[:, 2] > points[:, 2].max() - _KNOB_M]

    def turned(self, across: Doubles) -> Doubles:
        """[2] where the fingers' direction `across` [2] points once the knob is turned far enough."""
        low, high = self.bounds(self._verb)
        wanted = min(low + _BEYOND_RAD, high) if self.position < low else max(high - _BEYOND_RAD, low)
        turn = (wanted - self.position) * float(np.sign(self.axis[2]))
        x, y = across
        return np.array([np.cos(turn) * x - np.sin(turn) * y, np.sin(turn) * x + np.cos(turn) * y])


class Drawer(_Jointed):
    """A drawer that is pulled open by its handle, or pushed shut.

    Args:
        scene: whose positions in world coordinates are up to date.
        verb: `open` or `close`.
        name: of the region inside of it.
    """

    def __init__(self, scene: LiberoScene, verb: str, name: str) -> None:
        super().__init__(scene, verb, name, scene.env.object_sites_dict[name].joints[0])

    @property
    def out(self) -> Doubles:
        """[3] the direction in which it opens."""
        return self.axis * float(np.sign(sum(self.bounds("open"))))

    def handle(self) -> Doubles:
        """[3] the middle of its handle."""
        points, out = self.points(), self.out
        bar = points[points @ out > (points @ out).max() - _BAR_M]
        return (bar.max(axis=0) + bar.min(axis=0)) / 2

    def way(self) -> Doubles:
        """[3] how far the handle has yet to go, and a little more."""
        missing = abs(sum(self.bounds(self._verb)) / 2 - self.position) + _BEYOND_M
        return self.out * (missing if self._verb == "open" else -missing)

    def pointing(self) -> Doubles:
        """[3] where the hand points: at the drawer, and down."""
        steep = _STEEP[self._verb]
        return -math.cos(steep) * self.out - math.sin(steep) * _UP

    def fingers(self) -> Doubles:
        """[3] from finger to finger: above and below the handle to pull it, side by side to push."""
        sideways = np.cross(self.out, _UP)
        return np.cross(sideways, self.pointing()) if self._verb == "open" else sideways
