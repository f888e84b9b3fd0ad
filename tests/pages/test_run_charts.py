import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from rlvlm.pages.charts import show_coinciding
from rlvlm.pages.run_charts import column, draw_learning_curve, draw_spent, outcome, scores_by_progress, write_plots
from rlvlm.runs.files.records import score_row

ENDS = ["correct", "incorrect", "truth ties", "no preference", "invalid", "failed"]


def test_every_answer_has_one_outcome():
    ends = [("ok", "1"), ("ok", "0"), ("ok", ""), ("no_preference", ""), ("invalid", ""), ("failed", "")]
    assert [outcome({"status": status, "correct": correct}) for status, correct in ends] == ENDS
    kept = [("ok", True), ("ok", False), ("ok", None)]  # of an example, which is no line of a table
    assert [outcome({"status": status, "correct": correct}) for status, correct in kept] == ENDS[:3]
    values = column([{"x": "1.5"}, {"x": ""}], "x")
    assert values[0] == 1.5 and values[1] != values[1], "an empty cell is no number"


@pytest.mark.slow
def test_the_queries_so_far_end_at_all_of_them(filled):
    axes = Figure().subplots()
    draw_spent(axes, filled.queries.read(), last=4.0)
    assert axes.get_title() == "Queries asked so far, 12 in all"
    corners = np.concatenate([path.vertices for collection in axes.collections for path in collection.get_paths()])
    assert corners[:, 1].max() == 12 and corners[corners[:, 1] == 12, 0].max() == 4.0, "up to the end of the run"


@pytest.mark.slow
def test_the_plots_that_there_is_data_for_are_written(filled):
    files = write_plots(filled, "t")
    assert [file.name for file in files] == ["learning_curve.png", "vlm_accuracy.png", "labels_over_time.png"]
    for file in files:
        with Image.open(file) as image:
            assert min(image.size) > 300
    assert sorted(file.name for file in filled.plots.iterdir()) == sorted(file.name for file in files)
    filled.queries.path.unlink()
    assert [file.name for file in write_plots(filled, "t")] == ["learning_curve.png"]
    filled.evaluations.path.unlink()
    assert write_plots(filled, "t") == []


def test_a_policy_is_drawn_under_both_decodings_from_before_its_training_on():
    row = {"episode_return": "1", "learned_return": "", "episodes": "50"}
    evaluations = [
        row | {"step": "0", "success_rate": "1", "sampled_success_rate": ".8", "strict_success_rate": "1"},
        row | {"step": "900", "success_rate": "1", "sampled_success_rate": ".9", "strict_success_rate": "1"},
    ]
    for one, above in zip(evaluations, (".5", ".9"), strict=True):
        one["sampled_strict_success_rate"] = above
    rows = [{"env_steps": 0}, {"env_steps": 900, "train/episode_return": 0.5, "replies/invalid_share": 0.25}]
    figure = draw_learning_curve(evaluations, [], rows, "t")
    plt.close(figure)
    success, returns, health = figure.axes
    lines = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in success.get_lines()}
    assert list(lines) == ["greedy", "sampled", "sampled, return above 0"], "what is equal is drawn once"
    assert lines["sampled, return above 0"] == pytest.approx([50, 90])
    assert [line.get_label() for line in returns.get_lines()] == ["evaluation", "training"]
    assert np.asarray(health.get_lines()[0].get_ydata())[1] == 25
    rows[1] |= {"replies/invalid_share": 0.0, "groups/kept_share": 1.0}
    assert len(draw_learning_curve(evaluations, [], rows, "t").axes) == 2, "shares that are always none or all"


@pytest.mark.slow
def test_scores_have_a_plot_of_their_own(filled, make_scores):
    filled.queries.path.unlink()
    filled.scores.append(map(score_row, make_scores(2_000), range(9)))
    assert [file.name for file in write_plots(filled, "t")] == ["learning_curve.png", "vlm_scores.png"]
    groups = scores_by_progress(filled.scores.read())
    assert {name: values.tolist() for name, values in groups.items()} == {
        "0 to 10 %": [pytest.approx(0.1)],
        "50 to 60 %": [pytest.approx(0.8)],
        "90 to 100 %": [pytest.approx(0.7)],
    }
    assert {outcome(row) for row in filled.scores.read()} == {"scored", "invalid", "failed"}
    filled.scores.path.unlink()
    filled.scores.append(map(score_row, make_scores(2_000)[3:], range(9)))
    assert "vlm_scores.png" not in [file.name for file in write_plots(filled, "t")], "none of them can be read"


@pytest.mark.parametrize(
    ("curves", "note", "widths"),
    [
        ({"a": [0, 0.5, 1], "b": [0, 0.5, 1]}, "a and b coincide", [3.8, 2.0]),
        ({"a": [0, 0.2, 0.4], "b": [0, 0.8, 1.0]}, "", [2.0, 2.0]),  # they begin alike
        ({"a": [0, 1, 1], "b": [0.5, 1, 1]}, "a and b coincide in part", [3.8, 2.0]),
        ({"a": [0, 0, 1], "b": [1, 1, 0], "c": [0, 0, 1]}, "a and c coincide", [3.8, 2.0, 2.0]),
        ({"a": [0, 0, 1], "b": [0.5, 1, 1], "c": [0, 0, 1], "d": [0.5, 1, 1]}, "a and c coincide; b and d coincide",
         [3.8, 3.8, 2.0, 2.0]),
        ({"a": [0, 0, 1, 1], "b": [1, 1, 0, 0], "c": [0, 0, 0, 0]}, "a, b and c coincide in part", [5.6, 3.8, 2.0]),
        ({"a": [np.nan, 0.5, 1], "b": [0, np.nan, np.nan]}, "", [2.0, 2.0]),  # never at one place
        ({"a": [0.5], "b": [0.5]}, "a and b coincide", [3.8, 2.0]),
    ],
)  # fmt: skip
def test_curves_that_hide_each_other_are_stripes_and_named(curves, note, widths):
    axes = Figure().add_subplot()
    for name, values in curves.items():
        axes.plot(np.arange(len(values)), values, linewidth=2.0, label=name)
    axes.axhline(0.5)  # no curve, and none that can hide one
    axes.set_ylim(0, 1)
    assert show_coinciding(axes) == note
    assert [line.get_linewidth() for line in axes.get_lines()[:-1]] == pytest.approx(widths)
