"""Every number among the settings of each kind of run has a bound, found by setting it, not by a list kept by hand."""

import math

import pytest

from rlvlm.core.errors import UsageError
from rlvlm.runs.recipes import recipe
from rlvlm.runs.settings import flat, override


@pytest.mark.parametrize("task", ["drawer_open", "number_line", "push_block"])
def test_no_setting_takes_a_nan_or_a_count_below_zero(task: str) -> None:
    config = recipe(task)
    numbers = {name: value for name, value in flat(config).items() if type(value) in (int, float)}
    assert len(numbers) > 90
    for name in numbers.keys() - {"judge.seed", "policy.seed"}:
        with pytest.raises(UsageError):
            override(config, {name: math.nan if isinstance(numbers[name], float) else -7})
            pytest.fail(f"{name} takes it")
