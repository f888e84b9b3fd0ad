"""Bounds and needs of the settings of each kind of run, found by setting them, not by a list kept by hand."""

import math
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import pytest

from rlvlm.core.checks import Bound, Needs
from rlvlm.core.errors import UsageError
from rlvlm.core.leads import marks
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import flat, override

Rule = TypeVar("Rule", Bound, Needs)
TASKS = ("drawer_open", "number_line", "push_block", "libero_goal/8", "pick_place_can")


@pytest.mark.parametrize("task", ["drawer_open", "number_line", "push_block"])
def test_no_setting_takes_a_nan_or_a_count_below_zero(task):
    config = recipe(task)
    numbers = {name: value for name, value in flat(config).items() if type(value) in (int, float)}
    assert len(numbers) > 90
    for name in numbers.keys() - {"judge.seed", "policy.seed"}:
        with pytest.raises(UsageError):
            override(config, {name: math.nan if isinstance(numbers[name], float) else -7})
            pytest.fail(f"{name} takes it")


def ruled(config: Any, kind: type[Rule]) -> Iterator[tuple[Any, str, Rule]]:
    """Each setting of a config tree with a rule of a kind: its section, its name and the rule."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for name in (each.name for each in fields(config)):
        if is_dataclass(part := getattr(config, name)):
            yield from ruled(part, kind)
        yield from ((config, name, rule) for rule in marks(hints[name], kind))


@pytest.mark.parametrize("task", TASKS)
def test_a_number_out_of_its_bound_is_refused(task):
    found = list(ruled(recipe(task), Bound))
    for section, name, bound in found:
        for wrong in (-7, 0, 7, 1e6, math.nan):
            if not bound.allows(wrong):
                value = (wrong, 1) if isinstance(getattr(section, name), tuple) else wrong
                with pytest.raises(ValueError, match=rf"{name} must be .* got"):
                    replace(section, **{name: value})
    assert len(found) > 60


def test_a_setting_without_what_it_needs_is_refused():
    sections = {(type(section), name): need for task in TASKS for section, name, need in ruled(recipe(task), Needs)}
    for (section, name), need in sections.items():
        value = getattr(section(), name)
        # a section of another class is not the default one either
        others = {bool: not value, int: 9, float: 0.1, str: "bfloat16"}
        other = others[type(value)] if type(value) in others else type("Other", (type(value),), {})()
        with pytest.raises(ValueError, match=rf"{name} has no effect without .*{need.name} {need.values}".rstrip()):
            section(**{name: other})
    assert len(sections) > 15


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        (">= 1", (1, 1.5, math.inf), (0.9, math.nan, -math.inf)),
        ("> 0", (1e-9, math.inf), (0, -1, math.nan)),
        ("(0, 1]", (0.1, 1), (0, 1.1, math.nan)),
        ("[0, inf)", (0, 1e300), (-1, math.inf)),
        ("0 or >= 100", (0, 100), (1, 99, -1, math.nan)),
    ],
)
def test_a_bound_is_read_as_it_is_written(rule, inside, outside):
    assert [Bound(rule).allows(number) for number in inside + outside] == [True] * len(inside) + [False] * len(outside)
