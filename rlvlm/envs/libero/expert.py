"""A script that picks things up and puts them where a LIBERO task wants them, turns knobs, and opens and shuts drawers,
from the simulator's truth.

It goes through legs: over the thing, down, close, up, across, down, open, away; a knob is turned and a drawer drawn in
place of up, across and down. It begins again where a thing was dropped or missed, or lies elsewhere than it should.
Doors are beyond it.
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
_KNOB_M = 0.03  # height of a knob's upper part, by which it is taken
_BEYOND_M, _BEYOND_RAD = 0.03, 0.35  # how much farther a hand goes than would be enough
# by how much the hand points below the horizontal at a drawer's handle: a pull wants the fingers above and below it,
# a push room for the wrist
_STEEP = {"open": math.radians(20.0), "close": math.radians(55.0)}
_UP = np.array([0.0, 0.0, 1.0])


def is_drawer(scene: LiberoScene, name: str) -> bool:
    """Whether the region `name` is the inside of a drawer, open or shut."""
    region = scene.env.object_sites_dict.get(name)
    joints = None if region is None else region.joints
    return any(scene.model.joint(joint).type[0] == _SLIDE for joint in joints or ())


class _Jointed:
    """The body on a joint, as the scene has it now.

    Args:
        scene: whose positions in world coordinates are up to date.
        verb: action on it.
        name: of the fixture that it belongs to, or of the region inside of it.
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
        """The joint's positions between which the benchmark calls `verb` done."""
        low, high = sorted(self._ranges[f"default_{verb}_ranges"])
        return low, high

    def points(self) -> Doubles:
        """[N, 3] of its surface, in the world."""
        return surface_points(self.scene.model, self.scene.data, self._body)


class Knob(_Jointed):
    """A knob that is turned from above: `turnon` or `turnoff`."""

    def bar(self) -> Doubles:
        """[N, 3] points of the upper part, which fits between two fingers."""
        points = self.points()
        return points[points[:, 2] > points[:, 2].max() - _KNOB_M]

    def turned(self, across: Doubles) -> Doubles:
        """[2] where the fingers' direction `across` [2] points once the knob is turned far enough."""
        low, high = self.bounds(self._verb)
        # a little beyond the bound that comes first, but not out at the other one
        wanted = min(low + _BEYOND_RAD, high) if self.position < low else max(high - _BEYOND_RAD, low)
        turn = (wanted - self.position) * float(np.sign(self.axis[2]))  # seen from above, whichever way the axis points
        x, y = across
        return np.array([np.cos(turn) * x - np.sin(turn) * y, np.sin(turn) * x + np.cos(turn) * y])


class Drawer(_Jointed):
    """A drawer that is pulled open by its handle, or pushed shut: `open` or `close`."""

    @property
    def out(self) -> Doubles:
        """[3] the direction in which it opens."""
        return self.axis * float(np.sign(sum(self.bounds("open"))))  # joints count outwards or inwards

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


OPEN, CLOSED = 1.0, 0.0
PUTS, TURNS, DRAWS = ("on", "in"), ("turnon", "turnoff"), ("open", "close")
"""Goals that ask for a thing to be put, a knob to be turned, a drawer to be moved."""
# in which goals are worked at: what a drawer is to hold goes in between
_ORDER = ("open", "turnon", "turnoff", "on", "in", "close")
APPROACH, HOVER, TURN, DESCEND, CLOSE, LIFT, CARRY, LOWER, RELEASE, LEAVE, TWIST, DRAW = range(12)
# env steps that a leg may take at most
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
# how near the hand has to come to a leg's end; the others end by their time
_NEAR_M = {APPROACH: 0.03, HOVER: 0.015, DESCEND: 0.006, LIFT: 0.03, CARRY: 0.012, LOWER: 0.01, LEAVE: 0.03, DRAW: 0.01}
_SLIPPED_M = 0.05  # a thing that has moved so much against the hand is not held any more
_BEFORE_M = 0.12  # from which distance the hand goes to a handle
_GAIN = 2.0 / 0.05  # action per metre of distance: at 2.5 cm it is at full speed
_ASIDE = np.array([1, 1, 1, 0.3, 0.3, 0.3])  # noise of turns is a third of that of places


@dataclass(slots=True)
class ScriptMemory:
    """Memory of the script from step to step."""

    goal: int = -1
    """The goal that is worked at; -1 before one is chosen."""
    leg: int = APPROACH
    steps: int = 0
    """Steps of the leg so far."""
    place: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Position of the grasp, and later of the hand when the leg began."""
    across: tuple[float, ...] = (0.0, 1.0)
    hover: float = 0.0
    """Height from which it descends."""
    offset: tuple[float, ...] = (0.0, 0.0, 0.0)
    """From the hand to the thing when it was taken."""
    below: float = 0.0
    """How far the thing reaches below the hand."""

    def to_array(self) -> Doubles:
        """[13]."""
        return np.array(
            [self.goal, self.leg, self.steps, *self.place, *self.across, self.hover, *self.offset, self.below]
        )

    @classmethod
    def from_array(cls, numbers: Doubles) -> Self:
        """The memory in an array of `to_array`."""
        values = numbers.tolist()
        goal, leg, steps = map(int, values[:3])
        place, across, offset = tuple(values[3:6]), tuple(values[6:8]), tuple(values[9:12])
        return cls(goal, leg, steps, place, across, values[8], offset, values[12])


def has_script(scene: LiberoScene) -> bool:
    """Whether a task asks for nothing but putting things somewhere, turning knobs, opening and shutting drawers.

    Positions in world coordinates are up to date.
    """

    def can(verb: str, name: str, target: str = "") -> bool:
        if verb in DRAWS:
            return is_drawer(scene, name)
        is_open = is_drawer(scene, target) or not scene.is_shut(target)
        return verb in TURNS or (verb in PUTS and bool(target) and is_open)

    return all(can(*goal) for goal in scene.goals)


class Script:
    """Plays the scene's present state, whose positions in world coordinates are up to date.

    Args:
        scene: driven by the caller.
        memory: of the steps before; changed with every step.
    """

    def __init__(self, scene: LiberoScene, memory: ScriptMemory) -> None:
        self.scene = scene
        self._memory = memory
        inside = [goal[2] for goal in scene.goals if goal[0] == "in" and is_drawer(scene, goal[2])]
        self._goals = [*scene.goals, *(["open", drawer] for drawer in inside)]
        self._fingers = [scene.model.body(f"gripper0_{side}finger").id for side in ("left", "right")]

    def act(self, noise: float, rng: np.random.Generator) -> FloatArray:
        """[7] the next action, the gripper 1 for open and 0 for closed."""
        memory = self._memory
        if memory.goal < 0:
            self._choose()
        place, grip = self._leg()
        # legs that are over take no step; one round of them at most, or a goal without hope would be chosen for ever
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
        """Whether the leg that leads to `place` is."""
        memory = self._memory
        if memory.steps >= _LEG_STEPS[memory.leg]:
            return True
        if memory.leg == TURN and self._verb in DRAWS:  # the whole hand is turned, and not its yaw alone
            return bool(np.linalg.norm(self._turning()) < 0.2)
        if memory.leg in (TURN, TWIST):
            return bool(abs(self._across_now() @ memory.across) > 0.995)
        return bool(np.linalg.norm(place - self.scene.arm.place) < _NEAR_M.get(memory.leg, 0.0))

    def _choose(self) -> None:
        """Takes up the first goal that is not reached, with a grasp for its thing."""
        memory, scene = self._memory, self.scene
        # chosen anew whenever a leg comes to nothing, so what a mishap has undone is done again
        unmet = [index for index, goal in enumerate(self._goals) if not self._is_reached(goal)]
        unmet.sort(key=lambda index: _ORDER.index(self._goals[index][0]))
        memory.goal, memory.leg, memory.steps = (unmet or [0])[0], APPROACH, 0
        verb, thing, *_ = self._goals[memory.goal]
        if verb in DRAWS:  # a handle is where the drawer is: it is looked for at each step
            return
        others = [self._points(name) for name in scene.env.obj_body_id if name != thing]
        obstacles = np.concatenate(others) if others else np.empty((0, 3))
        points = Knob(scene, verb, thing).bar() if verb in TURNS else self._points(thing)
        grasp = plan_grasp(points, self._across_now(), obstacles)
        memory.place, memory.across = tuple(grasp.place), tuple(grasp.across)
        memory.hover = max(grasp.top + 0.06, grasp.place[2] + 0.08)

    def _is_reached(self, goal: Sequence[str]) -> bool:
        """Whether nothing is to be done for it: a drawer is opened only for what is not in it yet."""
        scene = self.scene
        if goal in scene.goals:
            return scene.is_reached(goal)
        is_full = all(scene.is_reached(other) for other in scene.goals if other[0] == "in" and other[2] == goal[1])
        return is_full or not scene.is_shut(goal[1])

    def _leg(self) -> tuple[Doubles, float]:
        """Target of the hand now, and its gripper."""
        if self._verb in DRAWS:
            return self._drawing_leg()
        memory, arm = self._memory, self.scene.arm
        x, y, z = memory.place
        thing = self._goals[memory.goal][1]
        if memory.leg == APPROACH:  # level, or the hand would sweep things away on its way down
            return np.array([x, y, max(memory.hover, arm.place[2] - 0.01)]), OPEN
        if memory.leg in (HOVER, TURN):
            return np.array([x, y, memory.hover]), OPEN
        if memory.leg in (DESCEND, CLOSE, TWIST):
            return np.array([x, y, z]), OPEN if memory.leg == DESCEND else CLOSED
        if memory.leg == LIFT:
            return np.array([x, y, self._carrying_height()]), CLOSED
        if memory.leg in (CARRY, LOWER):
            target, top, is_inside = self._target()
            # the thing and not the hand is to be there: it may have slid between the fingers since it was taken
            hold = self.scene.place_of(thing) - arm.place
            height = self._carrying_height()
            if memory.leg == LOWER:  # onto something it is set down; into something it is dropped from near its floor
                drop = max(target[2] + memory.below - 0.02, target[2] + 0.03)
                height = drop if is_inside else top + memory.below + 0.006
            return np.array([*(target - hold)[:2], height]), CLOSED
        if memory.leg == RELEASE:
            return np.array([x, y, z]), OPEN
        # the only leg left is LEAVE: straight up, above all that stands there
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
        following = {}  # otherwise legs follow in the order of their numbers
        if self._verb in TURNS:
            following = {CLOSE: TWIST, TWIST: RELEASE}
        elif self._verb in DRAWS:
            following = {CLOSE: DRAW, DRAW: RELEASE}
        memory.leg, memory.steps = following.get(memory.leg, memory.leg + 1), 0
        if memory.leg == DRAW:
            memory.place = tuple(here + self._drawer.way())
        if memory.leg == TWIST:
            memory.across = tuple(Knob(scene, self._verb, thing).turned(self._across_now()))
        if memory.leg == LIFT:  # how it was taken: against this it is told whether it has slipped
            memory.offset = tuple(hold)
            memory.below = float(here[2] - self._points(thing)[:, 2].min())
        if memory.leg in (LIFT, RELEASE):
            memory.place = tuple(here)

    def _target(self) -> tuple[Doubles, float, bool]:
        """Middle of where the thing should go, the height of its upper side, and whether that is the inside of it."""
        verb, _, target = self._goals[self._memory.goal]
        place = self.scene.place_of(target).copy()
        is_region = target in self.scene.env.object_sites_dict
        return place, float(place[2] if is_region else self._points(target)[:, 2].max()), verb == "in"

    @property
    def _verb(self) -> str:
        return self._goals[self._memory.goal][0]

    def _drawing_leg(self) -> tuple[Doubles, float]:
        """Target of the hand to move a drawer: a handle is taken to open it and pushed to shut it."""
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
        """[2] unit vector from finger to finger, seen from above."""
        left, right = (self.scene.data.xpos[finger] for finger in self._fingers)
        return (left - right)[:2] / np.linalg.norm((left - right)[:2])

    def _turning(self) -> Doubles:
        """[3] of an action: fingers towards the grasp's direction, the hand towards straight down, or as a drawer is
        taken.
        """
        if self._verb in DRAWS:
            pointing, fingers = self._drawer.pointing(), self._drawer.fingers()
            left, right = (self.scene.data.xpos[finger] for finger in self._fingers)
            now: Doubles = (left - right) / np.linalg.norm(left - right)
            towards = fingers if fingers @ now >= 0 else -fingers  # which finger is where does not matter
            # a cross product turns the one direction into the other, by the sine of the angle between them
            error: Doubles = np.cross(self.scene.arm.turn[:, 2], pointing) + np.cross(now, towards)
            return error / 0.5
        now, wanted = self._across_now(), np.array(self._memory.across)
        wanted = wanted if wanted @ now >= 0 else -wanted
        yaw = np.arctan2(now[0] * wanted[1] - now[1] * wanted[0], now @ wanted)
        tilt = np.cross(self.scene.arm.turn[:, 2], [0.0, 0.0, -1.0])
        return (np.array([0.0, 0.0, yaw]) + tilt) / 0.5
