import numpy as np
import pytest

from rlvlm.reports.judge_answers import (
    Answers,
    by_bin,
    calibration,
    confusion,
    outcomes,
    summarise,
    swap_consistency,
    wilson,
)


def make(rows, **changes) -> Answers:
    """Rows of status, label, p_left, p_right, truth left, truth right, label when swapped."""
    columns = list(zip(*rows, strict=True))
    facts = {
        "name": "n",
        "about": "a",
        "task": "drawer_open",
        "status": np.array(columns[0]),
        "label": np.array(columns[1]),
        "swapped": np.array(columns[6]),
        "p": np.array([columns[2], columns[3], np.zeros(len(rows))]).T,
        "truth": np.array(columns[4:6], float).T,
        "scale": 1.0,
        "latency_s": np.full(len(rows), 0.1),
        "tokens": np.full(len(rows), np.nan),
        "cost_usd": np.full(len(rows), np.nan),
        "images": [("", "")] * len(rows),
        "text": [""] * len(rows),
        "store": None,
    }
    return Answers(**(facts | changes))


NAN = float("nan")
SIX = [
    ("ok", "left", 0.9, 0.1, 0.85, 0.1, "right"),  # right, gap 0.75; swaps
    ("ok", "left", 0.6, 0.4, 0.1, 0.95, "left"),  # wrong, gap 0.85; the place decides
    ("ok", "right", 0.2, 0.8, 0.5, 0.5, ""),  # the truth ties
    ("ok", "right", 0.2, 0.8, NAN, NAN, ""),  # nobody knows
    ("no_preference", "tie", 0.3, 0.3, 0.30, 0.35, "tie"),
    ("invalid", "", NAN, NAN, 0.0, 1.0, "left"),
]


def test_outcomes_worked_by_hand():
    answers = make(SIX)
    assert outcomes(answers).tolist() == [
        "correct",
        "incorrect",
        "truth ties",
        "not checked",
        "no preference",
        "invalid",
    ]
    counts = by_bin(answers)
    assert counts["correct"].tolist() == [0] * 7 + [1, 0, 0]
    assert counts["incorrect"].tolist() == [0] * 8 + [1, 0]
    assert counts["truth ties"][0] == counts["no preference"][0] == counts["invalid"][9] == 1
    assert counts["not checked"].sum() == 0
    assert confusion(answers).tolist() == [[1, 0, 0, 0, 0], [1, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 1, 0, 0, 0]]
    assert swap_consistency(answers) == (3, 2)


def test_calibration_worked_by_hand():
    found = calibration(make(SIX))
    assert found.counts.sum() == 2
    # 90 % sure and right, 60 % sure and wrong: (0.1 + 0.6) / 2
    assert found.ece == pytest.approx(0.35)
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(20_000):
        sure = rng.uniform(0.5, 1)
        is_right = rng.random() < sure
        rows.append(("ok", "left", sure, 1 - sure, float(is_right), 0.5, ""))
    assert calibration(make(rows)).ece < 0.015  # as right as it is sure
    assert np.isnan(calibration(make(SIX[4:])).ece)


def test_intervals_are_those_of_the_textbook():
    share, low, high = wilson(np.array([8, 0, 0]), np.array([10, 5, 0]))
    assert (share[0], low[0], high[0]) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert low[1] == pytest.approx(0.0, abs=1e-12) and 0 < high[1] < 0.6 and np.isnan(share[2])


def test_a_row_of_figures():
    row = summarise(make(SIX, tokens=np.array([10.0, 20, NAN, NAN, NAN, NAN]), cost_usd=np.full(6, 0.001)))
    assert row["accuracy"] == 0.5 and row["answers"] == 6 and row["said_left"] == 0.5
    assert row["tokens_per_answer"] == 15 and row["usd_per_1000_answers"] == pytest.approx(1.0)
    assert row["swap_consistency"] == pytest.approx(2 / 3) and row["latency_p50_s"] == pytest.approx(0.1)
    nothing = summarise(make([("failed", "", NAN, NAN, NAN, NAN, "")]))
    assert nothing["accuracy"] is nothing["ece"] is nothing["said_left"] is nothing["latency_p50_s"] is None


def test_gaps_in_returns_are_measured_by_the_widest():
    rows = [("ok", "left", NAN, NAN, 0.0, value, "") for value in (5.0, 50.0)]
    assert np.flatnonzero(by_bin(make(rows, scale=50.0))["incorrect"]).tolist() == [1, 9]
