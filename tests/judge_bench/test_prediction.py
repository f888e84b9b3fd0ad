import csv

import numpy as np
import pytest

from rlvlm.core.errors import UsageError
from rlvlm.judge_bench.prediction import COLUMNS, bits_of, bits_of_pairs, bits_of_scores, predict, read_curve, rising


def test_bits_by_hand():
    assert bits_of([[5, 0], [0, 5]]) == 1.0  # always right
    assert bits_of([[5, 5], [5, 5]]) == 0.0  # chance
    assert bits_of([[9, 0], [7, 0]]) == 0.0  # one and the same answer
    # right in 0.9: 1 - H(0.9) = 1 + 0.9 log2 0.9 + 0.1 log2 0.1
    assert bits_of([[90, 10], [10, 90]]) == pytest.approx(1 + 0.9 * np.log2(0.9) + 0.1 * np.log2(0.1))
    # silent in half of the cases and right in the others: half a bit
    assert bits_of([[5, 0, 5], [0, 5, 5]]) == pytest.approx(0.5)
    assert bits_of([[0, 0], [1, 3]]) == 0.0  # nothing was asked of the one


def test_bits_of_tables():
    perfect = [[[1, 0, 0], [1, 0, 0]]] * 10
    left = [[[1, 0, 0], [0, 1, 0]]] * 10
    assert bits_of_pairs(perfect) == 1.0 and bits_of_pairs(left) == 0.0
    rows = [[] for _ in range(11)]
    rows[2], rows[10] = [0.1, 0.2], [0.8, 0.7]
    assert bits_of_scores(rows) == 1.0
    assert bits_of_scores([[] for _ in range(11)]) == 0.0


def test_what_never_falls_by_hand():
    np.testing.assert_allclose(rising(np.array([0.0, 0.4, 0.2, 0.9])), [0.0, 0.3, 0.3, 0.9])
    np.testing.assert_allclose(rising(np.array([3.0, 2.0, 1.0])), [2.0, 2.0, 2.0])


def row(bits: float, success: float) -> dict[str, str]:
    return {"task": "drawer_open", "kind": "pairs", "bits": str(bits), "success": str(success)}


def test_a_prediction_is_the_curve_and_says_where_it_has_no_data():
    curve = [row(0.0, 0.0), row(0.45, 0.5), row(0.5, 0.6), row(0.55, 0.7), row(1.0, 1.0)]
    half = [[[5, 0, 5], [5, 0, 5]]] * 10
    (found,) = predict({"all": {"pairs": half}}, curve)
    assert found.bits == pytest.approx(0.5) and found.success == pytest.approx(0.6) and found.count == 3
    (unknown,) = predict({"all": {"pairs": [[[1, 0, 0], [1, 0, 0]]] * 10}}, curve)
    assert unknown.success is None and "no data" in str(unknown)
    own = {"all": {"pairs": half}, "drawer_open": {"pairs": [[[1, 0, 0], [1, 0, 0]]] * 10}}
    assert predict(own, curve)[0].bits == 1.0  # the task's own table comes first
    assert predict({"all": {"scores": []}}, curve) == []  # a judge that does not compare


def test_runs_are_read_and_what_is_none_is_refused(tmp_path):
    file = tmp_path / "runs.csv"
    with file.open("w", newline="") as out:
        given = row(0.5, 0.7)
        csv.writer(out).writerows([COLUMNS, [given.get(name, "") for name in COLUMNS]])
    assert read_curve(file)[0]["success"] == "0.7"
    file.write_text("task,kind\na,b\n")
    with pytest.raises(UsageError, match="no table of runs"):
        read_curve(file)
