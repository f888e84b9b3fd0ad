"""Formulas read token by token over exact fractions: their value, and how an unfinished one can still be completed.

Two numbers never stand side by side, `*` `*` is no power and `/` `/` no floor division: a formula is numbers, binary
operators and brackets, and what a token may not follow makes the formula worthless. `legacy_value` reads as the
reference does.
"""

import ast
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

Tokens = tuple[str, ...]
Level = tuple[Fraction, Fraction, str]
"""Inside one pair of brackets: the sum so far, the term that is still open, and the operator that waits for its second
operand (empty when an operator or the end is expected)."""
Stack = tuple[Level, ...]
"""One level per open bracket, the outermost first."""

_FRESH: Level = (Fraction(0), Fraction(0), "+")
START: Stack = (_FRESH,)
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "": 3}
_MAX_LEGACY_BITS = 256


def read(tokens: Sequence[str]) -> Stack | None:
    """Where one stands after `tokens`; None when no formula can begin so."""
    stack: Stack | None = START
    for token in tokens:
        stack = _after(stack, token) if stack is not None else None
    return stack


def value(tokens: Sequence[str]) -> Fraction | None:
    """The value of a formula; None for what is no whole formula, or divides by nothing."""
    stack = read(tokens)
    if stack is None:
        return None
    depth, (total, term, waiting) = len(stack), stack[-1]
    return None if depth > 1 or waiting else total + term


@lru_cache(maxsize=8_192)
def completion(tokens: Tokens, numbers: tuple[int, ...], target: int, symbols: str) -> Tokens | None:
    """The fewest tokens that make `tokens` a formula of that value; None where nothing does.

    Args:
        tokens: the formula so far; empty for a new one.
        numbers: those that are left, each of which must be used once; sorted, so that equal cases are solved once.
        target: the value wanted.
        symbols: the operators that may be used, with `(` where brackets may.
    """
    stack = read(tokens)
    if stack is None:
        return None
    if stack == START and numbers:
        return reachable(numbers, symbols).get(Fraction(target))
    return min(_completions(stack, numbers, Fraction(target), symbols), key=len, default=None)


@lru_cache(maxsize=512)
def reachable(numbers: tuple[int, ...], symbols: str) -> dict[Fraction, Tokens]:
    """Every value that a formula of all `numbers` (sorted) can have, each with a shortest formula.

    There are 285 sets of up to three numbers from 1 to 10, and those are what is asked for most.
    """
    if len(numbers) == 1:
        return {Fraction(numbers[0]): (str(numbers[0]),)}
    found: dict[Fraction, Tokens] = {}
    for part, rest in _splits(numbers):
        for left, left_tokens in reachable(part, symbols).items():
            for right, right_tokens in reachable(rest, symbols).items():
                for operator in symbols.replace("(", ""):
                    if operator == "/" and right == 0:
                        continue
                    formula = joined(left_tokens, operator, right_tokens)
                    if "(" in formula and "(" not in symbols:
                        continue
                    result = applied(left, operator, right)
                    if result not in found or len(formula) < len(found[result]):
                        found[result] = formula
    return found


def legacy_value(text: str) -> float | None:
    """What Python makes of `text`, in floating point; None where it raises, or would compute without end.

    So digits side by side are one number, `**` is a power and `//` a floor division, and 8 / (3 - 8 / 3) is not 24.

    Args:
        text: digits, spaces, + - * / and brackets.
    """
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _after(stack: Stack, token: str) -> Stack | None:
    """The stack after one more token; None where it may not stand."""
    total, term, operator = stack[-1]
    if operator:  # an operand is expected
        if token == "(":
            return (*stack, _FRESH)
        return _with_operand(stack, Fraction(int(token))) if token.isdigit() else None
    if token == ")":
        return _with_operand(stack[:-1], total + term) if len(stack) > 1 else None
    if token in ("+", "-"):
        return (*stack[:-1], (total + term, Fraction(0), token))
    return (*stack[:-1], (total, term, token)) if token in ("*", "/") else None


def _with_operand(stack: Stack, operand: Fraction) -> Stack | None:
    total, term, operator = stack[-1]
    if operator == "/" and operand == 0:
        return None
    return (*stack[:-1], (total, applied(term, operator, operand), ""))


def applied(left: Fraction, operator: str, right: Fraction) -> Fraction:
    """`left operator right`; ZeroDivisionError for nothing to divide by."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right if operator == "*" else left / right


def _completions(stack: Stack, numbers: tuple[int, ...], target: Fraction, symbols: str) -> Iterator[Tokens]:
    """All completions in which what is bracketed anew is bracketed because it must be."""
    total, term, waiting = stack[-1]
    if waiting:
        for chosen, rest in _choices(numbers, "(" in symbols):
            for operand, tokens in reachable(chosen, symbols).items():
                after = _with_operand(stack, operand)
                if after is not None:
                    written = tokens if len(chosen) == 1 else ("(", *tokens, ")")
                    yield from (written + more for more in _completions(after, rest, target, symbols))
        return
    if not numbers and len(stack) == 1:
        if total + term == target:
            yield ()
        return
    following = [")"] if len(stack) > 1 else []
    following += symbols.replace("(", "") if numbers else ""
    for token in following:
        after = _after(stack, token)
        if after is not None:
            yield from ((token, *more) for more in _completions(after, numbers, target, symbols))


@lru_cache(maxsize=2_048)
def _choices(numbers: tuple[int, ...], is_grouping: bool) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every way to take some of `numbers` as one operand, and what is left; equal ways once."""
    ways = {}
    for size in range(1, len(numbers) + 1 if is_grouping else 2):
        for places in combinations(range(len(numbers)), size):
            chosen = tuple(numbers[i] for i in places)
            ways[chosen] = tuple(number for i, number in enumerate(numbers) if i not in places)
    return list(ways.items()) if numbers else []


def _splits(numbers: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(part, rest) for part, rest in _choices(numbers, True) if rest]


def joined(left: Tokens, operator: str, right: Tokens) -> Tokens:
    """`left operator right` with only those brackets that it needs."""
    strength = _PRECEDENCE[operator]
    if _PRECEDENCE[_outermost(left)] < strength:
        left = ("(", *left, ")")
    weaker = _PRECEDENCE[_outermost(right)]
    if weaker < strength or (weaker == strength and operator in "-/"):
        right = ("(", *right, ")")
    return (*left, operator, *right)


def _outermost(tokens: Tokens) -> str:
    """The operator that is applied last; empty for a single number."""
    depth, weakest = 0, ""
    for token in tokens:
        depth += (token == "(") - (token == ")")
        if depth == 0 and token in "+-*/" and _PRECEDENCE[token] < _PRECEDENCE[weakest]:
            weakest = token
    return weakest


def _evaluate(node: ast.expr) -> float:
    """Raises ValueError for what is no arithmetic, and for a power that would not end."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        operand = _evaluate(node.operand)
        return -operand if isinstance(node.op, ast.USub) else operand
    if not isinstance(node, ast.BinOp):
        raise ValueError("no arithmetic")
    left, right = _evaluate(node.left), _evaluate(node.right)
    if isinstance(node.op, ast.Pow):
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
