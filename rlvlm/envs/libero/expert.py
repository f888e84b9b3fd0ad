"""A script that picks things up and puts them where a LIBERO task wants them, and turns knobs, from the simulator's
truth.

It goes through legs: over the thing, down, close, up, across, down, open, away, or round in place of up and across for
a knob; and begins again where a thing was dropped or missed, or lies elsewhere than it should. Drawers and doors are
beyond it.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlvlm.envs.libero.scene import LiberoScene
from rlvlm.envs.robosuite.grasping import plan_grasp, surface_points
from rlvlm.types.steps import FloatArray

Doubles = NDArray[np.float64]

OPEN, CLOSED = 1.0, 0.0
TURNS = ("turnon", "turnoff")
"""Goals that ask for a knob to be turned."""
APPROACH, HOVER, TURN, DESCEND, CLOSE, LIFT, CARRY, LOWER, RELEASE, LEAVE, TWIST = range(11)
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
}
"""Env steps that a leg may take at most."""
_NEAR_M = {APPROACH: 0.03, HOVER: 0.015, DESCEND: 0.006, LIFT: 0.03, CARRY: 0.012, LOWER: 0.01, LEAVE: 0.03}
"""How near the hand has to come to a leg's end; the others end by their time."""
_SLIPPED_M = 0.05
"""A thing that has moved so much against the hand is not held any more."""
_KNOB_M = 0.03
"""Height of a knob's upper part, by which it is taken."""
_BEYOND_RAD = 0.35
"""How far a knob is turned beyond what is enough."""
_GAIN = 2.0 / 0.05
"""Action per metre of distance: at 2.5 cm it is at full speed."""
_ASIDE = np.array([1, 1, 1, 0.3, 0.3, 0.3])
"""Noise of turns is a third of that of places."""


@dataclass(slots=True)
class ScriptMemory:
    """What the script remembers from step to step."""

    goal: int = -1
    """The goal that is worked at; -1 before one is chosen."""
    leg: int = APPROACH
    steps: int = 0
    """Of the leg."""
    place: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Of the grasp, and later where the hand was when the leg began."""
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
        """What `to_array` returned."""
        values = numbers.tolist()
        goal, leg, steps = map(int, values[:3])
        place, across, offset = tuple(values[3:6]), tuple(values[6:8]), tuple(values[9:12])
        return cls(goal, leg, steps, place, across, values[8], offset, values[12])


def has_script(scene: LiberoScene) -> bool:
    """Whether all that a task asks for is to put things somewhere, where nothing has to be opened before, and to turn
    knobs; positions in world coordinates are up to date.
    """
    return all(
        goal[0] in TURNS or (goal[0] in ("on", "in") and len(goal) == 3 and not scene.is_shut(goal[2]))
        for goal in scene.goals
    )


class Script:
    """Plays the scene's present state, whose positions in world coordinates are up to date.

    Args:
        scene: driven by who calls.
        memory: of the steps before; changed with every step.
    """

    def __init__(self, scene: LiberoScene, memory: ScriptMemory) -> None:
        self._scene = scene
        self._memory = memory
        self._fingers = [scene.model.body(f"gripper0_{side}finger").id for side in ("left", "right")]

    def act(self, noise: float, rng: np.random.Generator) -> FloatArray:
        """[7] the next action, the gripper 1 for open and 0 for closed."""
        memory = self._memory
        if memory.goal < 0:
            self._choose()
        place, grip = self._leg()
        for _ in _LEG_STEPS:  # legs that are over take no step
            if not self._is_over(place):
                break
            self._begin_next_leg()
            place, grip = self._leg()
        memory.steps += 1
        action = np.zeros(7)
        action[:3] = (place - self._scene.arm.place) * _GAIN
        action[3:6] = self._turning()
        action[:6] = np.clip(action[:6], -1.0, 1.0) + noise * rng.normal(size=6) * _ASIDE
        action[6] = grip
        return np.clip(action, [-1.0] * 6 + [0.0], 1.0).astype(np.float32)

    def _is_over(self, place: Doubles) -> bool:
        """Whether the leg that leads to `place` is."""
        memory = self._memory
        if memory.steps >= _LEG_STEPS[memory.leg]:
            return True
        if memory.leg in (TURN, TWIST):
            return bool(abs(self._across_now() @ memory.across) > 0.995)
        return bool(np.linalg.norm(place - self._scene.arm.place) < _NEAR_M.get(memory.leg, 0.0))

    def _choose(self) -> None:
        """Takes up the first goal that is not reached, with a grasp for its thing."""
        memory, scene = self._memory, self._scene
        unmet = [index for index, goal in enumerate(scene.goals) if not scene.is_reached(goal)]
        memory.goal, memory.leg, memory.steps = (unmet or [0])[0], APPROACH, 0
        verb, thing, *_ = scene.goals[memory.goal]
        others = [self._points(name) for name in scene.env.obj_body_id if name != thing]
        obstacles = np.concatenate(others) if others else np.empty((0, 3))
        points = self._knob_points() if verb in TURNS else self._points(thing)
        grasp = plan_grasp(points, self._across_now(), obstacles)
        memory.place, memory.across = tuple(grasp.place), tuple(grasp.across)
        memory.hover = max(grasp.top + 0.06, grasp.place[2] + 0.08)

    def _leg(self) -> tuple[Doubles, float]:
        """Where the hand goes now, and its gripper."""
        memory, arm = self._memory, self._scene.arm
        x, y, z = memory.place
        thing = self._scene.goals[memory.goal][1]
        if memory.leg == APPROACH:
            return np.array([x, y, max(memory.hover, arm.place[2] - 0.01)]), OPEN
        if memory.leg in (HOVER, TURN):
            return np.array([x, y, memory.hover]), OPEN
        if memory.leg in (DESCEND, CLOSE, TWIST):
            return np.array([x, y, z]), OPEN if memory.leg == DESCEND else CLOSED
        if memory.leg == LIFT:
            return np.array([x, y, self._carrying_height()]), CLOSED
        if memory.leg in (CARRY, LOWER):
            target, top, is_inside = self._target()
            hold = self._scene.place_of(thing) - arm.place
            height = self._carrying_height()
            if memory.leg == LOWER:
                drop = max(target[2] + memory.below - 0.02, target[2] + 0.03)
                height = drop if is_inside else top + memory.below + 0.006
            return np.array([*(target - hold)[:2], height]), CLOSED
        if memory.leg == RELEASE:
            return np.array([x, y, z]), OPEN
        if self._verb in TURNS:
            return np.array([x, y, memory.hover + 0.05]), OPEN
        _, top, _ = self._target()
        return np.array([x, y, max(z + 0.1, top + 0.22)]), OPEN

    def _begin_next_leg(self) -> None:
        memory, scene = self._memory, self._scene
        here, thing = scene.arm.place.copy(), scene.goals[memory.goal][1]
        hold = scene.place_of(thing) - here
        has_slipped = np.linalg.norm(hold - memory.offset) > _SLIPPED_M
        if memory.leg == LEAVE or (memory.leg in (LIFT, CARRY, LOWER) and has_slipped):
            self._choose()
            return
        following = {CLOSE: TWIST, TWIST: RELEASE} if self._verb in TURNS else {}
        memory.leg, memory.steps = following.get(memory.leg, memory.leg + 1), 0
        if memory.leg == TWIST:
            memory.across = tuple(self._twisted())
        if memory.leg == LIFT:
            memory.offset = tuple(hold)
            memory.below = float(here[2] - self._points(thing)[:, 2].min())
        if memory.leg in (LIFT, RELEASE):
            memory.place = tuple(here)

    def _target(self) -> tuple[Doubles, float, bool]:
        """Middle of where the thing should go, the height of its upper side, and whether that is the inside of it."""
        verb, _, target = self._scene.goals[self._memory.goal]
        place = self._scene.place_of(target).copy()
        is_region = target in self._scene.env.object_sites_dict
        return place, float(place[2] if is_region else self._points(target)[:, 2].max()), verb == "in"

    @property
    def _verb(self) -> str:
        return self._scene.goals[self._memory.goal][0]

    @property
    def _knob(self) -> Any:
        """The joint of the present goal's knob."""
        scene = self._scene
        return scene.model.joint(scene.env.get_object(scene.goals[self._memory.goal][1]).joints[0])

    def _knob_points(self) -> Doubles:
        """[N, 3] of its upper part, which is a bar."""
        scene = self._scene
        points = surface_points(scene.model, scene.data, int(self._knob.bodyid[0]))
        return points[points[:, 2] > points[:, 2].max() - _KNOB_M]

    def _twisted(self) -> Doubles:
        """[2] the fingers' direction once the knob is turned far enough."""
        scene, knob = self._scene, self._knob
        properties = scene.env.get_object(scene.goals[self._memory.goal][1]).object_properties
        low, high = sorted(properties["articulation"][f"default_{self._verb}_ranges"])
        angle = float(scene.data.qpos[knob.qposadr[0]])
        wanted = min(low + _BEYOND_RAD, high) if angle < low else max(high - _BEYOND_RAD, low)
        turn = (wanted - angle) * float(np.sign(scene.data.xaxis[knob.id][2]))
        x, y = self._across_now()
        return np.array([np.cos(turn) * x - np.sin(turn) * y, np.sin(turn) * x + np.cos(turn) * y])

    def _carrying_height(self) -> float:
        memory = self._memory
        target, top, is_inside = self._target()
        if is_inside:
            return max(top + 0.02 + memory.below, target[2] + 0.12 + 0.6 * memory.below)
        return max(top + 0.05 + memory.below, memory.hover + 0.03)

    def _points(self, name: str) -> Doubles:
        scene = self._scene
        return surface_points(scene.model, scene.data, scene.env.obj_body_id[name])

    def _across_now(self) -> Doubles:
        """[2] unit vector from finger to finger, seen from above."""
        left, right = (self._scene.data.xpos[finger] for finger in self._fingers)
        return (left - right)[:2] / np.linalg.norm((left - right)[:2])

    def _turning(self) -> Doubles:
        """[3] of an action: the fingers towards the grasp's direction, the hand towards straight down."""
        now, wanted = self._across_now(), np.array(self._memory.across)
        wanted = wanted if wanted @ now >= 0 else -wanted
        yaw = np.arctan2(now[0] * wanted[1] - now[1] * wanted[0], now @ wanted)
        tilt = np.cross(self._scene.arm.turn[:, 2], [0.0, 0.0, -1.0])
        return (np.array([0.0, 0.0, yaw]) + tilt) / 0.5
