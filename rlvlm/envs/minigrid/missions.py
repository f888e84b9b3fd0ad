"""What the missions of MiniGrid and BabyAI ask for, read from the env itself. Used by `env`; `planner` plans for it.

BabyAI's missions are trees of instructions; MiniGrid's own envs each keep what they want under names of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minigrid.core.world_object import WorldObj

Cell = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stand:
    """To stand on one of these cells."""

    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Face:
    """To stand before one of these things and look at it, and then to say that it is done, where that is asked for."""

    things: tuple[WorldObj, ...]
    says_done: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Take:
    """To pick up one of these things."""

    things: tuple[WorldObj, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """To open one of these doors: one that is open already is shut first."""

    things: tuple[WorldObj, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PutBeside:
    """To put down one of `things` beside one of `fixed`."""

    things: tuple[WorldObj, ...]
    fixed: tuple[WorldObj, ...]
    across_corners: bool = False
    """Whether a cell that shares a corner alone will do."""


Goal = Stand | Face | Take | Open | PutBeside


@dataclass(frozen=True, kw_only=True, slots=True)
class Mission:
    """What is left to do."""

    goals: tuple[Goal, ...]
    """In the order in which they are to be reached."""
    never: tuple[Cell, ...] = ()
    """Cells that end the episode as a failure."""
    is_picky: bool = False
    """Whether to pick up anything else, or to open another door, fails."""
    is_still: bool = True
    """Whether nothing moves by itself."""


def read_mission(env: Any) -> Mission | None:
    """What is left to do in an env of MiniGrid's package; None where nobody has written down how it says so."""
    if hasattr(env, "instrs"):
        strict: list[bool] = []
        goals = _instructed(env.instrs, strict)
        return Mission(goals=tuple(goals), is_picky=any(strict))
    return next((read(env) for holds, read in _READERS if holds(env)), None)


def _instructed(instr: Any, strict: list[bool]) -> list[Goal]:
    """The goals of a tree of BabyAI's instructions that are not reached yet."""
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


def _things(env: Any, matches: Callable[[WorldObj], bool]) -> tuple[WorldObj, ...]:
    """What lies in the grid, or is carried, and matches."""
    found = [*env.grid.grid, env.carrying]
    return tuple(thing for thing in found if thing is not None and matches(thing))


def _squares(env: Any) -> tuple[Cell, ...]:
    grid = env.grid
    cells = [(x, y) for x in range(grid.width) for y in range(grid.height)]
    return tuple(cell for cell in cells if (thing := grid.get(*cell)) is not None and thing.type == "goal")


def _of(kind: str, colour: str) -> Callable[[WorldObj], bool]:
    return lambda thing: (thing.type, thing.color) == (kind, colour)


def _at(env: Any, cell: Any) -> tuple[WorldObj, ...]:
    thing = env.grid.get(*cell)
    return () if thing is None else (thing,)


# by what an env has, the more special first: whether it is of this kind, and what it wants
_READERS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Mission]], ...] = (
    (
        lambda env: hasattr(env, "obstacles"),
        lambda env: Mission(goals=(Stand(cells=_squares(env)),), is_picky=True, is_still=False),
    ),
    (
        lambda env: hasattr(env, "success_pos"),
        lambda env: Mission(goals=(Stand(cells=(tuple(env.success_pos),)),), never=(tuple(env.failure_pos),)),
    ),
    (
        lambda env: hasattr(env, "red_door"),
        lambda env: Mission(
            goals=tuple(Open(things=(door,)) for door in (env.red_door, env.blue_door) if not door.is_open)
        ),
    ),
    (
        lambda env: hasattr(env, "targetColor"),
        lambda env: Mission(goals=(Take(things=_things(env, _of(env.targetType, env.targetColor))),), is_picky=True),
    ),
    (
        lambda env: hasattr(env, "move_type"),
        lambda env: Mission(
            goals=(
                PutBeside(
                    things=_things(env, _of(env.move_type, env.moveColor)),
                    fixed=_at(env, env.target_pos),
                    across_corners=True,
                ),
            ),
            is_picky=True,
        ),
    ),
    (
        lambda env: hasattr(env, "target_pos"),
        lambda env: Mission(goals=(Face(things=_at(env, env.target_pos), says_done=True),), is_picky=True),
    ),
    (lambda env: hasattr(env, "obj"), lambda env: Mission(goals=(Take(things=(env.obj,)),))),
    (lambda env: hasattr(env, "door"), lambda env: Mission(goals=(Open(things=(env.door,)),))),
    (lambda env: bool(_squares(env)), lambda env: Mission(goals=(Stand(cells=_squares(env)),))),
)
