"""Probabilities of short answers out of the first tokens that a server reports. Pure functions for `remote_judge`."""

from collections.abc import Sequence
from math import fsum

MIN_MASS = 0.5
"""Servers report only their likeliest tokens. Where the answers together hold less, the reply's text is read."""
_MINUS = ("-", "\u2212", "\u2013")
_ROUNDING = 1.01
_MARKS = " \t\r\n\"'`*.:"

Tokens = Sequence[tuple[str, float]]
"""First tokens and their probabilities."""


def label_odds(tokens: Tokens) -> tuple[float, float, float] | None:
    """Probabilities of left, right and tie, summing to 1; None where the reply hardly begins with a label.

    A tie is written `-1`, in most vocabularies two tokens: whatever begins with a minus counts as one, since no other
    label does. Departure from the local judges, which know the second token's probability too.
    """
    tie = [text for minus in _MINUS for text in (minus, f"{minus}1")]
    masses = [_mass(tokens, texts) for texts in (["0"], ["1"], tie)]
    if not _is_answer(masses):
        return None
    left, right, neither = (mass / fsum(masses) for mass in masses)
    return left, right, neither


def yes_odds(tokens: Tokens) -> float | None:
    """Probability of yes among yes and no, however they are capitalised; None where the reply hardly begins so."""
    yes, no = (fsum(p for token, p in tokens if _bare(token).lower() == word) for word in ("yes", "no"))
    return yes / (yes + no) if _is_answer([yes, no]) else None


def _mass(tokens: Tokens, texts: Sequence[str]) -> float:
    return fsum(p for token, p in tokens if _bare(token) in texts)


def _bare(token: str) -> str:
    return token.strip(_MARKS)


def _is_answer(masses: Sequence[float]) -> bool:
    """Whether probabilities of all answers make up most of one, and no more than one but for rounding."""
    return MIN_MASS <= fsum(masses) <= _ROUNDING
