"""Charts of what training with a judge may come to: its worth on each task, and its place on the curves of success."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlvlm.judge_bench.prediction import ExpectedSuccess, fit_curves
from rlvlm.pages.charts import COLOURS, INK, STYLE
from rlvlm.pages.judge_charts import THEIRS, WIDTH, shorten

GRADE_COLOURS: dict[str, str] = {
    "good enough": "#2a9d8f",
    "probably good enough": "#7cc4bb",
    "uncertain": "#e9a23b",
    "can be fooled": "#8d6e97",
    "probably too weak": "#f0a48f",
    "too weak": "#e76f51",
}
ASKED_FOR = {"pairs": "comparisons", "scores": "scores"}


def draw_teaching(predictions: Sequence[ExpectedSuccess], runs: Sequence[Mapping[str, str]]) -> dict[str, Figure]:
    """Returns the charts of what a judge would teach, by title.

    Args:
        predictions: predictions for the tasks that were asked about.
        runs: rows of `prediction.read_curve`.
    """
    asked = [(prediction.task, prediction.kind) for prediction in predictions]
    with matplotlib.rc_context(STYLE):
        found = {"worth of its answers, task by task": draw_worths(predictions)} if predictions else {}
        # curves of other tasks show only the limits that the chart of the worth shows too
        for task, kind in dict.fromkeys((run["task"], run["kind"]) for run in runs):
            if (task, kind) in asked:
                own = [run for run in runs if (run["task"], run["kind"]) == (task, kind)]
                name = f"success after training {task} with {ASKED_FOR[kind]} of a judge of some worth"
                found[name] = draw_success(own, predictions, columns=1)
    return found


def draw_worths(predictions: Sequence[ExpectedSuccess]) -> Figure:
    """Draws the worth of a judge's answers on each task, with its 90 % interval, coloured by grade.

    The background shows up to which worth no run with this kind of question learned, and from which all did.
    """
    figure = Figure(figsize=(WIDTH, 1.5 + 0.27 * len(predictions)), layout="constrained")
    axes = figure.add_subplot()
    for place, prediction in enumerate(predictions):
        rows = {"height": 1.0, "linewidth": 0, "zorder": 0}
        if prediction.never is not None:
            axes.barh(place, 100 * prediction.never, color="#fbe9e4", **rows)
        if prediction.always is not None:
            axes.barh(place, 101 - 100 * prediction.always, left=100 * prediction.always, color="#e3f3f1", **rows)
        colour, ends = GRADE_COLOURS[prediction.grade], (100 * prediction.worth_low, 100 * prediction.worth_high)
        axes.plot(ends, (place, place), color=colour, linewidth=5, alpha=0.45, solid_capstyle="butt")
        axes.plot(100 * prediction.worth, place, "o", color=colour, markersize=7, clip_on=False)
    axes.axvline(50, color="#8a979d", linewidth=1, linestyle="--")
    axes.set_yticks(
        range(len(predictions)),
        [f"{shorten(prediction.task, 22)}, {ASKED_FOR[prediction.kind]}" for prediction in predictions],
        color=INK,
    )
    axes.set(xlim=(0, 101), ylim=(len(predictions) - 0.5, -0.5), xlabel="worth of its answers, %; 50 is chance")
    axes.grid(visible=False, axis="y")
    axes.set_title("Worth of its answers (bars: 90 %)")
    present = [grade for grade in GRADE_COLOURS if any(prediction.grade == grade for prediction in predictions)]
    marks = [*axes.plot([], [], "s", color="#f3cfc4"), *axes.plot([], [], "s", color="#bfe3de")]
    marks += [axes.plot([], [], "o", color=GRADE_COLOURS[grade])[0] for grade in present]
    names = ["no run learned", "all runs learned", *present]
    figure.legend(marks, names, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def draw_success(
    runs: Sequence[Mapping[str, str]], predictions: Sequence[ExpectedSuccess] = (), columns: int = 3
) -> Figure:
    """Draws success after training against the worth of a judge's answers: a panel per task, `columns` in a row.

    `runs` are rows of `prediction.read_curve`; the judge of `predictions` is marked.
    """
    curves = fit_curves(runs)
    with matplotlib.rc_context(STYLE):
        rows, width = -(-len(curves) // columns), 3.3 if columns > 1 else WIDTH
        figure = Figure(figsize=(width * min(columns, len(curves)), 2.9 * rows), layout="constrained")
        panels = figure.subplots(rows, min(columns, len(curves)), squeeze=False, sharey=True).ravel()
        for axes, ((task, kind), curve) in zip(panels, curves.items(), strict=False):
            axes.plot(100 * curve.worths, curve.fitted, color=INK, linewidth=2, label="fitted")
            axes.plot(100 * curve.worths, curve.successes, "o", color=COLOURS[0], markersize=5, label="a run")
            axes.axhline(curve.befores.mean(), color=THEIRS, linewidth=1.2, linestyle="--", label="before training")
            for prediction in predictions:
                if (prediction.task, prediction.kind) == (task, kind):
                    _mark(axes, prediction)
            axes.set(xlabel="worth of its answers, %", ylim=(-0.03, 1.05), title=f"{task}, {kind}")
        panels[0].set_ylabel("success after training")
        if columns > 1:
            panels[0].legend(fontsize=8, loc="lower right")
        else:  # the judge may be anywhere in the panel
            figure.legend(fontsize=8, loc="outside lower center", ncols=4, columnspacing=1.2, handlelength=1.6)
        for axes in panels[len(curves) :]:
            axes.set_axis_off()
    return figure


def _mark(axes: Axes, prediction: ExpectedSuccess) -> None:
    """Marks a judge: its worth with the interval, and the expected success if there is one."""
    worth, colour = 100 * prediction.worth, COLOURS[1]
    axes.axvspan(100 * prediction.worth_low, 100 * prediction.worth_high, color=colour, alpha=0.15, linewidth=0)
    if prediction.success is None or prediction.low is None or prediction.high is None:
        axes.axvline(worth, color=colour, linewidth=2, label=f"this judge, {prediction.grade} (no prediction)")
        return
    axes.axvline(worth, color=colour, linewidth=1, linestyle=":")
    reach = [[prediction.success - prediction.low], [prediction.high - prediction.success]]
    look: dict[str, Any] = {"fmt": "D", "color": colour, "markersize": 8, "capsize": 4, "linewidth": 2, "zorder": 3}
    axes.errorbar(
        [worth], [prediction.success], yerr=np.maximum(reach, 0), label=f"this judge, {prediction.grade}", **look
    )
