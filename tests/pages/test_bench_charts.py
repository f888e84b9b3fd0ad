"""What the images of a bench show is what was answered and predicted."""

from typing import Any, cast

import numpy as np
import pytest

from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.figures import share
from rlvlm.judge_bench.items import Item
from rlvlm.judge_bench.prediction import predict
from rlvlm.pages.bench_charts import draw_bench, draw_difficulty, draw_scores, draw_success, draw_worths

RUNS = [
    {"task": task, "kind": "scores", "worth": worth, "before": "0.5", "success": success}
    for task in ("push_block", "number_line")
    for worth, success in (("0.5", "0.2"), ("0.96", "0.9"), ("0.98", "0.9"), ("1.0", "1.0"))
]
SCORES = {"failure": (0.1, 0.1, 0.3), "success": (0.8, 0.9, 0.8), "other task": (0.85, 0.2)}
TEACHER: dict[str, Any] = {
    "push_block": {"scores": [[0.1, 0.1, 0.3], *[[]] * 9, [0.8, 0.9, 0.8]]},
    "cartpole": {"scores": [[0.1], *[[]] * 9, [0.9]]},
}
TEACHER["all"] = TEACHER["push_block"]


def items_and_answers() -> tuple[list[Item], list[Answer]]:
    rows = [
        (Item(kind="video", case=case, goal="g", sides=(), truth=(0.0,), success=case == "success"), value)
        for case, values in SCORES.items()
        for value in values
    ]
    answers = [
        Answer(task="push_block", item=place, swapped=False, status="ok", value=value)
        for place, (_, value) in enumerate(rows)
    ]
    return [item for item, _ in rows], answers


def lines(axes: Any) -> list[Any]:
    return [line for line in axes.get_lines() if line.get_marker() == "o" and len(line.get_xdata())]


def test_scores_stand_in_the_row_of_their_truth_beside_the_share_called_success():
    (axes,) = draw_scores(*items_and_answers(), threshold=0.5).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["success (3)", "failure (3)", "other task (2)"]
    for place, (case, line) in enumerate(zip(("success", "failure", "other task"), lines(axes), strict=True)):
        np.testing.assert_allclose(line.get_xdata(), SCORES[case])
        assert np.abs(np.asarray(line.get_ydata()) - place).max() <= 0.36, "in its own row"
        assert len({*zip(line.get_xdata(), line.get_ydata(), strict=True)}) == len(SCORES[case]), "none hides another"
    assert [text.get_text() for text in axes.texts] == ["100%", "0%", "50%", "called\nsuccess"]


def test_accuracy_by_difficulty_has_its_intervals_and_each_task_a_row():
    hard, easy = [[3, 1, 4], *[[0, 0, 0]] * 9], [*[[0, 0, 0]] * 9, [5, 0, 0]]
    both = (np.array(hard) + np.array(easy)).tolist()
    row: dict[str, Any] = {
        "figures": {"pairs": {"by_difficulty": both}},
        "tasks": {name: {"pairs": {"by_difficulty": bins}} for name, bins in (("a", hard), ("b", easy), ("c", []))},
    }
    axes, by_task = draw_difficulty(row).axes
    bars, accuracy = cast(Any, axes.containers)
    (line,) = lines(axes)
    np.testing.assert_allclose(line.get_ydata(), [75, *[np.nan] * 8, 100])
    found = share(3, 4)
    assert found is not None
    (ends,) = accuracy.lines[2]
    np.testing.assert_allclose(ends.get_segments()[0][:, 1], [100 * found["low"], 100 * found["high"]])
    assert [bar.get_height() for bar in bars] == [50.0, *[0.0] * 9], "undecided"
    assert [label.get_text() for label in by_task.get_yticklabels()] == ["a", "b"], "those that were asked pairs"
    row["tasks"] = {"a": row["tasks"]["a"]}
    assert len(draw_difficulty(row).axes) == 1, "one task says nothing beside all"


def test_this_judge_is_marked_on_its_curve_and_its_worth_on_each_task():
    predictions = [one for one in predict(TEACHER, RUNS) if one.is_asked]
    known, unknown = predictions
    ends = [value for value in (known.low, known.success, known.high) if value is not None]
    assert len(ends) == 3 and unknown.success is None
    (axes,) = draw_success(RUNS[:4], predictions, columns=1).axes
    mark: Any = axes.containers[0]
    assert mark.get_label() == f"this judge, {known.grade}"
    assert mark.lines[0].get_xydata().tolist() == [[pytest.approx(100 * known.worth), pytest.approx(ends[1])]]
    (reach,) = mark.lines[2]
    np.testing.assert_allclose(reach.get_segments()[0][:, 1], [ends[0], max(ends)])
    (axes,) = draw_worths(predictions).axes
    assert [line.get_xdata()[0] for line in lines(axes)] == [100 * prediction.worth for prediction in predictions]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["push_block, scores", "cartpole, scores"]
    # where nothing was asked, or nothing is predicted, there is no image rather than an empty one
    row = {"figures": {"pairs": {}, "scores": {}}, "tasks": {}}
    teaches, answered = draw_bench(row, predictions, RUNS, *items_and_answers())
    assert len(teaches) == 2 and [*answered] == ["scores, by truth"], "no curve of a task that was not asked about"
    assert draw_bench(row, [], [], [], []) == ({}, {})
