"""Remedies for a weak judge, computed from its answers: the cost of each way of asking."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.figures import COLUMNS, outcome_of
from rlvlm.judge_bench.items import Item
from rlvlm.judge_bench.prediction import balanced_shares, bits_of, worth_of

_NO_BITS = 0.001
"""Bits per label below which labels teach nothing: those of accuracy 0.52."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A way of asking for comparisons."""

    name: str
    settings: str
    """Options that make a run ask this way; empty for the default."""
    worth: float
    """Worth of a label, see `prediction.worth_of`."""
    undecided: float
    """Share of labels without a preference, from which nothing is learned."""
    calls: float | None
    """Questions to the judge per bit of truth in its labels, or per label of a judge that is always right. None if
    labels carry no information."""


def remedies(items: Sequence[Item], answers: Sequence[Answer]) -> list[Remedy]:
    """Returns the ways of asking, the cheapest first, from the `answers` [N] to `items` [N] that are about pairs.

    Empty if no pair was asked in both orders.
    """
    by_pair: dict[tuple[str, int], dict[bool, tuple[Item, Answer]]] = {}
    for item, answer in zip(items, answers, strict=True):
        if item.is_pair and item.case == "pair":
            by_pair.setdefault((answer.task, answer.item), {})[answer.swapped] = (item, answer)
    both = [pair for pair in by_pair.values() if len(pair) == 2]
    once, twice = np.zeros((2, 3)), np.zeros((2, 3))  # counts in the form of `balanced_shares`
    for pair in both:
        outcomes = {}
        for is_swapped, (item, answer) in pair.items():
            outcomes[is_swapped] = outcome_of(item, answer)
            once[int((item.gap > 0) != is_swapped), COLUMNS.get(outcomes[is_swapped], 2)] += 1
        # right in one order and wrong in the other: the same side twice, which is no preference
        agreed = outcomes[False] if outcomes[False] == outcomes[True] else "undecided"
        twice[:, COLUMNS.get(agreed, 2)] += 1  # the label is the same in either order
    if not both:
        return []
    found = []
    for name, settings, counts, calls in (
        ("each pair once", "", once, 1),
        ("both orders", "--judge.both-orders", twice, 2),
    ):
        right, wrong = balanced_shares(counts)
        # a judge that is mostly wrong has bits too, but a run takes its labels at their word
        bits = bits_of(right, wrong) if right > wrong else 0.0
        found.append(
            Remedy(
                name=name,
                settings=settings,
                worth=worth_of(right, wrong),
                undecided=1 - right - wrong,
                calls=calls / bits if bits > _NO_BITS else None,
            )
        )
    return sorted(found, key=lambda remedy: math.inf if remedy.calls is None else remedy.calls)
