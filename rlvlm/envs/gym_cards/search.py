"""A search for 24 that fits in one line: combine two of four numbers, then see what the three numbers left can make.

A policy that names a formula at once must know it by heart, and there are only 715 hands. Written as a search, each
word follows from a few before it: combinations are tried in a fixed order, each under its letter, the last step is
visible from two numbers, and the formula is put together one number at a time.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from string import ascii_letters

from rlvlm.envs.gym_cards.arithmetic import Tokens, joined

_TARGET = 24
# combinations of the first round after which a search that found nothing ends, to bound its length
_MOST_TRIED = 14

_APPLIED = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

_Item = tuple[Fraction, Tokens]  # a number, and the formula that makes it

# Positions of two cards, as dealt, and the operation on their numbers, the greater first; `\\` divides the smaller by
# the greater. In a thought they are called A, B, C, ... a, b, c, d. Each solves most hands that the ones before it
# leave unsolved; on average the third or fourth leads to 24. A hand has as many searches as orders.
_JOINTS = (
    (2, 3, "-"), (2, 3, "+"), (0, 1, "-"), (0, 2, "-"), (1, 3, "/"), (0, 3, "-"), (0, 2, "/"), (1, 3, "-"),
    (1, 2, "/"), (1, 2, "-"), (0, 1, "+"), (0, 1, "/"), (1, 2, "+"), (2, 3, "/"), (0, 3, "/"), (1, 3, "+"),
    (0, 3, "+"), (0, 2, "+"), (0, 3, "*"), (1, 3, "*"), (0, 1, "*"), (0, 2, "*"), (1, 2, "*"), (2, 3, "*"),
    (0, 1, "\\"), (0, 2, "\\"), (0, 3, "\\"), (1, 2, "\\"), (1, 3, "\\"), (2, 3, "\\"),
)  # fmt: skip
_LETTERS = dict(zip(_JOINTS, ascii_letters[26:] + ascii_letters[:26], strict=False))


@dataclass(frozen=True, slots=True)
class Search:
    """Attempts of a search, and its result."""

    steps: tuple[str, ...]
    """Written steps, e.g. `A 10-4=6 8 3, 6: 11 5 24, 8: 9 3 18 2, 3: 14 2 48`: the letter and the combination, the
    numbers left beside it, then for each of the three numbers the results of the other two. The last step stops once 24
    is in sight: `3, 6-3=3, 8*3=24`."""
    draft: Tokens | None
    """Formula with the combined numbers as one number: `8 * ( 6 - 3 )`. None if nothing was found."""
    formula: Tokens | None
    """Formula of value 24; None if nothing was found."""


@lru_cache(maxsize=1_024)
def search(numbers: tuple[int, ...]) -> Search:
    """Returns the search through a hand of four `numbers`, as dealt.

    A first round tries combinations with whole results; of those that fail only differences, sums and quotients are
    written. Nineteen of twenty solvable deals need no others. A second round tries the rest and writes only what it
    finds. Combinations that leave equal numbers are tried once.
    """
    items = [(Fraction(number), (str(number),)) for number in numbers]
    written: list[str] = []
    seen = set()
    for is_first_round in (True, False):
        for turn, joint in enumerate(_JOINTS):
            i, j, symbol = joint
            small, great = sorted((items[i], items[j]))
            pair = (small, "/", great) if symbol == "\\" else (great, symbol, small)
            value, formula = _join(*pair)
            others = [item for index, item in enumerate(items) if index not in (i, j)]
            left = tuple(sorted((value, *(number for number, _ in others))))
            # combinations skipped by the first round are not marked as seen, so that the second round tries them
            if left in seen or (is_first_round and (value.denominator > 1 or turn >= _MOST_TRIED)):
                continue
            seen.add(left)
            start = f"{_LETTERS[joint]} {_equation(*pair)} {others[0][0]} {others[1][0]}"
            step, draft = _look(start, ((value, (_shown(value),)), *others))
            if is_first_round or draft is not None:
                written.append(step)
            if draft is not None:
                # once more with the combination spelt out: its brackets depend on the tokens inside
                return Search(tuple(written), draft, _look("", ((value, formula), *others))[1])
    return Search(tuple(written), None, None)


def _look(step: str, three: tuple[_Item, ...]) -> tuple[str, Tokens | None]:
    """Appends to `step`, for each of three numbers, the results of the other two, up to a result that makes 24."""
    for place, third in enumerate(three):
        first, second = (item for index, item in enumerate(three) if index != place)
        step += f", {third[0]}:"
        for equation, made in _made(first, second):
            step += f" {made[0]}"
            for symbol in "+-*/":
                for left, right in ((made, third), (third, made)):
                    if symbol != "/" or right[0]:
                        value, formula = _join(left, symbol, right)
                        if value == _TARGET:
                            last = _equation(left, symbol, right)
                            return f"{step}, {equation}, {last}", formula
    return step, None


def _made(first: _Item, second: _Item) -> Iterator[tuple[str, _Item]]:
    """Yields sum, difference, product and, if whole, quotient of two numbers, each with its equation."""
    great, small = (first, second) if first[0] >= second[0] else (second, first)
    is_whole = small[0] != 0 and (great[0] / small[0]).denominator == 1
    for symbol in "+-*/" if is_whole else "+-*":
        yield _equation(great, symbol, small), _join(great, symbol, small)


def _equation(left: _Item, symbol: str, right: _Item) -> str:
    return f"{_shown(left[0])}{symbol}{_shown(right[0])}={_APPLIED[symbol](left[0], right[0])}"


def _shown(number: Fraction) -> str:
    """Returns the number as written in a formula."""
    return str(number) if number.denominator == 1 else f"({number})"


def _join(left: _Item, symbol: str, right: _Item) -> _Item:
    return _APPLIED[symbol](left[0], right[0]), joined(left[1], symbol, right[1])
