"""A script that solves LIBERO tasks from the simulator's truth: it picks up and places things, turns knobs, and opens
and shuts drawers.

It works in legs: over the thing, down, close, up, across, down, open, away; for a knob or a drawer, turning or
pulling replaces up, across and down. It starts over when a thing was dropped, missed, or lies in the wrong place.
It cannot handle doors.
"""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import mujoco
import numpy as np

from rlvlm.core.steps import FloatArray
from rlvlm.envs.libero.scene import LiberoScene
from rlvlm.envs.robosuite.arm import Doubles
from rlvlm.envs.robosuite.grasping import plan_grasp, surface_points

_SLIDE = int(mujoco.mjtJoint.mjJNT_SLIDE)
_BAR_M = 0.02  # depth of a drawer's handle, its outermost part
_KNOB_M = 0.03  # height of a knob's upper part, where it is grasped
_BEYOND_M, _BEYOND_RAD = 0.03, 0.35  # overshoot of the hand beyond what would suffice
# angle of the hand below the horizontal at a drawer's handle: to pull, fingers go above and below it; to push, the
# wrist needs room
_STEEP = {"open": math.radians(20.0), "close": math.radians(55.0)}
_UP = np.array([0.0, 0.0, 1.0])


def is_drawer(scene: LiberoScene, name: str) -> bool:
    """Returns whether the region `name` is the inside of a drawer, open or shut."""
    region = scene.env.object_sites_dict.get(name)
    joints = None if region is None else region.joints
    return any(scene.model.joint(joint).type[0] == _SLIDE for joint in joints or ())


class _Jointed:
    """A body on a joint, in the scene's present state.

    Args:
        scene: scene whose positions in world coordinates are up to date.
        verb: action to perform on it.
        name: fixture that it belongs to, or region inside of it.
    """

    def __init__(self, scene: LiberoScene, verb: str, name: str) -> None:
        self.scene, self._verb = scene, verb
        joint: Any = scene.model.joint(scene.env.get_object(name).joints[0])
        parent = getattr(scene.env.object_states_dict[name], "parent_name", name)
        self._ranges: Any = scene.env.get_object(parent).object_properties["articulation"]
        self._body = int(joint.bodyid[0])
        self.position = float(scene.data.qpos[joint.qposadr[0]])
        """Position of the joint, in metres or radians."""
        self.axis: Doubles = scene.data.xaxis[joint.id]
        """[3] axis of the joint, in the world."""

    def bounds(self, verb: str) -> tuple[float, float]:
        """Returns the joint positions between which the benchmark considers `verb` done."""
        low, high = sorted(self._ranges[f"default_{verb}_ranges"])
        return low, high

    def points(self) -> Doubles:
        """Returns [N, 3] points of its surface, in the world."""
        return surface_points(self.scene.model, self.scene.data, self._body)


class Knob(_Jointed):
    """A knob that is turned from above: `turnon` or `turnoff`."""

    def bar(self) -> Doubles:
        """Returns [N, 3] points of the upper part, which fits between two fingers."""
        points = self.points()
        return points[points[:, 2] > points[:, 2].max() - _KNOB_M]

    def turned(self, across: Doubles) -> Doubles:
        """Returns [2], the fingers' direction, now `across` [2], once the knob is turned far enough."""
        low, high = self.bounds(self._verb)
        # a little beyond the nearer bound, but not past the other one
        wanted = min(low + _BEYOND_RAD, high) if self.position < low else max(high - _BEYOND_RAD, low)
        turn = (wanted - self.position) * float(np.sign(self.axis[2]))  # seen from above, whichever way the axis points
        x, y = across
        return np.array([np.cos(turn) * x - np.sin(turn) * y, np.sin(turn) * x + np.cos(turn) * y])


class Drawer(_Jointed):
    """A drawer that is pulled open by its handle, or pushed shut: `open` or `close`."""

    @property
    def out(self) -> Doubles:
        """Returns [3], the direction in which the drawer opens."""
        return self.axis * float(np.sign(sum(self.bounds("open"))))  # joints count outwards or inwards

    def handle(self) -> Doubles:
        """Returns [3], the middle of its handle."""
        points, out = self.points(), self.out
        bar = points[points @ out > (points @ out).max() - _BAR_M]
        return (bar.max(axis=0) + bar.min(axis=0)) / 2

    def way(self) -> Doubles:
        """Returns [3], the way that the handle has yet to go, and a little more."""
        missing = abs(sum(self.bounds(self._verb)) / 2 - self.position) + _BEYOND_M
        return self.out * (missing if self._verb == "open" else -missing)

    def pointing(self) -> Doubles:
        """Returns [3], where the hand should point: at the drawer, and down."""
        steep = _STEEP[self._verb]
        return -math.cos(steep) * self.out - math.sin(steep) * _UP

    def fingers(self) -> Doubles:
        """Returns [3], from finger to finger: above and below the handle to pull it, side by side to push."""
        sideways = np.cross(self.out, _UP)
        return np.cross(sideways, self.pointing()) if self._verb == "open" else sideways


OPEN, CLOSED = 1.0, 0.0
PUTS, TURNS, DRAWS = ("on", "in"), ("turnon", "turnoff"), ("open", "close")
"""Goals by kind: to put a thing somewhere, to turn a knob, to move a drawer."""
# order in which goals are worked on: things to be put into a drawer go between opening and shutting it
_ORDER = ("open", "turnon", "turnoff", "on", "in", "close")
APPROACH, HOVER, TURN, DESCEND, CLOSE, LIFT, CARRY, LOWER, RELEASE, LEAVE, TWIST, DRAW = range(12)
# maximum env steps of each leg
_LEG_STEPS = {
    APPROACH: 60,
    HOVER: 60,
    TURN: 25,
    DESCEND: 40,
    CLOSE: 9,
    LIFT: 35,
    CARRY: 70,
    LOWER: 30,
    RELEASE: 7,
    LEAVE: 25,
    TWIST: 40,
    DRAW: 40,
}
# how near the hand must come to a leg's end; the other legs end by time
_NEAR_M = {APPROACH: 0.03, HOVER: 0.015, DESCEND: 0.006, LIFT: 0.03, CARRY: 0.012, LOWER: 0.01, LEAVE: 0.03, DRAW: 0.01}
_SLIPPED_M = 0.05  # a thing that has moved this far in the hand has slipped
_BEFORE_M = 0.12  # distance from which the hand approaches a handle
_GAIN = 2.0 / 0.05  # action per metre of distance: at 2.5 cm it is at full speed
_ASIDE = np.array([1, 1, 1, 0.3, 0.3, 0.3])  # noise of rotations is a third of that of positions


@dataclass(slots=True)
class ScriptMemory:
    """State of the script between steps."""

    goal: int = -1
    """Goal being worked on; -1 before the first choice."""
    leg: int = APPROACH
    steps: int = 0
    """Steps of the leg so far."""
    place: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Position of the grasp; later, the hand's position when the leg began."""
    across: tuple[float, ...] = (0.0, 1.0)
    hover: float = 0.0
    """Height from which the hand descends."""
    offset: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Vector from the hand to the thing when it was grasped."""
    below: float = 0.0
    """Length by which the thing extends below the hand."""

    def to_array(self) -> Doubles:
        """Returns the memory as [13] numbers."""
        return np.array(
            [self.goal, self.leg, self.steps, *self.place, *self.across, self.hover, *self.offset, self.below]
        )

    @classmethod
    def from_array(cls, numbers: Doubles) -> Self:
        """Restores a memory from the array of `to_array`."""
        values = numbers.tolist()
        goal, leg, steps = map(int, values[:3])
        place, across, offset = tuple(values[3:6]), tuple(values[6:8]), tuple(values[9:12])
        return cls(goal, leg, steps, place, across, values[8], offset, values[12])


def has_script(scene: LiberoScene) -> bool:
    """Returns whether the script can solve the task: only placing things, turning knobs, opening and shutting drawers.

    Positions in world coordinates must be up to date.
    """

    def can(verb: str, name: str, target: str = "") -> bool:
        if verb in DRAWS:
            return is_drawer(scene, name)
        is_open = is_drawer(scene, target) or not scene.is_shut(target)
        return verb in TURNS or (verb in PUTS and bool(target) and is_open)

    return all(can(*goal) for goal in scene.goals)


class Script:
    """Plays from the scene's present state, whose positions in world coordinates are up to date.

    Args:
        scene: driven by the caller.
        memory: memory of the steps before; updated by every step.
    """

    def __init__(self, scene: LiberoScene, memory: ScriptMemory) -> None:
        self.scene = scene
        self._memory = memory
        inside = [goal[2] for goal in scene.goals if goal[0] == "in" and is_drawer(scene, goal[2])]
        self._goals = [*scene.goals, *(["open", drawer] for drawer in inside)]
        self._fingers = [scene.model.body(f"gripper0_{side}finger").id for side in ("left", "right")]

    def act(self, noise: float, rng: np.random.Generator) -> FloatArray:
        """Returns [7], the next action, the gripper 1 for open and 0 for closed."""
        memory = self._memory
        if memory.goal < 0:
            self._choose()
        place, grip = self._leg()
        # legs that are finished take no step; at most one round, or a hopeless goal would be chosen for ever
        for _ in _LEG_STEPS:
            if not self._is_over(place):
                break
            self._begin_next_leg()
            place, grip = self._leg()
        memory.steps += 1
        action = np.zeros(7)
        action[:3] = (place - self.scene.arm.place) * _GAIN
        action[3:6] = self._turning()
        action[:6] = np.clip(action[:6], -1.0, 1.0) + noise * rng.normal(size=6) * _ASIDE
        action[6] = grip
        return np.clip(action, [-1.0] * 6 + [0.0], 1.0).astype(np.float32)

    def _is_over(self, place: Doubles) -> bool:
        """Returns whether the leg that leads to `place` is finished."""
        memory = self._memory
        if memory.steps >= _LEG_STEPS[memory.leg]:
            return True
        if memory.leg == TURN and self._verb in DRAWS:  # the whole hand is rotated, not only its yaw
            return bool(np.linalg.norm(self._turning()) < 0.2)
        if memory.leg in (TURN, TWIST):
            return bool(abs(self._across_now() @ memory.across) > 0.995)
        return bool(np.linalg.norm(place - self.scene.arm.place) < _NEAR_M.get(memory.leg, 0.0))

    def _choose(self) -> None:
        """Selects the first goal that is not reached, and a grasp for its thing."""
        memory, scene = self._memory, self.scene
        # chosen again after every failure, so that goals undone by an accident are redone
        unmet = [index for index, goal in enumerate(self._goals) if not self._is_reached(goal)]
        unmet.sort(key=lambda index: _ORDER.index(self._goals[index][0]))
        memory.goal, memory.leg, memory.steps = (unmet or [0])[0], APPROACH, 0
        verb, thing, *_ = self._goals[memory.goal]
        if verb in DRAWS:  # a handle moves with its drawer: it is located at each step
            return
        others = [self._points(name) for name in scene.env.obj_body_id if name != thing]
        obstacles = np.concatenate(others) if others else np.empty((0, 3))
        points = Knob(scene, verb, thing).bar() if verb in TURNS else self._points(thing)
        grasp = plan_grasp(points, self._across_now(), obstacles)
        memory.place, memory.across = tuple(grasp.place), tuple(grasp.across)
        memory.hover = max(grasp.top + 0.06, grasp.place[2] + 0.08)

    def _is_reached(self, goal: Sequence[str]) -> bool:
        """Returns whether a goal needs nothing more: a drawer is opened only for things that are not in it yet."""
        scene = self.scene
        if goal in scene.goals:
            return scene.is_reached(goal)
        is_full = all(scene.is_reached(other) for other in scene.goals if other[0] == "in" and other[2] == goal[1])
        return is_full or not scene.is_shut(goal[1])

    def _leg(self) -> tuple[Doubles, float]:
        """Returns the hand's target and the gripper's for the present leg."""
        if self._verb in DRAWS:
            return self._drawing_leg()
        memory, arm = self._memory, self.scene.arm
        x, y, z = memory.place
        thing = self._goals[memory.goal][1]
        if memory.leg == APPROACH:  # level first, or the hand would sweep things away on its way down
            return np.array([x, y, max(memory.hover, arm.place[2] - 0.01)]), OPEN
        if memory.leg in (HOVER, TURN):
            return np.array([x, y, memory.hover]), OPEN
        if memory.leg in (DESCEND, CLOSE, TWIST):
            return np.array([x, y, z]), OPEN if memory.leg == DESCEND else CLOSED
        if memory.leg == LIFT:
            return np.array([x, y, self._carrying_height()]), CLOSED
        if memory.leg in (CARRY, LOWER):
            target, top, is_inside = self._target()
            # the thing, not the hand, must be there: it may have slid between the fingers since the grasp
            hold = self.scene.place_of(thing) - arm.place
            height = self._carrying_height()
            if memory.leg == LOWER:  # set down on a surface; dropped from near the floor into a container
                drop = max(target[2] + memory.below - 0.02, target[2] + 0.03)
                height = drop if is_inside else top + memory.below + 0.006
            return np.array([*(target - hold)[:2], height]), CLOSED
        if memory.leg == RELEASE:
            return np.array([x, y, z]), OPEN
        # the only remaining leg is LEAVE: straight up, above everything nearby
        if self._verb in TURNS:
            return np.array([x, y, memory.hover + 0.05]), OPEN
        _, top, _ = self._target()
        return np.array([x, y, max(z + 0.1, top + 0.22)]), OPEN

    def _begin_next_leg(self) -> None:
        memory, scene = self._memory, self.scene
        here, thing = scene.arm.place.copy(), self._goals[memory.goal][1]
        hold = scene.place_of(thing) - here
        has_slipped = np.linalg.norm(hold - memory.offset) > _SLIPPED_M
        if memory.leg == LEAVE or (memory.leg in (LIFT, CARRY, LOWER) and has_slipped):
            self._choose()
            return
        following = {}  # by default legs follow in the order of their numbers
        if self._verb in TURNS:
            following = {CLOSE: TWIST, TWIST: RELEASE}
        elif self._verb in DRAWS:
            following = {CLOSE: DRAW, DRAW: RELEASE}
        memory.leg, memory.steps = following.get(memory.leg, memory.leg + 1), 0
        if memory.leg == DRAW:
            memory.place = tuple(here + self._drawer.way())
        if memory.leg == TWIST:
            memory.across = tuple(Knob(scene, self._verb, thing).turned(self._across_now()))
        if memory.leg == LIFT:  # remember the grasp, to detect slipping
            memory.offset = tuple(hold)
            memory.below = float(here[2] - self._points(thing)[:, 2].min())
        if memory.leg in (LIFT, RELEASE):
            memory.place = tuple(here)

    def _target(self) -> tuple[Doubles, float, bool]:
        """Returns the middle of the target, the height of its upper side, and whether the target is its inside."""
        verb, _, target = self._goals[self._memory.goal]
        place = self.scene.place_of(target).copy()
        is_region = target in self.scene.env.object_sites_dict
        return place, float(place[2] if is_region else self._points(target)[:, 2].max()), verb == "in"

    @property
    def _verb(self) -> str:
        return self._goals[self._memory.goal][0]

    def _drawing_leg(self) -> tuple[Doubles, float]:
        """Returns the hand's target for moving a drawer: a handle is grasped to open it and pushed to shut it."""
        memory, drawer = self._memory, self._drawer
        handle, out = drawer.handle(), drawer.out
        is_opening = self._verb == "open"
        grip, up = OPEN if is_opening else CLOSED, np.array([0.0, 0.0, 1.0])
        before = handle - _BEFORE_M * drawer.pointing()
        if memory.leg == APPROACH:
            return before + 0.1 * up, grip
        if memory.leg in (HOVER, TURN):
            return before, grip
        if memory.leg in (DESCEND, CLOSE):
            return handle if is_opening else handle + 0.03 * out, CLOSED if memory.leg == CLOSE else grip
        place = np.array(memory.place)
        if memory.leg == DRAW:
            return place, CLOSED
        return (place if memory.leg == RELEASE else place + 0.08 * out + 0.12 * up), grip

    @property
    def _drawer(self) -> Drawer:
        return Drawer(self.scene, *self._goals[self._memory.goal])

    def _carrying_height(self) -> float:
        memory = self._memory
        target, top, is_inside = self._target()
        if is_inside:
            return max(top + 0.02 + memory.below, target[2] + 0.12 + 0.6 * memory.below)
        return max(top + 0.05 + memory.below, memory.hover + 0.03)

    def _points(self, name: str) -> Doubles:
        scene = self.scene
        return surface_points(scene.model, scene.data, scene.env.obj_body_id[name])

    def _across_now(self) -> Doubles:
        """Returns [2], the unit vector from finger to finger, seen from above."""
        left, right = (self.scene.data.xpos[finger] for finger in self._fingers)
        return (left - right)[:2] / np.linalg.norm((left - right)[:2])

    def _turning(self) -> Doubles:
        """Returns [3] of an action: turns fingers to the grasp's direction, the hand down or towards a drawer."""
        if self._verb in DRAWS:
            pointing, fingers = self._drawer.pointing(), self._drawer.fingers()
            left, right = (self.scene.data.xpos[finger] for finger in self._fingers)
            now: Doubles = (left - right) / np.linalg.norm(left - right)
            towards = fingers if fingers @ now >= 0 else -fingers  # the two fingers are interchangeable
            # a cross product rotates one direction into the other, by the sine of the angle between them
            error: Doubles = np.cross(self.scene.arm.turn[:, 2], pointing) + np.cross(now, towards)
            return error / 0.5
        now, wanted = self._across_now(), np.array(self._memory.across)
        wanted = wanted if wanted @ now >= 0 else -wanted
        yaw = np.arctan2(now[0] * wanted[1] - now[1] * wanted[0], now @ wanted)
        tilt = np.cross(self.scene.arm.turn[:, 2], [0.0, 0.0, -1.0])
        return (np.array([0.0, 0.0, yaw]) + tilt) / 0.5
