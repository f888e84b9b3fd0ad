"""Plans for missions of several steps: go to, pick up, put down, open, put beside. Used by `env`.

Each goal is reached by a shortest walk over cells and directions, found by Dijkstra's search. Where something stands in
the way, that is a goal of its own, and is reached first: a locked door wants its key (which may lie in a box), and a
thing that blocks the way is put aside. The whole is not always the shortest way there is; each leg of it is.
"""

import heapq
from collections.abc import Callable, Iterable

from minigrid.core.world_object import Box, Door, WorldObj

from rlvlm.envs.minigrid.missions import Cell, Face, Goal, Mission, Open, PutBeside, Stand, Take
from rlvlm.envs.minigrid.planner import DONE, DROP, FORWARD, LEFT, PICK_UP, RIGHT, STEPS, TOGGLE, Plan

_BLOCKED, _LOCKED = 20, 40
"""Steps that it is thought to take to put a thing aside, and to fetch a key."""
_TRIES, _DEPTH = 30, 12
"""Things done for one goal, and goals within goals, after which there is no way."""

Pose = tuple[Cell, int]
"""Where the agent stands, and which way it faces."""
Entry = tuple[int, tuple[tuple[int, bool], ...]]
"""Cost of a step to another pose; its actions, each with whether nothing has to be cleared for it."""


class NoWay(Exception):
    """Nothing leads to the goal."""


class SubgoalPlanner:
    """Plays a mission in thought, from the env's present state.

    Args:
        env: of MiniGrid; nothing of it is changed.
        mission: what is left to do in it.
    """

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
        self._actions: list[int] = []
        self._acted: list[tuple[int, tuple[str, Cell]]] = []
        """After how many actions something was acted on or reached, and what."""

    def plan(self) -> Plan | None:
        """Actions that fulfil the mission; None where no way is known."""
        try:
            for goal in self._mission.goals:
                self._reach(goal)
        except NoWay:
            return None
        targets: list[tuple[str, Cell]] = []
        for num_actions, target in self._acted:
            targets += [target] * (num_actions - len(targets))
        return Plan(tuple(self._actions), tuple(targets)) if self._actions else None

    def _reach(self, goal: Goal, depth: int = 0) -> None:
        """Plays until `goal` is reached.

        Raises:
            NoWay: it is not, whatever was tried.
        """
        if depth > _DEPTH:
            raise NoWay
        for _ in range(_TRIES):
            if self._come_nearer(goal, depth):
                return
        raise NoWay

    def _come_nearer(self, goal: Goal, depth: int) -> bool:
        """Does one thing more for `goal`; whether it is reached by that."""
        match goal:
            case Stand():
                arrived = self._go(lambda pose: pose[0] in goal.cells, depth)
                self._note(self._name(self._cell), self._cell)
                return arrived
            case Face():
                return self._face(goal, depth)
            case Take():
                return self._take(goal, depth)
            case Open():
                return self._open_one(goal, depth)
            case PutBeside():
                return self._put_beside(goal, depth)

    def _face(self, goal: Face, depth: int) -> bool:
        arrived = self._go_before(goal.things, depth)
        self._note(self._name(self._front), self._front)
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
        self._put_down()  # another thing; or the one that is wanted, which has to be picked up anew
        return False

    def _open_one(self, goal: Open, depth: int) -> bool:
        if not self._go_before(goal.things, depth):
            return False
        door = self._cells[self._front]
        assert door is not None, "what it went to"
        if id(door) in self._locked and not self._fits(door):
            self._fetch_key(door.color, depth)
            return False
        self._act(TOGGLE)
        return id(door) in self._open

    def _put_beside(self, goal: PutBeside, depth: int) -> bool:
        if not any(self._hand is thing for thing in goal.things):
            apart = tuple(one for one in goal.things if any(other is not one for other in goal.fixed))
            self._reach(Take(things=apart), depth + 1)
            return False
        places = self._places(one for one in goal.fixed if one is not self._hand)
        beside = _around(places, goal.across_corners)
        if not self._go(lambda pose: _ahead(pose) in beside and self._is_empty(_ahead(pose)), depth):
            return False
        self._act(DROP)
        return True

    def _go_before(self, things: tuple[WorldObj, ...], depth: int) -> bool:
        """Walks until one of `things` is ahead; whether it is."""
        places = set(self._places(things))
        return bool(places) and self._go(lambda pose: _ahead(pose) in places, depth)

    def _go(self, is_end: Callable[[Pose], bool], depth: int) -> bool:
        """Walks to the nearest pose that is wanted, as far as nothing is in the way; else clears that.

        Raises:
            NoWay: there is no such pose.
        """
        for action, is_free in self._way(is_end):
            if not is_free:
                self._clear(depth)
                return False
            self._act(action)
        return True

    def _clear(self, depth: int) -> None:
        """Unlocks the door that is ahead, or puts the thing aside, all the way: what was in the hand is fetched anew by
        whoever wants it there.
        """
        thing = self._cells[self._front]
        assert thing is not None, "it is in the way"
        if isinstance(thing, Door):
            self._reach(Open(things=(thing,)), depth + 1)
        else:
            self._reach(Take(things=(thing,)), depth + 1)
            self._put_down()

    def _fetch_key(self, colour: str, depth: int) -> None:
        """Has a key of `colour` in the hand in the end, out of a box if need be."""

        def is_it(thing: WorldObj | None) -> bool:
            return thing is not None and thing.type == "key" and thing.color == colour

        lying = [thing for thing in self._cells.values() if thing is not None]
        keys = tuple(thing for thing in lying if is_it(thing))
        boxes = tuple(thing for thing in lying if isinstance(thing, Box) and is_it(thing.contains))
        if not keys and not boxes:
            raise NoWay
        if not keys:
            self._reach(Face(things=boxes), depth + 1)
            self._act(TOGGLE)
            keys = tuple(thing for thing in (self._cells[self._front],) if thing is not None)
        self._reach(Take(things=keys), depth + 1)

    def _put_down(self) -> None:
        """Puts down what is in the hand, at the nearest place where it is in nobody's way.

        Raises:
            NoWay: there is none, or nothing is in the hand.
        """
        if self._hand is None:
            raise NoWay

        def will_do(pose: Pose) -> bool:
            place = _ahead(pose)
            return self._is_empty(place) and not self._would_block(place)

        try:
            way = self._way(will_do, clears=False)
        except NoWay:  # then anywhere
            way = self._way(lambda pose: self._is_empty(_ahead(pose)), clears=False)
        for action, _ in way:
            self._act(action)
        self._act(DROP)

    def _would_block(self, place: Cell) -> bool:
        """Whether a thing at `place` stands before a door, or parts cells around it from each other."""
        sides = [(place[0] + x, place[1] + y) for x, y in STEPS]
        if any(isinstance(self._cells.get(side), Door) for side in sides):
            return True
        ring = [(place[0] + x, place[1] + y) for x in (-1, 0, 1) for y in (-1, 0, 1) if (x, y) != (0, 0)]
        free = {cell for cell in ring if cell in self._cells and (self._is_empty(cell) or cell == self._cell)}
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
        """The cheapest walk to a pose that is wanted: actions, each with whether nothing has to be cleared for it.

        Args:
            is_end: whether a pose is wanted.
            clears: whether the walk may lead through what has to be cleared first.

        Raises:
            NoWay: there is none.
        """
        start: Pose = (self._cell, self._facing)
        costs: dict[Pose, int] = {start: 0}
        came_from: dict[Pose, tuple[Pose, tuple[tuple[int, bool], ...]]] = {}
        queue = [(0, 0, start)]
        while queue:
            cost, _, pose = heapq.heappop(queue)
            if cost > costs[pose]:
                continue
            if is_end(pose):
                return _retraced(came_from, start, pose)
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
        raise NoWay

    def _entering(self, cell: Cell, clears: bool) -> Entry | None:
        """What it costs to enter a cell from beside it, and by which actions; None where nobody can."""
        if cell not in self._cells or cell in self._mission.never:
            return None
        thing = self._cells[cell]
        if thing is None or thing.type in ("floor", "goal") or id(thing) in self._open:
            return 1, ((FORWARD, True),)
        if isinstance(thing, Door):
            if self._mission.is_picky:
                return None
            if id(thing) not in self._locked or self._fits(thing):
                return 2, ((TOGGLE, True), (FORWARD, True))
            return (2 + _LOCKED, ((TOGGLE, False),)) if clears else None
        if thing.can_pickup() and clears and not self._mission.is_picky:
            return 1 + _BLOCKED, ((PICK_UP, False),)
        return None

    def _act(self, action: int) -> None:
        """Carries out an action in thought."""
        self._actions.append(action)
        front = self._front
        if action in (PICK_UP, DROP, TOGGLE, DONE):
            self._note(self._name(front), front)
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
            else:
                self._locked.discard(id(thing))
                self._open ^= {id(thing)}

    def _note(self, name: str, cell: Cell) -> None:
        self._acted.append((len(self._actions), (name, cell)))

    def _name(self, cell: Cell) -> str:
        thing = self._cells[cell]
        return "empty cell" if thing is None else thing.type

    @property
    def _front(self) -> Cell:
        return _ahead((self._cell, self._facing))

    def _places(self, things: Iterable[WorldObj]) -> list[Cell]:
        wanted = {id(thing) for thing in things}
        return [cell for cell, thing in self._cells.items() if id(thing) in wanted]

    def _fits(self, door: WorldObj) -> bool:
        """Whether the key of a door is in the hand."""
        return self._hand is not None and self._hand.type == "key" and self._hand.color == door.color

    def _is_empty(self, cell: Cell) -> bool:
        return cell in self._cells and self._cells[cell] is None


def _ahead(pose: Pose) -> Cell:
    (x, y), facing = pose
    return x + STEPS[facing][0], y + STEPS[facing][1]


def _around(places: Iterable[Cell], across_corners: bool) -> set[Cell]:
    """Cells beside `places`."""
    steps = [(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1) if across_corners or 0 in (x, y)]
    return {(x + dx, y + dy) for x, y in places for dx, dy in steps if (dx, dy) != (0, 0)}


def _retraced(
    came_from: dict[Pose, tuple[Pose, tuple[tuple[int, bool], ...]]], start: Pose, end: Pose
) -> list[tuple[int, bool]]:
    legs = []
    while end != start:
        end, actions = came_from[end]
        legs.append(actions)
    return [action for actions in reversed(legs) for action in actions]
