"""Goals of MiniGrid's and BabyAI's missions, read from the env itself. Used by `env`; `planner` plans for them.

BabyAI's missions are trees of instructions; MiniGrid's own envs keep their goals under various attribute names.
"""

from dataclasses import dataclass
from typing import Any

from minigrid.core.world_object import WorldObj

Cell = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stand:
    """Goal to stand on one of these cells."""

    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Face:
    """Goal to stand before one of these things and face it and, if asked for, to signal that it is done."""

    things: tuple[WorldObj, ...]
    says_done: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Take:
    """Goal to pick up one of these things."""

    things: tuple[WorldObj, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """Goal to open one of these doors; a door that is already open is shut first."""

    things: tuple[WorldObj, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PutBeside:
    """Goal to put down one of `things` beside one of `fixed`."""

    things: tuple[WorldObj, ...]
    fixed: tuple[WorldObj, ...]
    across_corners: bool = False
    """Whether a cell that only shares a corner counts."""


Goal = Stand | Face | Take | Open | PutBeside


@dataclass(frozen=True, kw_only=True, slots=True)
class Mission:
    """Remaining goals of a mission."""

    goals: tuple[Goal, ...]
    """Goals in the order in which they must be reached."""
    never: tuple[Cell, ...] = ()
    """Cells that end the episode as a failure."""
    is_picky: bool = False
    """Whether picking up anything else, or opening another door, fails."""


def read_mission(env: Any) -> Mission | None:
    """Returns the mission of an env of MiniGrid's package; None if its missions are not known here."""
    if hasattr(env, "instrs"):  # BabyAI's
        strict: list[bool] = []
        goals = _instructed(env.instrs, strict)
        return Mission(goals=tuple(goals), is_picky=any(strict))
    # MiniGrid's own are told apart by their attributes, the more specific first: a mission to put a thing somewhere has
    # a `target_pos` too, and a goal square or a door may be there for another mission.
    grid = env.grid
    cells = [(x, y) for x in range(grid.width) for y in range(grid.height)]
    squares = tuple(cell for cell in cells if (thing := grid.get(*cell)) is not None and thing.type == "goal")
    if hasattr(env, "obstacles"):
        return Mission(goals=(Stand(cells=squares),), is_picky=True)
    if hasattr(env, "success_pos"):
        return Mission(goals=(Stand(cells=(tuple(env.success_pos),)),), never=(tuple(env.failure_pos),))
    if hasattr(env, "red_door"):
        doors = [door for door in (env.red_door, env.blue_door) if not door.is_open]
        return Mission(goals=tuple(Open(things=(door,)) for door in doors))
    if hasattr(env, "targetColor"):
        return Mission(goals=(Take(things=_things(env, env.targetType, env.targetColor)),), is_picky=True)
    if hasattr(env, "target_pos"):
        target = grid.get(*env.target_pos)
        targets = () if target is None else (target,)
        if not hasattr(env, "move_type"):
            return Mission(goals=(Face(things=targets, says_done=True),), is_picky=True)
        moved = _things(env, env.move_type, env.moveColor)
        return Mission(goals=(PutBeside(things=moved, fixed=targets, across_corners=True),), is_picky=True)
    if hasattr(env, "obj"):
        return Mission(goals=(Take(things=(env.obj,)),))
    if hasattr(env, "door"):
        return Mission(goals=(Open(things=(env.door,)),))
    return Mission(goals=(Stand(cells=squares),)) if squares else None


def _things(env: Any, kind: str, colour: str) -> tuple[WorldObj, ...]:
    """Returns things of that kind and colour in the grid, or carried."""
    found = [*env.grid.grid, env.carrying]
    return tuple(thing for thing in found if thing is not None and (thing.type, thing.color) == (kind, colour))


def _instructed(instr: Any, strict: list[bool]) -> list[Goal]:
    """Returns the goals in a tree of BabyAI instructions that are not reached yet."""
    strict.append(bool(getattr(instr, "strict", False)) and not hasattr(instr, "instr_a"))
    match type(instr).__name__:
        case "BeforeInstr" | "AndInstr":
            parts = ("a", "b")
        case "AfterInstr":
            parts = ("b", "a")
        case "GoToInstr":
            return [Face(things=tuple(instr.desc.obj_set))]
        case "PickupInstr":
            return [Take(things=tuple(instr.desc.obj_set))]
        case "OpenInstr":
            return [Open(things=tuple(instr.desc.obj_set))]
        case "PutNextInstr":
            return [PutBeside(things=tuple(instr.desc_move.obj_set), fixed=tuple(instr.desc_fixed.obj_set))]
        case other:
            raise AssertionError(f"BabyAI has no other instructions, got {other}")
    left = [part for part in parts if getattr(instr, f"{part}_done") != "success"]
    return [goal for part in left for goal in _instructed(getattr(instr, f"instr_{part}"), strict)]
