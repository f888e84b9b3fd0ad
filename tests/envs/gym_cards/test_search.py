"""The search for 24 that the expert of points24 tells of."""

import re
from fractions import Fraction
from itertools import product

import pytest

from rlvlm.envs.gym_cards.arithmetic import completion, value
from rlvlm.envs.gym_cards.search import search

STEP = re.compile(r"([A-Za-z]) (\d+)([-+*/])(\d+)=(\S+)")


def test_a_search_reads_as_it_was_done():
    found = search((4, 10, 4, 2))
    assert found.steps == ("A 4-2=2 4 10, 2: 14 6 40, 4: 12 8 20, 10*2=20, 20+4=24",)
    assert found.draft == ("10", "*", "2", "+", "4")
    assert found.formula == ("10", "*", "(", "4", "-", "2", ")", "+", "4")


def test_fractions_are_left_for_a_second_round_and_written_as_such():
    found = search((8, 3, 8, 3))
    assert found.steps[-1] == "I 8/3=8/3 8 3, 8/3: 11 5 24, 8: 17/3 1/3, 3-(8/3)=1/3, 8/(1/3)=24"
    assert not any("/3=8/3" in step for step in found.steps[:-1])
    assert found.draft == ("8", "/", "(", "3", "-", "(8/3)", ")")
    assert found.formula == ("8", "/", "(", "3", "-", "8", "/", "3", ")")


@pytest.mark.slow
def test_whatever_the_hand_a_search_is_short_true_and_ends_in_a_formula_where_there_is_one():
    drafted = 0
    for hand in list(product(range(1, 11), repeat=4))[::42]:
        found = search(hand)
        assert (found.formula is not None) == (completion((), tuple(sorted(hand)), 24, "+-*/(") is not None), hand
        assert len(found.steps) <= (12 if found.formula else 11)
        if found.formula is not None:
            assert value(found.formula) == 24
            assert sorted(map(int, filter(str.isdigit, found.formula))) == sorted(hand)
        for step in found.steps:
            letter, left, operator, right, made = STEP.match(step).groups()
            assert value((left, operator, right)) == Fraction(made), step
            if letter in "AK":  # a letter names the places and the operator
                pair = hand[2:] if letter == "A" else hand[:2]
                assert (operator, int(left), int(right)) == ("-" if letter == "A" else "+", max(pair), min(pair))
        if found.draft is not None:  # it becomes the formula when its last joint is written out
            assert (made if made.isdigit() else f"({made})") in found.draft
            drafted += 1
    assert drafted > 150
