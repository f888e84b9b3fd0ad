"""The shortest way through a grid, where the mission is a goal square or a locked door. Used by `env`.

It moves, picks up, and opens doors; it never puts anything down, which no shortest way to a goal square or through a
locked door needs as long as nothing but the key lies in the way. `subgoals` plans for all other missions.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from minigrid.core.constants import OBJECT_TO_IDX
from numpy.typing import NDArray

LEFT, RIGHT, FORWARD, PICK_UP, DROP, TOGGLE, DONE = range(7)
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""Columns and rows by which a step goes, by direction."""
_OPEN, _LOCKED = 0, 2
_KEY, _DOOR, _GOAL = OBJECT_TO_IDX["key"], OBJECT_TO_IDX["door"], OBJECT_TO_IDX["goal"]
_CARRIED = {OBJECT_TO_IDX[kind] for kind in ("key", "ball", "box")}
_FREE = {OBJECT_TO_IDX[kind] for kind in ("empty", "floor", "goal")}

Cell = tuple[int, int]
State = tuple[Cell, int, int, int, int]
"""Cell and direction of the agent; place in `Layout.things` of what it carries (-1: nothing, -2: something that is not
in the grid); bits of the things that still lie there; bits of the doors that are open."""
NOTHING, OTHER = -1, -2


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to success."""

    actions: tuple[int, ...]
    targets: tuple[tuple[str, Cell], ...]
    """For each action, what is acted on next, beyond walking: `key`, `door`, `goal`, ... and where."""

    @property
    def target(self) -> tuple[str, Cell]:
        """What is acted on next."""
        return self.targets[0]

    def rest(self) -> "Plan | None":
        """The plan without its first action; None where that was the last one."""
        return Plan(self.actions[1:], self.targets[1:]) if len(self.actions) > 1 else None


class Layout:
    """What stays as it is while the agent moves.

    Args:
        grid: [W, H, 3] kind, colour and state of each cell.
        carried: kind and colour of what the agent carries, where it does.
        wants_door: whether success is to open a locked door rather than to stand on a goal square.
    """

    def __init__(self, grid: NDArray[np.int64], carried: tuple[int, int] | None, wants_door: bool) -> None:
        self._kinds: dict[Cell, tuple[int, int, int]] = {
            (x, y): (int(kind), int(colour), int(state))
            for x, column in enumerate(grid)
            for y, (kind, colour, state) in enumerate(column)
        }
        self.things = [cell for cell, (kind, _, _) in self._kinds.items() if kind in _CARRIED]
        self.doors = [cell for cell, (kind, _, _) in self._kinds.items() if kind == _DOOR]
        self._goals = {cell for cell, (kind, _, _) in self._kinds.items() if kind == _GOAL}
        self._locked = {cell for cell in self.doors if self._kinds[cell][2] == _LOCKED}
        self._carried = carried
        self._wants_door = wants_door

    def start(self, agent: tuple[int, int, int]) -> State:
        """The state with the agent at column, row and direction."""
        is_open = sum(1 << i for i, cell in enumerate(self.doors) if self._kinds[cell][2] == _OPEN)
        return agent[:2], agent[2], OTHER if self._carried else NOTHING, (1 << len(self.things)) - 1, is_open

    def moves(self, state: State) -> Iterator[tuple[int, State]]:
        """Every action that changes something, and what comes of it; walking into lava is left out."""
        cell, direction, hand, lying, is_open = state
        yield LEFT, (cell, (direction - 1) % 4, hand, lying, is_open)
        yield RIGHT, (cell, (direction + 1) % 4, hand, lying, is_open)
        ahead = self._ahead(cell, direction)
        kind, colour, _ = self._kinds[ahead]
        if kind in _CARRIED:
            bit = 1 << self.things.index(ahead)
            if not lying & bit:
                yield FORWARD, (ahead, direction, hand, lying, is_open)
            elif hand == NOTHING:
                yield PICK_UP, (cell, direction, self.things.index(ahead), lying ^ bit, is_open)
        elif kind == _DOOR:
            bit = 1 << self.doors.index(ahead)
            if is_open & bit:
                yield FORWARD, (ahead, direction, hand, lying, is_open)
            elif ahead not in self._locked or self._held(hand) == (_KEY, colour):
                yield TOGGLE, (cell, direction, hand, lying, is_open | bit)
        elif kind in _FREE:
            yield FORWARD, (ahead, direction, hand, lying, is_open)

    def is_success(self, state: State) -> bool:
        """Whether `state` is what is wanted."""
        if self._wants_door:
            return any(state[4] >> self.doors.index(cell) & 1 for cell in self._locked)
        return state[0] in self._goals

    def targets(self, state: State, actions: tuple[int, ...]) -> tuple[tuple[str, Cell], ...]:
        """For each action of a way, what the next one beyond walking acts on, or the last cell of the way."""
        found: list[tuple[str, Cell]] = []
        for number, action in enumerate(actions, start=1):
            if action in (PICK_UP, TOGGLE):
                target = "door" if action == TOGGLE else "key", self._ahead(*state[:2])
                found += [target] * (number - len(found))
            state = dict(self.moves(state))[action]
        return (*found, *[("goal", state[0])] * (len(actions) - len(found)))

    def _held(self, hand: int) -> tuple[int, int] | None:
        return self._carried if hand == OTHER else self._kinds[self.things[hand]][:2] if hand >= 0 else None

    def _ahead(self, cell: Cell, direction: int) -> Cell:
        return cell[0] + STEPS[direction][0], cell[1] + STEPS[direction][1]


def find_plan(layout: Layout, start: State) -> Plan | None:
    """A shortest way, by breadth-first search; None where there is none, or nothing is left to do."""
    if layout.is_success(start):
        return None
    came_from: dict[State, tuple[State, int]] = {}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for action, after in layout.moves(state):
            if after in came_from or after == start:
                continue
            came_from[after] = state, action
            if layout.is_success(after):
                actions = _retraced(came_from, start, after)
                return Plan(actions, layout.targets(start, actions))
            queue.append(after)
    return None


def _retraced(came_from: dict[State, tuple[State, int]], start: State, end: State) -> tuple[int, ...]:
    actions = []
    while end != start:
        end, action = came_from[end]
        actions.append(action)
    return tuple(reversed(actions))
