"""Planner of MiniGrid's scripted expert: a plan is the whole way from the present state to success. Used by `env`.

`plan_shortest` handles missions with a goal square or a locked door by an exhaustive search, so no way is shorter. It
moves, picks up, and opens doors; it never puts anything down, which no shortest way needs here as long as nothing but
the key is in the way.

`plan_subgoals` handles the other missions: go to, pick up, put down, open, put beside. Each goal is reached by a
shortest walk over cells and directions (Dijkstra). An obstacle becomes a goal of its own and is dealt with first: a
locked door needs its key (which may lie in a box), and a thing that blocks the way is put aside. Each leg is shortest,
but the whole is not: with a locked door it takes some five steps more than `plan_shortest`, by which progress is
counted; without one it takes the same number.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from minigrid.core.constants import OBJECT_TO_IDX
from minigrid.core.world_object import Box, Door, WorldObj
from numpy.typing import NDArray

from rlvlm.envs.minigrid.missions import Cell, Face, Goal, Mission, Open, PutBeside, Stand, Take

LEFT, RIGHT, FORWARD, PICK_UP, DROP, TOGGLE, DONE = range(7)
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""Column and row offset of a step, by direction."""
_OPEN, _LOCKED = 0, 2
_KEY, _DOOR, _GOAL = OBJECT_TO_IDX["key"], OBJECT_TO_IDX["door"], OBJECT_TO_IDX["goal"]
_CARRIED = {OBJECT_TO_IDX[kind] for kind in ("key", "ball", "box")}
_FREE = {OBJECT_TO_IDX[kind] for kind in ("empty", "floor", "goal")}

Pose = tuple[Cell, int]
"""Cell and direction of the agent."""
State = tuple[Cell, int, int, int, int]
"""Cell and direction of the agent; index in `_Layout.things` of the thing it carries (-1: nothing, -2: something not
in the grid); bit mask of the things still lying there; bit mask of the open doors."""
_NOTHING, _OTHER = -1, -2
_COST_BLOCKED, _COST_LOCKED = 20, 40  # estimated steps to put a thing aside, and to fetch a key
_TRIES, _DEPTH = 30, 12  # limits on attempts per goal, and on nesting of goals, beyond which planning fails
Entry = tuple[int, tuple[tuple[int, bool], ...]]
"""Cost of a step to another pose; its actions, each with whether it can be taken without clearing anything."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan to reach success."""

    actions: tuple[int, ...]
    targets: tuple[tuple[str, Cell], ...]
    """For each action, the next thing acted on (beyond walking), `key`, `door`, `goal`, ..., and its cell."""


def _ahead(pose: Pose) -> Cell:
    """Returns the cell in front of the agent."""
    (x, y), facing = pose
    return x + STEPS[facing][0], y + STEPS[facing][1]


def plan_shortest(
    grid: NDArray[np.int64], agent: tuple[int, int, int], carried: tuple[int, int] | None, wants_door: bool
) -> Plan | None:
    """Returns a shortest plan, by breadth-first search; None if there is none, or nothing is left to do.

    Args:
        grid: [W, H, 3] kind, colour and state of each cell.
        agent: column, row and direction.
        carried: kind and colour of the thing that the agent carries, if any.
        wants_door: whether success is opening a locked door rather than standing on a goal square.
    """
    layout = _Layout(grid, carried, wants_door)
    start = layout.start(agent)
    if layout.is_success(start):
        return None
    came_from: dict[State, tuple[State, int]] = {}
    queue = deque([start])  # first in, first out: states come in order of length, so the first success is nearest
    while queue:
        state = queue.popleft()
        for action, after in layout.moves(state):
            if after in came_from or after == start:
                continue
            came_from[after] = state, action
            if layout.is_success(after):
                actions = []
                while after != start:
                    after, action = came_from[after]
                    actions.append(action)
                return layout.plan(start, actions[::-1])
            queue.append(after)
    return None


class _Layout:
    """Facts that stay the same while the agent moves; see `plan_shortest`."""

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
        """Returns the state with the agent at column, row and direction."""
        is_open = sum(1 << i for i, cell in enumerate(self.doors) if self._kinds[cell][2] == _OPEN)
        return agent[:2], agent[2], _OTHER if self._carried else _NOTHING, (1 << len(self.things)) - 1, is_open

    def moves(self, state: State) -> Iterator[tuple[int, State]]:
        """Yields every action that changes something, with its result; walking into lava is left out."""
        cell, direction, hand, lying, is_open = state
        yield LEFT, (cell, (direction - 1) % 4, hand, lying, is_open)
        yield RIGHT, (cell, (direction + 1) % 4, hand, lying, is_open)
        ahead = _ahead((cell, direction))
        kind, colour, _ = self._kinds[ahead]
        if kind in _CARRIED:
            bit = 1 << self.things.index(ahead)  # bit in the mask of things not yet picked up
            if not lying & bit:
                yield FORWARD, (ahead, direction, hand, lying, is_open)
            elif hand == _NOTHING:
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
        """Returns whether `state` is a success."""
        if self._wants_door:
            return any(state[4] >> self.doors.index(cell) & 1 for cell in self._locked)
        return state[0] in self._goals

    def plan(self, state: State, actions: list[int]) -> Plan:
        """Returns the plan from `state` by `actions`, with each one's target: the next thing acted on, or last cell."""
        targets: list[tuple[str, Cell]] = []
        for number, action in enumerate(actions, start=1):
            if action in (PICK_UP, TOGGLE):
                target = "door" if action == TOGGLE else "key", _ahead(state[:2])
                targets += [target] * (number - len(targets))
            state = dict(self.moves(state))[action]
        return Plan(tuple(actions), (*targets, *[("goal", state[0])] * (len(actions) - len(targets))))

    def _held(self, hand: int) -> tuple[int, int] | None:
        """Returns kind and colour of the thing in the agent's hand."""
        if hand == _NOTHING:
            return None
        return self._carried if hand == _OTHER else self._kinds[self.things[hand]][:2]


class _NoWay(Exception):
    """No way leads to the goal."""


def plan_subgoals(env: object, mission: Mission) -> Plan | None:
    """Returns actions that fulfil a mission from the env's present state, without changing it; None if no way is found.

    Args:
        env: env of MiniGrid.
        mission: goals left in it.
    """
    thought = _Thought(env, mission)
    try:
        for goal in mission.goals:
            thought.reach(goal)
    except _NoWay:
        return None
    targets: list[tuple[str, Cell]] = []
    for num_actions, target in thought.acted:
        targets += [target] * (num_actions - len(targets))
    return Plan(tuple(thought.actions), tuple(targets)) if thought.actions else None


class _Thought:
    """The grid, the agent and its hand as they would be after all planned actions; see `plan_subgoals`."""

    def __init__(self, env: object, mission: Mission) -> None:
        grid = env.grid  # pyright: ignore[reportAttributeAccessIssue] - a MiniGridEnv
        self._cells: dict[Cell, WorldObj | None] = {
            (x, y): grid.get(x, y) for x in range(grid.width) for y in range(grid.height)
        }
        self._cell: Cell = tuple(map(int, env.agent_pos))  # pyright: ignore[reportAttributeAccessIssue]
        self._facing = int(env.agent_dir)  # pyright: ignore[reportAttributeAccessIssue]
        self._hand: WorldObj | None = env.carrying  # pyright: ignore[reportAttributeAccessIssue]
        doors = [thing for thing in self._cells.values() if isinstance(thing, Door)]
        self._open = {id(door) for door in doors if door.is_open}
        self._locked = {id(door) for door in doors if door.is_locked}
        self._mission = mission
        self.actions: list[int] = []
        self.acted: list[tuple[int, tuple[str, Cell]]] = []
        """Each thing acted on or reached, and after how many actions."""

    def reach(self, goal: Goal, depth: int = 0) -> None:
        """Plans actions until `goal` is reached.

        Raises:
            _NoWay: no attempt reached it.
        """
        if depth > _DEPTH:  # obstacles within obstacles
            raise _NoWay
        # Each of these does one more thing for the goal, and returns whether that reaches it. If an obstacle was in the
        # way, they clear it instead, and start again from the changed grid.
        for _ in range(_TRIES):
            match goal:
                case Stand():
                    is_reached = self._go(lambda pose: pose[0] in goal.cells, depth)
                    self._note(self._cell)
                case Face():
                    is_reached = self._face(goal, depth)
                case Take():
                    is_reached = self._take(goal, depth)
                case Open():
                    is_reached = self._open_door(goal, depth)
                case PutBeside():
                    is_reached = self._put_beside(goal, depth)
            if is_reached:
                return
        raise _NoWay

    def _face(self, goal: Face, depth: int) -> bool:
        arrived = self._go_before(goal.things, depth)
        self._note(self._front)
        if arrived and goal.says_done:
            self._act(DONE)
        return arrived

    def _take(self, goal: Take, depth: int) -> bool:
        is_lying = bool(self._places(goal.things))
        if is_lying and not self._go_before(goal.things, depth):
            return False
        if self._hand is None and is_lying:
            self._act(PICK_UP)
            return True
        self._put_down()  # another thing, or the wanted one, which has to be picked up anew
        return False

    def _open_door(self, goal: Open, depth: int) -> bool:
        if not self._go_before(goal.things, depth):
            return False
        door = self._cells[self._front]
        assert door is not None, "what it went to"
        if id(door) in self._locked and not self._fits(door):
            self._fetch_key(door.color, depth)
            return False
        self._act(TOGGLE)
        return id(door) in self._open  # an open door is shut now, and opened the next time

    def _put_beside(self, goal: PutBeside, depth: int) -> bool:
        if not any(self._hand is thing for thing in goal.things):
            # a thing cannot be put beside itself
            apart = tuple(thing for thing in goal.things if any(other is not thing for other in goal.fixed))
            self.reach(Take(things=apart), depth + 1)
            return False
        cells = self._places(thing for thing in goal.fixed if thing is not self._hand)
        steps = [(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1) if goal.across_corners or 0 in (x, y)]
        beside = {(x + dx, y + dy) for x, y in cells for dx, dy in steps if (dx, dy) != (0, 0)}
        if not self._go(lambda pose: _ahead(pose) in beside and self._is_empty(_ahead(pose)), depth):
            return False
        self._act(DROP)
        return True

    def _go_before(self, things: tuple[WorldObj, ...], depth: int) -> bool:
        """Walks until one of `things` is ahead; returns whether it is."""
        cells = set(self._places(things))
        return bool(cells) and self._go(lambda pose: _ahead(pose) in cells, depth)

    def _go(self, is_end: Callable[[Pose], bool], depth: int) -> bool:
        """Walks to the nearest wanted pose and returns True, or clears the first obstacle on the way and returns False.

        Raises:
            _NoWay: no such pose can be reached.
        """
        for action, is_free in self._way(is_end):
            if is_free:
                self._act(action)
                continue
            # A locked door is opened, and anything else put aside, completely: the goal fetches again what was put down
            # for it.
            thing = self._cells[self._front]
            assert thing is not None, "it is in the way"
            if isinstance(thing, Door):
                self.reach(Open(things=(thing,)), depth + 1)
            else:
                self.reach(Take(things=(thing,)), depth + 1)
                self._put_down()
            return False
        return True

    def _fetch_key(self, colour: str, depth: int) -> None:
        """Ends with a key of `colour` in the hand, taken out of a box if need be."""
        lying = [thing for thing in self._cells.values() if thing is not None]
        keys = tuple(thing for thing in lying if (thing.type, thing.color) == ("key", colour))
        if not keys:
            filled = ((box, box.contains) for box in lying if isinstance(box, Box))
            boxes = tuple(box for box, inside in filled if inside and (inside.type, inside.color) == ("key", colour))
            if not boxes:
                raise _NoWay
            self.reach(Face(things=boxes), depth + 1)
            self._act(TOGGLE)  # the box is gone, and its key lies in its place
            keys = tuple(thing for thing in (self._cells[self._front],) if thing is not None)
        self.reach(Take(things=keys), depth + 1)

    def _put_down(self) -> None:
        """Puts down the carried thing at the nearest place where it blocks nothing.

        Raises:
            _NoWay: there is no such place, or nothing is carried.
        """
        if self._hand is None:
            raise _NoWay

        def will_do(pose: Pose) -> bool:
            place = _ahead(pose)
            return self._is_empty(place) and not self._would_block(place)

        try:
            way = self._way(will_do, clears=False)
        except _NoWay:  # then anywhere
            way = self._way(lambda pose: self._is_empty(_ahead(pose)), clears=False)
        for action, _ in way:
            self._act(action)
        self._act(DROP)

    def _would_block(self, place: Cell) -> bool:
        """Returns whether a thing at `place` would block a door, or separate the cells around it."""
        sides = [(place[0] + x, place[1] + y) for x, y in STEPS]
        if any(isinstance(self._cells.get(side), Door) for side in sides):
            return True
        ring = [(place[0] + x, place[1] + y) for x in (-1, 0, 1) for y in (-1, 0, 1) if (x, y) != (0, 0)]
        free = {cell for cell in ring if cell in self._cells and (self._is_empty(cell) or cell == self._cell)}
        # the free neighbours must be connected through the eight cells around it: a search among these is enough
        wanted = [side for side in sides if side in free]
        if not wanted:
            return False
        reached, queue = {wanted[0]}, [wanted[0]]
        while queue:
            x, y = queue.pop()
            near = {(x + dx, y + dy) for dx, dy in STEPS} & free - reached
            reached |= near
            queue += near
        return not set(wanted) <= reached

    def _way(self, is_end: Callable[[Pose], bool], clears: bool = True) -> list[tuple[int, bool]]:
        """Returns the cheapest walk to a wanted pose: actions, each with whether it can be taken without clearing
        anything.

        Args:
            is_end: whether a pose is a wanted one.
            clears: whether the walk may lead through obstacles that must be cleared first.

        Raises:
            _NoWay: there is no such walk.
        """
        start: Pose = (self._cell, self._facing)
        costs: dict[Pose, int] = {start: 0}
        came_from: dict[Pose, tuple[Pose, tuple[tuple[int, bool], ...]]] = {}
        queue = [(0, 0, start)]
        while queue:
            cost, _, pose = heapq.heappop(queue)  # ties go to the one found first, so that plans are repeatable
            if cost > costs[pose]:  # a cheaper way was found since
                continue
            if is_end(pose):
                legs = []
                while pose != start:
                    pose, actions = came_from[pose]
                    legs.append(actions)
                return [action for actions in reversed(legs) for action in actions]
            cell, facing = pose
            edges: dict[Pose, Entry | None] = {
                (cell, (facing - 1) % 4): (1, ((LEFT, True),)),
                (cell, (facing + 1) % 4): (1, ((RIGHT, True),)),
                (_ahead(pose), facing): self._entering(_ahead(pose), clears),
            }
            for after, entry in edges.items():
                if entry is None:
                    continue
                step_cost, actions = entry
                if cost + step_cost < costs.get(after, cost + step_cost + 1):
                    costs[after] = cost + step_cost
                    came_from[after] = pose, actions
                    heapq.heappush(queue, (cost + step_cost, len(costs), after))
        raise _NoWay

    def _entering(self, cell: Cell, clears: bool) -> Entry | None:
        """Returns the cost of entering a cell from beside it, and the actions; None if it cannot be entered."""
        if cell not in self._cells or cell in self._mission.never:
            return None
        thing = self._cells[cell]
        if thing is None or thing.type in ("floor", "goal") or id(thing) in self._open:
            return 1, ((FORWARD, True),)
        if isinstance(thing, Door):
            if self._mission.is_picky:  # any other door counts as a failure
                return None
            if id(thing) not in self._locked or self._fits(thing):
                return 2, ((TOGGLE, True), (FORWARD, True))
            return (2 + _COST_LOCKED, ((TOGGLE, False),)) if clears else None  # needs its key first
        if thing.can_pickup() and clears and not self._mission.is_picky:
            return 1 + _COST_BLOCKED, ((PICK_UP, False),)
        return None

    def _act(self, action: int) -> None:
        """Simulates an action."""
        self.actions.append(action)
        front = self._front
        if action in (PICK_UP, DROP, TOGGLE, DONE):
            self._note(front)
        if action in (LEFT, RIGHT):
            self._facing = (self._facing + (1 if action == RIGHT else -1)) % 4
        elif action == FORWARD:
            self._cell = front
        elif action == PICK_UP:
            self._hand, self._cells[front] = self._cells[front], None
        elif action == DROP:
            self._hand, self._cells[front] = None, self._hand
        elif action == TOGGLE:
            thing = self._cells[front]
            if isinstance(thing, Box):
                self._cells[front] = thing.contains
            else:  # a door is opened or shut; once unlocked it stays so
                self._locked.discard(id(thing))
                self._open ^= {id(thing)}

    def _note(self, cell: Cell) -> None:
        """Records what the actions so far have reached: the content of `cell`."""
        thing = self._cells[cell]
        name = "empty cell" if thing is None else thing.type
        self.acted.append((len(self.actions), (name, cell)))

    @property
    def _front(self) -> Cell:
        return _ahead((self._cell, self._facing))

    def _places(self, things: Iterable[WorldObj]) -> list[Cell]:
        wanted = {id(thing) for thing in things}
        return [cell for cell, thing in self._cells.items() if id(thing) in wanted]

    def _fits(self, door: WorldObj) -> bool:
        """Returns whether the key of a door is in the hand."""
        return self._hand is not None and self._hand.type == "key" and self._hand.color == door.color

    def _is_empty(self, cell: Cell) -> bool:
        return cell in self._cells and self._cells[cell] is None
