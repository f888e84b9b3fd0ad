import csv

import numpy as np
import pytest

from benchmarks.expected_success import coverage, of_curve, of_trained
from rlvlm.core.errors import UsageError
from rlvlm.judge_bench.prediction import (
    COLUMNS,
    TRAINED_FILE,
    bits_of,
    predict,
    predict_row,
    read_curve,
    shares_of_pairs,
    shares_of_scores,
    worth_interval,
    worth_of,
)


def test_the_worth_of_labels_by_hand():
    assert worth_of(1, 0) == pytest.approx(1.0)
    assert worth_of(0.5, 0.5) == pytest.approx(0.5) == worth_of(0, 0)  # chance, and silence
    assert worth_of(0.9, 0.1) == pytest.approx(0.9)
    assert worth_of(0.1, 0.9) == pytest.approx(0.1)  # teaches the wrong way round
    # silent in half of the cases and right in the others: half a bit, and 1 - H(0.89) = 0.5
    assert bits_of(0.5, 0) == 0.5 and worth_of(0.5, 0) == pytest.approx(0.89, abs=1e-3)
    # 1 - H(0.9) = 1 + 0.9 log2 0.9 + 0.1 log2 0.1
    assert bits_of(0.9, 0.1) == pytest.approx(1 + 0.9 * np.log2(0.9) + 0.1 * np.log2(0.1))


def test_the_worth_of_tables():
    perfect = [[[1, 0, 0], [1, 0, 0]]] * 10
    left = [[[3, 0, 0], [0, 1, 0]]] * 10  # asked more often where left is right: nothing is won by that
    wrong = [[[1, 3, 0], [1, 3, 0]]] * 10
    assert [worth_of(*shares_of_pairs(one)) for one in (perfect, left, wrong)] == pytest.approx([1.0, 0.5, 0.25])
    rows = [[] for _ in range(11)]
    assert worth_of(*shares_of_scores(rows)) == pytest.approx(0.5)
    rows[2], rows[10] = [0.1, 0.2], [0.8, 0.7]
    assert worth_of(*shares_of_scores(rows)) == pytest.approx(1.0)
    rows[2], rows[10] = rows[10], rows[2]
    assert worth_of(*shares_of_scores(rows)) == pytest.approx(0.0)
    rows[2], rows[10] = [0.0, 1.0, 0.0, 0.0, 1.0], [1.0, 1.0]  # two of five failures are called successes
    assert worth_of(*shares_of_scores(rows)) == pytest.approx(0.8)


@pytest.mark.parametrize("kind", ["pairs", "scores"])
def test_the_interval_of_a_worth_holds_it_nine_times_of_ten_and_shrinks(kind):
    rng = np.random.default_rng(0)

    def table_of(count: int):
        right = rng.binomial(count, 0.8, 2).tolist()
        if kind == "pairs":
            return [[[one, count - one, 0] for one in right]]
        # normal scores whose means are 1.19 deviations apart have an AUC of .8
        return [[]] * 9 + [rng.normal(0, 1, count).tolist(), rng.normal(1.19, 1, count).tolist()]

    for count, widest in ((20, 0.3), (400, 0.06)):
        ends = np.array([worth_interval(kind, table_of(count)) for _ in range(200)])
        assert 0.83 < np.mean((ends[:, 0] <= 0.8) & (ends[:, 1] >= 0.8)) < 0.97
        assert (ends[:, 1] - ends[:, 0]).mean() < widest


def row(worth: float, success: float) -> dict[str, str]:
    return {"task": "drawer_open", "kind": "pairs", "worth": str(worth), "before": "0.1", "success": str(success)}


def table(accuracy: float) -> list[list[list[float]]]:
    return [[[10_000 * accuracy, 10_000 * (1 - accuracy), 0]] * 2] * 10  # so many answers that chance has no part


def test_a_prediction_is_the_curve_and_says_where_it_has_no_data():
    # at 0.75 three seeds, whose mean is a point; 0.79 is below it and is pooled with it
    curve = [row(0.5, 0.0), row(0.75, 0.5), row(0.75, 0.6), row(0.75, 0.7), row(0.79, 0.6), row(1.0, 1.0)]
    (found,) = predict({"all": {"pairs": table(0.75)}}, curve)
    assert found.worth == pytest.approx(0.75) and found.success == pytest.approx(0.6) and found.count == 4
    # without its judge 0.5 is predicted at 0.6, and so is 1.0: left out, they are off by -0.6 and 0.4. The drawer's
    # trained judges, off by -0.5 at most, lie within
    assert (found.low, found.high) == (0.0, 1.0) and found.before == pytest.approx(0.1)
    for accuracy in (1.0, 0.25):  # one run near it, and none: a judge that misleads
        (unknown,) = predict({"all": {"pairs": table(accuracy)}}, curve)
        assert unknown.success is None
    assert not found.is_asked
    own = {"all": {"pairs": table(0.75)}, "drawer_open": {"pairs": table(1.0)}}
    asked = predict(own, curve)[0]
    assert asked.worth == pytest.approx(1.0) and asked.is_asked  # the task's own table comes first
    assert predict({"all": {"scores": []}}, curve) == []  # a judge that does not compare


def test_the_range_of_the_expected_success_holds_judges_that_were_left_out():
    runs, trained = read_curve(), read_curve(TRAINED_FILE)
    of_runs, of_judges = of_curve(runs, trained), of_trained(trained, runs, trained)
    assert len(of_runs) >= 59 and coverage(of_runs) >= 0.85
    assert len(of_judges) >= 13 and coverage(of_judges) >= 0.85
    assert sum(row["fooled"] == "1" for row in trained) >= 5, "judges that a policy can fool are among them"
    widths = [run.high - run.low for run in (*of_runs, *of_judges)]
    assert min(widths) >= 0.05 and np.mean(widths) < 0.7, "no range has no width, and none says nothing"


def test_an_exploitable_judge_can_lose_everything():
    row = {"task": "push_block", "kind": "scores", "worth": "0.9", "before": "0.5", "success": "0.9"}
    runs = [row | {"worth": str(worth)} for worth in (0.95, 1.0, 1.0)]
    scores = [[0.0] * 20, *[[] for _ in range(9)], [1.0] * 20]
    fault = {"name": "pays", "evidence": "", "is_exploitable": True, "kind": "scores", "tasks": ()}
    (found,) = predict_row(
        {
            "faults": [],
            "tasks": {"push_block": {"faults": [fault]}},
            "teacher": {"all": {}, "push_block": {"scores": scores}},
        },
        runs,
    )
    assert found.grade == "can be fooled" and found.low == 0 and found.success == pytest.approx(0.9)


def test_whether_a_judge_is_good_enough():
    # drawer_open: 0.6 and 0.7 learn nothing, 0.75 and more do; sweep_into was never trained with such judges
    curve = [row(0.6, 0.0), row(0.7, 0.1), row(0.75, 0.9), row(0.75, 1.0), row(0.8, 1.0), row(0.9, 1.0)]
    grades = {}
    for accuracy in (0.55, 0.65, 0.82, 0.99):
        teacher = {task: {"pairs": table(accuracy)} for task in ("all", "drawer_open", "sweep_into")}
        known, other = predict(teacher, curve)
        assert (other.task, other.never, other.always) == ("sweep_into", 0.7, 0.75) and other.success is None
        grades[accuracy] = known.grade, other.grade
    assert grades == {
        0.55: ("probably too weak", "probably too weak"),  # two runs near it are too few, so all runs decide
        0.65: ("uncertain", "probably too weak"),  # 0.05 is expected, and .75 learned against the others' prediction
        0.82: ("good enough", "probably good enough"),
        0.99: ("probably good enough", "probably good enough"),
    }
    # where luck decides: a run of worth 0.7 learned, and one of 0.75 did not
    mixed = [row(0.6, 0.0), row(0.7, 1.0), row(0.75, 0.0), row(0.8, 1.0)]
    known, other = predict({task: {"pairs": table(0.72)} for task in ("all", "drawer_open", "sweep_into")}, mixed)
    assert (other.never, other.always, other.grade) == (0.6, 0.8, "uncertain") and known.grade == "uncertain"
    # successes alone say nothing about a judge, and no runs nothing about training
    assert predict({"all": {}, "push_block": {"scores": [[]] * 10 + [[0.9]]}}, curve) == []
    (one,) = predict({"all": {}, "sweep_into": {"pairs": table(0.9)}}, [])
    assert (one.never, one.always, one.grade) == (None, None, "uncertain")


def test_runs_are_read_and_other_files_are_refused(tmp_path):
    file = tmp_path / "runs.csv"
    with file.open("w", newline="") as out:
        given = row(0.5, 0.7)
        csv.writer(out).writerows([COLUMNS, [given.get(name, "") for name in COLUMNS]])
    assert read_curve(file)[0]["success"] == "0.7"
    file.write_text("task,kind\na,b\n")
    with pytest.raises(UsageError, match="no table of runs"):
        read_curve(file)
