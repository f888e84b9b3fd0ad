"""A search for 24 that fits in one line: join two numbers of four, then look what two of the three left over make.

A policy that has to name a formula at once must know it by heart, and there are only 715 hands. Written so, each word
follows from a few before it: the joints are tried in one order, each under its letter, the last step is seen from two
numbers, and the formula is put together one number at a time.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from string import ascii_letters

from rlvlm.envs.gym_cards.arithmetic import Tokens, joined

_TARGET = 24
# joints of the first round, after which a search that found nothing ends, so that it does not grow without end
_MOST_TRIED = 14

_APPLIED = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

_Item = tuple[Fraction, Tokens]  # a number, and the formula that makes it

# Places of two cards, as dealt, and what is done with their numbers, the greater first; `\\` divides the smaller by the
# greater. In a thought they are called A, B, C, ... a, b, c, d. Each solves most of what the ones before it leave; the
# first that leads to 24 comes third or fourth on average. A hand has as many searches as it has orders.
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
    """`A 10-4=6 8 3, 6: 11 5 24, 8: 9 3 18 2, 3: 14 2 48`: the joint's letter, the joint and what is left beside it,
    and then for each of the three numbers what the other two make. The last step breaks off where 24 is in sight:
    `3, 6-3=3, 8*3=24`."""
    draft: Tokens | None
    """The formula while the joint is one number in it: `8 * ( 6 - 3 )`. None where nothing was found."""
    formula: Tokens | None
    """Makes 24; None where nothing does."""


@lru_cache(maxsize=1_024)
def search(numbers: tuple[int, ...]) -> Search:
    """The search through a hand of four `numbers`, as dealt.

    A first round tries joints of whole results, of which only differences, sums and quotients are mentioned where they
    lead nowhere: nineteen of twenty deals that can be solved need no others. A second round tries what is left, and
    mentions only what it finds. Joints that leave equal numbers are tried once.
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
            # items that a first round passes over are not marked as seen: the second comes back to them
            if left in seen or (is_first_round and (value.denominator > 1 or turn >= _MOST_TRIED)):
                continue
            seen.add(left)
            start = f"{_LETTERS[joint]} {_equation(*pair)} {others[0][0]} {others[1][0]}"
            step, draft = _look(start, ((value, (_shown(value),)), *others))
            if is_first_round or draft is not None:
                written.append(step)
            if draft is not None:
                # once more, with the joint spelt out: brackets are needed or not according to what stands inside
                return Search(tuple(written), draft, _look("", ((value, formula), *others))[1])
    return Search(tuple(written), None, None)


def _look(step: str, three: tuple[_Item, ...]) -> tuple[str, Tokens | None]:
    """`step` continued by what two of three numbers make beside the third, up to what makes 24 with it."""
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
    """Sum, difference, product, and the quotient where it is whole, of two numbers, each with its equation."""
    great, small = (first, second) if first[0] >= second[0] else (second, first)
    is_whole = small[0] != 0 and (great[0] / small[0]).denominator == 1
    for symbol in "+-*/" if is_whole else "+-*":
        yield _equation(great, symbol, small), _join(great, symbol, small)


def _equation(left: _Item, symbol: str, right: _Item) -> str:
    return f"{_shown(left[0])}{symbol}{_shown(right[0])}={_APPLIED[symbol](left[0], right[0])}"


def _shown(number: Fraction) -> str:
    """In a formula."""
    return str(number) if number.denominator == 1 else f"({number})"


def _join(left: _Item, symbol: str, right: _Item) -> _Item:
    return _APPLIED[symbol](left[0], right[0]), joined(left[1], symbol, right[1])
