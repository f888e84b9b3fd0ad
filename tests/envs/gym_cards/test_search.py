"""The search for 24 that the expert of points24 tells of."""

import re
from fractions import Fraction
from functools import cache
from itertools import product

import pytest

from rlvlm.envs.gym_cards import search as module
from rlvlm.envs.gym_cards.arithmetic import completion, value

HANDS = list(product(range(1, 11), repeat=4))[::42]
search = cache(module.search)  # several tests look at the same hands


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
    assert found.steps == ("A 4-2=2 4 10, 2: 14 6 40, 4: 12 8 20, 10*2=20, 20+4=24",)
    assert found.draft == ("10", "*", "2", "+", "4")
    assert found.formula == ("10", "*", "(", "4", "-", "2", ")", "+", "4")


def test_fractions_are_left_for_a_second_round_and_written_as_such() -> None:
    found = search((8, 3, 8, 3))
    assert found.steps[-1] == "I 8/3=8/3 8 3, 8/3: 11 5 24, 8: 17/3 1/3, 3-(8/3)=1/3, 8/(1/3)=24"
    assert not any("/3=8/3" in step for step in found.steps[:-1])
    assert found.draft == ("8", "/", "(", "3", "-", "(8/3)", ")")
    assert found.formula == ("8", "/", "(", "3", "-", "8", "/", "3", ")")


def test_a_draft_becomes_the_formula_when_its_joint_is_written_out() -> None:
    drafted = 0
    for hand in HANDS:
        found = search(hand)
        if found.draft is not None:
            assert value(found.formula) == 24
            number = re.match(r"[A-Za-z] \d+[-+*/]\d+=(\S+)", found.steps[-1]).group(1)
            assert (number if number.isdigit() else f"({number})") in found.draft
            drafted += 1
    assert drafted > 150


def test_every_equation_that_is_told_is_true() -> None:
    for hand in HANDS:
        for step in search(hand).steps:
            left, operator, right, made = re.match(r"[A-Za-z] (\d+)([-+*/])(\d+)=(\S+)", step).groups()
            assert value((left, operator, right)) == Fraction(made), step


def test_a_letter_names_the_places_and_the_operator() -> None:
    for hand in HANDS[::5]:
        for step in search(hand).steps:
            if step[0] == "A":
                assert step.startswith(f"A {max(hand[2:])}-{min(hand[2:])}=")
            if step[0] == "K":
                assert step.startswith(f"K {max(hand[:2])}+{min(hand[:2])}=")


def test_a_hopeless_search_stays_short() -> None:
    told = [search(hand) for hand in HANDS]
    assert max(len(one.steps) for one in told) <= 12
    assert all(len(one.steps) <= 11 for one in told if one.formula is None)
