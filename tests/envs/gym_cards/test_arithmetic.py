import itertools
import random
from fractions import Fraction

import pytest

from rlvlm.envs.gym_cards.arithmetic import completion, legacy_value, reachable, value

ALL = "+-*/("


def test_formulas_worked_by_hand():
    assert value("8 / ( 3 - 8 / 3 )".split()) == 24, "exact, where floating point gives 23.999999999999989"
    assert value("7 - 2 * 3 - 1".split()) == 0
    assert value("2 / 4 / 2".split()) == Fraction(1, 4)
    assert completion(("3", "+"), (9,), 12, "+*") == ("9",)
    assert completion(("8", "/", "(", "3"), (3, 8), 24, ALL) == ("-", "8", "/", "3", ")")


@pytest.mark.parametrize(
    "formula", ["", "2 4", "2 * * 3", "7 / / 2", "3 +", "( 3", "3 )", "( )", "3 ( 4 )", "- 3", "1 / ( 2 - 2 )", "3 = 3"]
)
def test_a_malformed_formula_has_no_value(formula):
    assert value(formula.split()) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24", 24), ("2**3*3", 24), ("49//2", 24), ("8/(3-8/3)", 23.999999999999989), ("-3+27", 24), ("(3)(4)", None)]
    + [("10**10**10", None), ("1/0", None), ("9**9**9**9", None), ("3 4", None), ("", None), ("(" * 500, None)],
)
def test_the_legacy_reading_is_that_of_python_but_ends(text, expected):
    assert legacy_value(text) == expected


def brute(numbers: tuple[int, ...], target: int) -> bool:
    """Whether any way to join numbers two by two ends at the target: independent of the search under test."""

    def joins(left: list[Fraction]) -> bool:
        if len(left) == 1:
            return left[0] == target
        for i, j in itertools.permutations(range(len(left)), 2):
            rest = [left[k] for k in range(len(left)) if k not in (i, j)]
            results = [left[i] + left[j], left[i] - left[j], left[i] * left[j]]
            results += [left[i] / left[j]] if left[j] else []
            if any(joins([*rest, result]) for result in results):
                return True
        return False

    return joins([Fraction(number) for number in numbers])


def test_the_solver_agrees_with_a_search_of_another_kind():
    rng = random.Random(0)
    for _ in range(40):
        hand = tuple(sorted(min(rng.randint(1, 13), 10) for _ in range(4)))
        found = completion((), hand, 24, ALL)
        assert (found is not None) == brute(hand, 24), hand
        if found is not None:
            assert value(found) == 24 and sorted(int(token) for token in found if token.isdigit()) == list(hand)


def test_every_beginning_of_a_solution_is_completed_in_no_more_symbols_than_it_lacks():
    rng = random.Random(1)
    for _ in range(25):
        hand = tuple(sorted(rng.randint(1, 10) for _ in range(4)))
        whole = completion((), hand, 24, ALL)
        for cut in range(len(whole or ())):
            assert whole is not None
            left = list(hand)
            for token in whole[:cut]:
                if token.isdigit():
                    left.remove(int(token))
            rest = completion(whole[:cut], tuple(left), 24, ALL)
            assert rest is not None and len(rest) <= len(whole) - cut
            assert value(whole[:cut] + rest) == 24


def test_useless_brackets_are_closed_and_lost_causes_known():
    assert value(("(", "(", "6", *(completion(("(", "(", "6"), (4,), 24, ALL) or ()))) == 24
    assert completion(("1", "+"), (1,), 24, ALL) is None
    assert completion(("6", "4"), (), 24, ALL) is None
    assert (24, 1) in reachable((3, 3, 8, 8), ALL)
    assert reachable((3, 9), "+*") == {(12, 1): ("3", "+", "9"), (27, 1): ("3", "*", "9")}
