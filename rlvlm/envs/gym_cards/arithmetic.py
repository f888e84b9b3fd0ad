"""Formulas read token by token with exact fractions: their value, and how to complete an unfinished one.

Two adjacent numbers, `*` `*` (power) and `/` `/` (floor division) are not allowed: a formula is numbers, binary
operators and brackets, and a token out of place makes it worthless. `legacy_value` reads formulas as the
reference does.
"""

import ast
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from math import gcd

Tokens = tuple[str, ...]
Ratio = tuple[int, int]
"""A fraction in lowest terms with a denominator above 0: several times as fast as `Fraction`, and as exact."""
Level = tuple[Ratio, Ratio, str]
"""Inside one pair of brackets: the sum so far, the term that is still open, and the operator that waits for its second
operand (empty when an operator or the end is expected)."""
Stack = tuple[Level, ...]
"""One level per open bracket, the outermost first."""

_FRESH: Level = ((0, 1), (0, 1), "+")
START: Stack = (_FRESH,)
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "": 3}
_MAX_LEGACY_BITS = 256


def read(tokens: Sequence[str]) -> Stack | None:
    """Returns the state of parsing after `tokens`; None if no formula begins with them."""
    stack: Stack | None = START
    for token in tokens:
        stack = _after(stack, token) if stack is not None else None
    return stack


def value(tokens: Sequence[str]) -> Fraction | None:
    """Returns the value of a formula; None if it is incomplete or divides by zero."""
    stack = read(tokens)
    if stack is None:
        return None
    depth, (total, term, waiting) = len(stack), stack[-1]
    return None if depth > 1 or waiting else Fraction(*_applied(total, "+", term))


@lru_cache(maxsize=8_192)
def completion(tokens: Tokens, numbers: tuple[int, ...], target: int, symbols: str) -> Tokens | None:
    """Returns the fewest tokens that complete `tokens` to a formula of value `target`; None if none do.

    Takes a few milliseconds for any tokens once `prepare` was called for the hand; an exhaustive search took up to
    37 seconds with open brackets.

    Args:
        tokens: the formula so far; empty for a new one.
        numbers: the numbers left, each of which must be used once; sorted, so that equal cases are solved once.
        target: the value wanted.
        symbols: the operators allowed, and `(` if brackets are allowed.
    """
    stack = read(tokens)
    if stack is None:
        return None
    if stack == START and numbers:  # the start of every episode: look it up in the table of whole formulas
        return reachable(numbers, symbols).get((target, 1))
    # If more brackets open in a row than there are numbers, the surplus ones hold only the next bracket: they are left
    # out of the search and closed right after the innermost of them.
    levels: list[Level] = []
    num_fresh = 0
    for total, term, waiting in stack:
        num_fresh = num_fresh + 1 if (total, term, waiting) == _FRESH and levels else 0
        if num_fresh <= max(len(numbers), 1):
            levels.append((total, term, waiting))
    found = _to_reach(tuple(levels), numbers, (target, 1), symbols)
    if found is None or len(levels) == len(stack):
        return found
    depth, index = 0, 0
    while depth >= 0:  # up to the bracket that closes the innermost level that was kept
        depth += (found[index] == "(") - (found[index] == ")")
        index += 1
    return (*found[:index], *(")",) * (len(stack) - len(levels)), *found[index:])


def prepare(numbers: tuple[int, ...], symbols: str) -> None:
    """Computes, once for each hand (sorted), the tables in which `completion` looks up every turn."""
    reachable(numbers, symbols)
    for chosen, _ in _choices(numbers, True):
        if len(chosen) < len(numbers):
            _endings(chosen, symbols)
            for depth in range(1, len(numbers)) if "(" in symbols else ():
                _bracketed((_FRESH,) * depth, chosen, symbols)


@lru_cache(maxsize=512)
def reachable(numbers: tuple[int, ...], symbols: str) -> dict[Ratio, Tokens]:
    """Returns every value that a formula of all `numbers` (sorted) can have, each with a shortest formula.

    The 285 sets of up to three numbers from 1 to 10 are looked up most often.
    """
    if len(numbers) == 1:
        return {(numbers[0], 1): (str(numbers[0]),)}
    found: dict[Ratio, Tokens] = {}
    for part, rest in _choices(numbers, True)[:-1]:  # the last takes all
        for left, left_tokens in reachable(part, symbols).items():
            for right, right_tokens in reachable(rest, symbols).items():
                for operator in symbols.replace("(", ""):
                    if operator == "/" and not right[0]:
                        continue
                    formula = joined(left_tokens, operator, right_tokens)
                    if "(" in formula and "(" not in symbols:
                        continue
                    result = _applied(left, operator, right)
                    if result not in found or len(formula) < len(found[result]):
                        found[result] = formula
    return found


def legacy_value(text: str) -> float | None:
    """Returns Python's value of `text` in floating point; None if it raises or would take forever to compute.

    So adjacent digits are one number, `**` is a power, `//` a floor division, and 8 / (3 - 8 / 3) is not exactly 24.

    Args:
        text: digits, spaces, + - * / and brackets.
    """
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _after(stack: Stack, token: str) -> Stack | None:
    """Returns the stack after one more token; None if the token is not allowed there."""
    total, term, operator = stack[-1]
    if operator:  # an operand is expected
        if token == "(":
            return (*stack, _FRESH)
        return _with_operand(stack, (int(token), 1)) if token.isdigit() else None
    if token == ")":
        return _with_operand(stack[:-1], _applied(total, "+", term)) if len(stack) > 1 else None
    if token in ("+", "-"):
        return (*stack[:-1], (_applied(total, "+", term), (0, 1), token))
    return (*stack[:-1], (total, term, token)) if token in ("*", "/") else None


def _with_operand(stack: Stack, operand: Ratio) -> Stack | None:
    """Returns the stack after its missing operand is filled in; None if that would divide by 0."""
    total, term, operator = stack[-1]
    if operator == "/" and not operand[0]:
        return None
    return (*stack[:-1], (total, _applied(term, operator, operand), ""))


def _applied(left: Ratio, operator: str, right: Ratio) -> Ratio:
    """Returns `left operator right`, which must not divide by 0."""
    (a, b), (c, d) = left, right
    if operator in "+-":
        above, below = a * d + (c * b if operator == "+" else -c * b), b * d
    else:
        above, below = (a * c, b * d) if operator == "*" else (a * d, b * c)
    shared = gcd(above, below) * (1 if below > 0 else -1)  # lowest terms, so that equal fractions are equal keys
    return above // shared, below // shared


_PLACES = {token: index for index, token in enumerate((*")+-*/", *map(str, range(1, 11)), "("))}


def _is_before(tokens: Tokens, others: Tokens) -> bool:
    """Returns whether `tokens` are fewer than `others`, or as many and earlier in the order of the symbols."""
    if len(tokens) != len(others):
        return len(tokens) < len(others)
    token, other_token = next(((a, b) for a, b in zip(tokens, others, strict=True) if a != b), (")", ")"))
    return _PLACES[token] < _PLACES[other_token]


def _keep(found: dict[Ratio, Tokens], value: Ratio, before: Tokens, after: Tokens) -> None:
    """Keeps the better way to write `value`: `before` and `after` joined, or the tokens already stored."""
    there = found.get(value)
    if there is None or (len(before) + len(after) <= len(there) and _is_before((*before, *after), there)):
        found[value] = (*before, *after)


@lru_cache(maxsize=512)
def _operands(numbers: tuple[int, ...], symbols: str) -> dict[Ratio, Tokens]:
    """Returns every value of one operand made of all `numbers`, with its tokens, bracketed if they are several."""
    if len(numbers) > 1 and "(" not in symbols:
        return {}
    return {
        value: tokens if len(numbers) == 1 else ("(", *tokens, ")")
        for value, tokens in reachable(numbers, symbols).items()
    }


@lru_cache(maxsize=512)
def _endings(numbers: tuple[int, ...], symbols: str) -> dict[Ratio, dict[Ratio, Tokens]]:
    """Returns the continuations after an operand X that use all `numbers`, by m and s: X becomes X * m + s."""
    if not numbers:
        return {(1, 1): {(0, 1): ()}}
    found: dict[Ratio, dict[Ratio, Tokens]] = {}
    for chosen, rest in _choices(numbers, "(" in symbols):
        for operand, written in _operands(chosen, symbols).items():
            for factor, sums in _endings(rest, symbols).items():
                for operator in symbols.replace("(", ""):
                    if operator == "/" and not operand[0]:
                        continue
                    if operator in "*/":  # the result is (X * operand) * factor + added
                        after = found.setdefault(_applied(factor, operator, operand), {})
                        for added, more in sums.items():
                            _keep(after, added, (operator, *written), more)
                    else:  # X is a term of its own, and `operand` begins the next term
                        after, term = found.setdefault((1, 1), {}), _applied(operand, "*", factor)
                        for added, more in sums.items():
                            summed = _applied(added, operator, term)
                            _keep(after, summed, (operator, *written), more)
    return found


def _with_operand_of(
    levels: tuple[Level, ...], numbers: tuple[int, ...], symbols: str, is_all_taken: bool
) -> Iterator[tuple[Ratio, tuple[int, ...], Tokens]]:
    """Yields each value of the outermost of `levels`' open term with its operand, the numbers then left, and the
    tokens.

    Args:
        levels: the outermost first.
        numbers: numbers that may be used.
        symbols: see `completion`.
        is_all_taken: whether to include operands that use up all numbers.
    """
    (_, term, waiting), deeper = levels[0], levels[1:]
    if not waiting:
        yield term, numbers, ()
        return
    choices = _choices(numbers, "(" in symbols)
    for chosen, rest in [((), numbers), *choices] if deeper else choices:
        if rest or is_all_taken:
            operands = _bracketed(deeper, chosen, symbols) if deeper else _operands(chosen, symbols)
            for operand, tokens in operands.items():
                if operand[0] or waiting != "/":
                    yield _applied(term, waiting, operand), rest, tokens


@lru_cache(maxsize=4_096)
def _bracketed(levels: tuple[Level, ...], numbers: tuple[int, ...], symbols: str) -> dict[Ratio, Tokens]:
    """Returns every value with which the brackets `levels` can close after using all `numbers`."""
    found: dict[Ratio, Tokens] = {}
    # inside the bracket: total + term * factor + added
    for term, rest, tokens in _with_operand_of(levels, numbers, symbols, True):
        for factor, sums in _endings(rest, symbols).items():
            start = _applied(levels[0][0], "+", _applied(term, "*", factor))
            for added, more in sums.items():
                _keep(found, _applied(start, "+", added), tokens, more)
    return {value: (*tokens, ")") for value, tokens in found.items()}


@lru_cache(maxsize=4_096)
def _to_reach(levels: tuple[Level, ...], numbers: tuple[int, ...], target: Ratio, symbols: str) -> Tokens | None:
    """Returns the fewest tokens that bring the outermost of `levels` to `target` and use all `numbers`."""
    (total, term, waiting), deeper = levels[0], levels[1:]
    missing = _applied(target, "-", total)
    # The value of an operand that takes all numbers is known beforehand: only one value can reach the target.
    is_known = waiting in ("+", "-") or (waiting != "" and term[0] != 0 and missing[0] != 0)
    best: Tokens | None = None
    for value, rest, tokens in _with_operand_of(levels, numbers, symbols, not is_known):
        # total + value * factor + added = target, so `added` is looked up and not searched for
        for factor, sums in _endings(rest, symbols).items():
            more = sums.get(_applied(missing, "-", _applied(value, "*", factor)))
            if more is not None and (best is None or _is_before((*tokens, *more), best)):
                best = (*tokens, *more)
    if is_known:
        inverse = {"+": (missing, "-", term), "-": (term, "-", missing), "*": (missing, "/", term)}
        operand = _applied(*inverse.get(waiting, (term, "/", missing)))
        if deeper:
            inner = _to_reach(deeper, numbers, operand, symbols)
            whole = None if inner is None else (*inner, ")")
        else:
            whole = _operands(numbers, symbols).get(operand) if numbers else None
        # among equally short ones the first in the symbols' order: the answer must not depend on how it was found
        best = whole if best is None or (whole is not None and _is_before(whole, best)) else best
    return best


@lru_cache(maxsize=2_048)
def _choices(numbers: tuple[int, ...], is_grouping: bool) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns every way to split `numbers` into the numbers of one operand and the rest; equal ways once."""
    ways = {}  # by number, not position: of two fives it does not matter which is taken
    for size in range(1, len(numbers) + 1 if is_grouping else 2):
        for indices in combinations(range(len(numbers)), size):
            chosen = tuple(numbers[i] for i in indices)
            ways[chosen] = tuple(number for i, number in enumerate(numbers) if i not in indices)
    return list(ways.items()) if numbers else []


def joined(left: Tokens, operator: str, right: Tokens) -> Tokens:
    """Returns `left operator right` with only the brackets that it needs."""
    strength = _PRECEDENCE[operator]
    if _PRECEDENCE[_outermost(left)] < strength:
        left = ("(", *left, ")")
    weaker = _PRECEDENCE[_outermost(right)]
    # a - (b - c) and a / (b / c) keep their brackets, a + (b - c) does not need them
    if weaker < strength or (weaker == strength and operator in "-/"):
        right = ("(", *right, ")")
    return (*left, operator, *right)


def _outermost(tokens: Tokens) -> str:
    """Returns the operator that is applied last; empty for a single number."""
    depth, weakest = 0, ""
    for token in tokens:
        depth += (token == "(") - (token == ")")
        if depth == 0 and token in "+-*/" and _PRECEDENCE[token] < _PRECEDENCE[weakest]:
            weakest = token
    return weakest


def _evaluate(node: ast.expr) -> float:
    """Evaluates an expression; raises ValueError if it is not arithmetic, or a power too large to compute."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        operand = _evaluate(node.operand)
        return -operand if isinstance(node.op, ast.USub) else operand
    if not isinstance(node, ast.BinOp):
        raise ValueError("no arithmetic")
    left, right = _evaluate(node.left), _evaluate(node.right)
    if isinstance(node.op, ast.Pow):
        # 9**9**9**9 would run until memory is exhausted; a root of a negative number is complex
        if abs(right) * max(abs(left), 2).__trunc__().bit_length() > _MAX_LEGACY_BITS or (left < 0 and right % 1):
            raise ValueError("too large a power")
        return left**right
    for kind, operator in _LEGACY_OPERATORS.items():
        if isinstance(node.op, kind):
            return operator(left, right)
    raise ValueError("no arithmetic")


_LEGACY_OPERATORS = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: left // right,
}
