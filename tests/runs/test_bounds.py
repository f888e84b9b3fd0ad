"""Every number among the settings of each kind of run has a bound, found by setting it, not by a list kept by hand."""

import math
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from rlvlm.core.checks import Bound
from rlvlm.core.errors import UsageError
from rlvlm.core.leads import marks
from rlvlm.runs.recipes import recipe
from rlvlm.runs.settings import flat, override


@pytest.mark.parametrize("task", ["drawer_open", "number_line", "push_block"])
def test_no_setting_takes_a_nan_or_a_count_below_zero(task):
    config = recipe(task)
    numbers = {name: value for name, value in flat(config).items() if type(value) in (int, float)}
    assert len(numbers) > 90
    for name in numbers.keys() - {"judge.seed", "policy.seed"}:
        with pytest.raises(UsageError):
            override(config, {name: math.nan if isinstance(numbers[name], float) else -7})
            pytest.fail(f"{name} takes it")


def bounds(config: Any) -> Iterator[tuple[Any, str, Bound]]:
    """Each bounded setting of a config tree: its section, its name and the bound."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for name in (each.name for each in fields(config)):
        if is_dataclass(part := getattr(config, name)):
            yield from bounds(part)
        yield from ((config, name, bound) for bound in marks(hints[name], Bound))


@pytest.mark.parametrize("task", ["drawer_open", "number_line", "push_block", "libero_goal/8", "pick_place_can"])
def test_a_number_out_of_its_bound_is_refused(task):
    found = list(bounds(recipe(task)))
    for section, name, bound in found:
        for wrong in (-7, 0, 7, 1e6, math.nan):
            if not bound.allows(wrong):
                value = (wrong, 1) if isinstance(getattr(section, name), tuple) else wrong
                with pytest.raises(ValueError, match=rf"{name} must be .* got"):
                    replace(section, **{name: value})
    assert len(found) > 60


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
