"""A search for 24 that can be told in a line: join two numbers of four, then look what two of the three left over make.

A policy that has to name a formula at once must know it by heart, and there are only 715 hands. Told so, each word
follows from a few before it: the joints are tried in one order, and the last step is seen from two numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rlvlm.envs.gym_cards.arithmetic import Tokens, applied, joined

_TARGET = 24
_MOST_TOLD = 8
"""Joints that lead nowhere and are told of, at most, so that a thought does not grow without end."""

_Item = tuple[Fraction, Tokens]
"""A number, and the formula that makes it."""

# Places of two cards, as dealt, and what is done with their numbers, the greater first; `\\` divides the smaller by the
# greater. The first joint that leads to 24 comes fourth on average, and among the first eight in 88 % of the deals that
# can be solved: each solves most of what the ones before it leave. A hand has as many searches as it has orders.
_JOINTS = (
    (0, 1, "-"), (0, 1, "+"), (0, 1, "*"), (0, 2, "-"), (0, 1, "/"), (1, 3, "-"), (0, 3, "/"), (0, 3, "-"),
    (1, 2, "/"), (1, 2, "-"), (0, 2, "\\"), (1, 3, "+"), (1, 3, "/"), (2, 3, "+"), (0, 3, "*"), (2, 3, "-"),
    (2, 3, "\\"), (0, 2, "+"), (1, 2, "+"), (0, 1, "\\"), (0, 3, "+"), (0, 2, "*"), (0, 3, "\\"), (1, 3, "*"),
    (1, 2, "\\"), (1, 3, "\\"), (1, 2, "*"), (2, 3, "*"), (0, 2, "/"), (2, 3, "/"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Search:
    """What was tried, and what was found."""

    steps: tuple[str, ...]
    """`10-4=6 8 3, 6: 11 5 24, 8: 9 3 18 2, 3: 14 2 48`: a joint and what is left beside it, and then for each of the
    three numbers what the other two make. The last step breaks off where 24 is in sight: `3, 6-3=3, 8*3=24`."""
    formula: Tokens | None
    """Makes 24; None where nothing does."""


@lru_cache(maxsize=1_024)
def search(numbers: tuple[int, ...]) -> Search:
    """The search through a hand of four `numbers`, as dealt. Joints that leave equal numbers are tried once."""
    items = [(Fraction(number), (str(number),)) for number in numbers]
    told: list[str] = []
    seen = set()
    for i, j, operator in _JOINTS:
        small, great = sorted((items[i], items[j]))
        pair = (small, "/", great) if operator == "\\" else (great, operator, small)
        made = _join(*pair)
        others = [item for place, item in enumerate(items) if place not in (i, j)]
        left = tuple(sorted(value for value, _ in (made, *others)))
        if left in seen:
            continue
        seen.add(left)
        step, formula = _look(f"{_equation(*pair)} {others[0][0]} {others[1][0]}", (made, *others))
        if formula is not None or len(told) < _MOST_TOLD:
            told.append(step)
        if formula is not None:
            return Search(tuple(told), formula)
    return Search(tuple(told), None)


def _look(step: str, three: tuple[_Item, ...]) -> tuple[str, Tokens | None]:
    """`step` continued by what two of three numbers make beside the third, up to what makes 24 with it."""
    for place, third in enumerate(three):
        one, other = (item for index, item in enumerate(three) if index != place)
        step += f", {third[0]}:"
        for equation, made in _made(one, other):
            step += f" {made[0]}"
            for operator in "+-*/":
                for left, right in ((made, third), (third, made)):
                    if operator != "/" or right[0]:
                        value, formula = _join(left, operator, right)
                        if value == _TARGET:
                            last = _equation(left, operator, right)
                            return f"{step}, {equation}, {last}", formula
    return step, None


def _made(one: _Item, other: _Item) -> Iterator[tuple[str, _Item]]:
    """Sum, difference, product, and the quotient where it is whole, of two numbers, each with its equation."""
    great, small = (one, other) if one[0] >= other[0] else (other, one)
    is_whole = small[0] != 0 and (great[0] / small[0]).denominator == 1
    for operator in "+-*/" if is_whole else "+-*":
        yield _equation(great, operator, small), _join(great, operator, small)


def _equation(left: _Item, operator: str, right: _Item) -> str:
    sides = [str(side[0]) if side[0].denominator == 1 else f"({side[0]})" for side in (left, right)]
    return f"{sides[0]}{operator}{sides[1]}={applied(left[0], operator, right[0])}"


def _join(left: _Item, operator: str, right: _Item) -> _Item:
    return applied(left[0], operator, right[0]), joined(left[1], operator, right[1])
