"""What both orders are worth, by hand and of simulated judges."""

import numpy as np
import pytest

from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.items import Item
from rlvlm.judge_bench.remedies import remedies

SIDE = np.zeros((1, 2))


def asked(labels: list[tuple[str, str]]) -> tuple[list[Item], list[Answer]]:
    """Pairs whose sides are nearer by turns, left in the first, each with what was said in both orders."""
    items, answers = [], []
    for place, pair in enumerate(labels):
        truth = (0.9, 0.1) if place % 2 == 0 else (0.1, 0.9)
        item = Item(kind="pair", case="pair", goal="open it", sides=(SIDE, SIDE), truth=truth)
        for swapped, label in zip((False, True), pair, strict=True):
            items.append(item)
            answers.append(Answer(task="a", item=place, swapped=swapped, status="ok", label=label))
    return items, answers


def test_a_judge_that_is_always_right_is_asked_once():
    once, both = remedies(*asked([("left", "right"), ("right", "left")] * 4))
    assert (once.name, once.calls, once.worth, once.undecided) == ("each pair once", pytest.approx(1), 1, 0)
    assert both.calls == pytest.approx(2) and both.settings == "--judge.both-orders"


def test_a_judge_that_always_says_left_teaches_nothing():
    ways = remedies(*asked([("left", "left")] * 8))
    assert all(way.calls is None and way.worth == pytest.approx(0.5) for way in ways)
    assert {way.name: way.undecided for way in ways} == {"each pair once": 0, "both orders": 1}


def test_wrong_in_both_orders_is_a_wrong_label():
    (both,) = [w for w in remedies(*asked([("left", "right"), ("left", "right")] * 4)) if w.name == "both orders"]
    assert both.undecided == 0 and both.worth == pytest.approx(0.5)  # it names the same image, whichever is nearer


def test_both_orders_pay_where_a_side_is_preferred_and_not_where_answers_err_alike():
    rng = np.random.default_rng(0)

    def label(is_left_nearer: bool, left: float, accuracy: float) -> str:
        if rng.random() < left:
            return "left"
        return "left" if is_left_nearer == (rng.random() < accuracy) else "right"

    def first(left: float, accuracy: float) -> str:
        rows = [
            (label(place % 2 == 0, left, accuracy), label(place % 2 == 1, left, accuracy)) for place in range(4_000)
        ]
        return remedies(*asked(rows))[0].name

    assert first(left=0.5, accuracy=1.0) == "both orders"
    assert first(left=0.0, accuracy=0.75) == "each pair once"


def test_pairs_that_were_asked_once_are_not_judged_for_consistency():
    items, answers = asked([("left", "right")])
    assert remedies(items[:1], answers[:1]) == []
