"""Bounds and needs of settings, written beside their types, and the check of them for `__post_init__` of configs.

An error names the setting, the rule and the given value. `section` is where a user finds the settings: `judge.api` for
`judge.api.retries`, `--` for a command's options, and empty for settings outside of sections.
"""

import functools
import typing
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any

from rlvlm.core.errors import UsageError
from rlvlm.core.leads import Mark, marks


@dataclass(frozen=True, slots=True)
class Bound:
    """Rule for a number, or for each of a tuple; texts and None pass, where the type allows them."""

    rule: str
    """`>= 1`, `> 0`, an interval as in mathematics, of which `(0, 1]` includes 1 but not 0, or several of these, as
    `0 or >= 100`."""

    def allows(self, number: float) -> bool:
        """Returns whether one of the rules holds; none of them holds for NaN."""
        for rule in self.rule.split(" or "):
            if rule[0] in "([":
                low, high = map(float, rule[1:-1].split(","))
            else:
                low, high = float(rule.split()[-1]), float("inf") if rule[0] == ">" else float(rule)
            is_above = number > low if rule.startswith(("(", "> ")) else number >= low
            if is_above and (number < high if rule.endswith(")") else number <= high):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Needs:
    """Rule for a setting without an effect, unless another of its section is set: until then it keeps its default."""

    name: str
    values: str = ""
    """Value of the other setting, or several, as `advantage or condition`; empty: any that counts as true."""


PositiveInt = Annotated[int, Bound(">= 1")]
NonNegativeInt = Annotated[int, Bound(">= 0")]
PositiveFloat = Annotated[float, Bound("> 0")]
NonNegativeFloat = Annotated[float, Bound(">= 0")]
Share = Annotated[float, Bound("[0, 1]")]


def check_bounds(config: object, section: str) -> None:
    """Raises ValueError unless every number of a config, without its sections, keeps the bounds of its type, and every
    setting has what it needs.
    """
    for field, bound in _rules(type(config), Bound):
        value = getattr(config, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not isinstance(number, str) and not bound.allows(number):
                raise _out_of_bound(section, field.name, bound, value)
    for field, need in _rules(type(config), Needs):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        other = getattr(config, need.name)
        is_met = other in need.values.split(" or ") if need.values else other
        if not is_met and getattr(config, field.name) != default:
            wanted = f"{section}.{need.name} {need.values}".rstrip()
            raise ValueError(f"{section}.{field.name} has no effect without {wanted}; set both or neither")


def check_interval(config: object, section: str, interval: str, *names: str) -> None:
    """Raises ValueError unless every named attribute keeps the rule of a `Bound`, where it stands in no type."""
    for name in names:
        if not Bound(interval).allows(value := getattr(config, name)):
            raise _out_of_bound(section, name, Bound(interval), value)


@functools.cache
def _rules(config: type, kind: type[Mark]) -> list[tuple[Field[Any], Mark]]:
    """Returns the rules of a kind in the types of a config class, each with its field."""
    hints = typing.get_type_hints(config, include_extras=True)
    return [(field, rule) for field in fields(config) for rule in marks(hints[field.name], kind)]


def _out_of_bound(section: str, name: str, bound: Bound, value: object) -> ValueError:
    """Returns the error, with the user's name of the setting: `judge.api.retries`, or `--ask-swapped`."""
    place = f"--{name.replace('_', '-')}" if section == "--" else f"{section}.{name}" if section else name
    return ValueError(f"{place} must be {'in ' * bound.rule.startswith(('(', '['))}{bound.rule}, got {value}")


def check_asserts() -> None:
    """Raises UsageError if Python leaves out `assert`, of which contract checks consist: they would pass anything."""
    if not __debug__:
        raise UsageError(
            "this Python leaves out the assert statements of which the contract check consists (-O, PYTHONOPTIMIZE)",
            "start it without -O, and unset PYTHONOPTIMIZE",
        )
