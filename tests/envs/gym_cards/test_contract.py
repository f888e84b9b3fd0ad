"""Every game keeps the contract of envs in turns, under its own rules and under the reference's."""

from dataclasses import replace

import pytest

from rlvlm.envs.registry import find_task, make_env
from rlvlm.testing import check_turn_env


@pytest.mark.parametrize(
    "name",
    ["number_line", "blackjack", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ez_points", "points24"))],
)
@pytest.mark.parametrize("rules", ["strict", "legacy"])
def test_a_game_keeps_the_contract(name, rules):
    task = find_task(name)
    assert task.kind == "turns"
    check_turn_env(*(make_env(name, replace(task.env, rules=rules), 0) for _ in range(2)))
