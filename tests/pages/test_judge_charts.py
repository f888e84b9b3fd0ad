"""Charts show what was answered and predicted, whoever kept the answers."""

from typing import Any, cast

import numpy as np
import pytest

from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.figures import share
from rlvlm.judge_bench.items import Item
from rlvlm.judge_bench.prediction import predict
from rlvlm.pages.answers import Answers
from rlvlm.pages.bench_charts import draw_success, draw_teaching, draw_worths
from rlvlm.pages.judge_charts import answer_charts, draw_accuracies, draw_difficulty, draw_scores, score_groups

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


def scored() -> Answers:
    source = Answers(name="a judge")
    for case, values in SCORES.items():
        for value in values:
            item = Item(kind="video", case=case, goal="g", sides=(), truth=(0.0,), success=case == "success")
            source.items.append(item)
            place = len(source.answers)
            source.answers.append(Answer(task="push_block", item=place, swapped=False, status="ok", value=value))
    return source


def compared(name: str, *rows: tuple[float, str]) -> Answers:
    """Answers to pairs, each with the gap in the truth and the label."""
    source = Answers(name=name)
    for place, (gap, label) in enumerate(rows):
        item = Item(kind="pair", case="pair", goal="g", sides=(), truth=(0.0, gap))
        status = "no_preference" if label == "tie" else "ok"
        source.add(item, Answer(task=name, item=place, swapped=False, status=status, label=label), ("", ""))
    return source


def lines(axes: Any) -> list[Any]:
    return [line for line in axes.get_lines() if line.get_marker() == "o" and len(line.get_xdata())]


def test_scores_stand_in_the_row_of_their_truth_beside_the_share_called_success():
    (axes,) = draw_scores(score_groups(scored()), threshold=0.5).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["success (3)", "failure (3)", "other task (2)"]
    for place, (case, line) in enumerate(zip(("success", "failure", "other task"), lines(axes), strict=True)):
        np.testing.assert_allclose(line.get_xdata(), SCORES[case])
        assert np.abs(np.asarray(line.get_ydata()) - place).max() <= 0.36, "in its own row"
        assert len({*zip(line.get_xdata(), line.get_ydata(), strict=True)}) == len(SCORES[case]), "none hides another"
    assert [text.get_text() for text in axes.texts] == ["100%", "0%", "50%", "from\nthere"]


def test_bars_are_shares_of_their_difficulty_bin_beside_the_accuracy_with_its_interval():
    hard = [(0.05, "right")] * 3 + [(0.05, "left")] + [(0.05, "tie")] * 4
    both = compared("all", *hard, *[(1.0, "right")] * 5)
    (axes,) = draw_difficulty([both]).axes
    bars = {bar.get_label(): [part.get_height() for part in bar] for bar in cast(Any, axes.containers)[:-1]}
    assert bars == {
        "correct": pytest.approx([37.5, *[0] * 8, 100]),
        "incorrect": pytest.approx([12.5, *[0] * 9]),
        "no preference": pytest.approx([50, *[0] * 9]),
    }
    (line,) = lines(axes)
    np.testing.assert_allclose(line.get_ydata(), [75, *[np.nan] * 8, 100])
    found = share(3, 4)
    assert found is not None
    (ends,) = cast(Any, axes.containers[-1]).lines[2]
    np.testing.assert_allclose(ends.get_segments()[0][:, 1], [100 * found["low"], 100 * found["high"]])
    assert [text.get_text() for text in axes.texts if text.get_position()[1] > 100] == ["8", *["0"] * 8, "5"]


def test_no_bar_of_a_run_holds_much_more_than_a_tenth():
    gaps = [(number / 1_000) ** 4 for number in range(1, 1_001)]  # more than half of them below a tenth of the widest
    (axes,) = draw_difficulty([compared("run", *((gap, "right") for gap in gaps))], by_count=True).axes
    counts = [int(text.get_text().replace(",", "")) for text in axes.texts if text.get_position()[1] > 100]
    assert len(counts) == 10 and max(counts) <= 101


def test_each_task_has_a_row_of_accuracies():
    parts = [compared("a", (0.05, "right"), (0.05, "left")), compared("b", (1.0, "right"))]
    (axes,) = draw_accuracies(parts).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert [(text.get_text(), text.get_position()) for text in axes.texts] == [("50", (0, 0)), ("100", (9, 1))]
    whole = compared("all", (0.05, "right"), (1.0, "right"))
    assert "accuracy by difficulty, one row each" in answer_charts([whole], [*parts, compared("c")])
    assert "accuracy by difficulty, one row each" not in answer_charts([whole], parts[:1]), (
        "one says nothing beside all"
    )


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
    assert len(draw_teaching(predictions, RUNS)) == 2, "no curve of a task that was not asked about"
    # where nothing was asked, or nothing is predicted, there is no chart rather than an empty one
    assert draw_teaching([], []) == {} and answer_charts([compared("none")]) == {}
    assert [*answer_charts([scored()])] == ["scores, by truth"]
