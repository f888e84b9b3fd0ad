"""The search for 24 that the expert of points24 tells of."""

import re
from fractions import Fraction
from itertools import product

import pytest

from rlvlm.envs.gym_cards.arithmetic import applied, completion, value
from rlvlm.envs.gym_cards.search import search

HANDS = list(product(range(1, 11), repeat=4))[::7]


@pytest.mark.slow
def test_it_finds_a_formula_for_every_hand_that_has_one() -> None:
    for hand in HANDS:
        formula = search(hand).formula
        assert (formula is not None) == (completion((), tuple(sorted(hand)), 24, "+-*/(") is not None), hand
        if formula is not None:
            assert value(formula) == 24
            assert sorted(map(int, filter(str.isdigit, formula))) == sorted(hand)


def test_a_search_reads_as_it_was_done() -> None:
    found = search((4, 10, 4, 2))
    assert found.steps == (
        "10-4=6 4 2, 6: 6 2 8 2, 4: 8 4 12 3, 2: 10 2 24",
        "10+4=14 4 2, 14: 6 2 8 2, 4: 16 12 28, 14*2=28, 28-4=24",
    )
    assert found.formula == ("(", "10", "+", "4", ")", "*", "2", "-", "4")


def test_fractions_are_written_as_such() -> None:
    assert search((8, 3, 8, 3)).formula == ("8", "/", "(", "3", "-", "8", "/", "3", ")")
    assert "8/3=8/3 8 3, 8/3: 11 5 24, 8: 17/3 1/3, 3-(8/3)=1/3, 8/(1/3)=24" in search((8, 3, 8, 3)).steps


def test_every_equation_that_is_told_is_true() -> None:
    for hand in HANDS:
        for step in search(hand).steps:
            left, operator, right, made = re.match(r"(\d+)([-+*/])(\d+)=(\S+)", step).groups()
            assert applied(Fraction(left), operator, Fraction(right)) == Fraction(made), step


def test_a_hopeless_search_stays_short() -> None:
    told = [search(hand) for hand in HANDS]
    assert max(len(one.steps) for one in told) == 9
    assert any(one.formula is None and len(one.steps) == 8 for one in told)
