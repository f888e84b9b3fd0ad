"""Figures of a judge's bench: what it would teach, accuracy by difficulty, scores by truth.

Each is as wide as a column of the page, which fits on a phone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.controls import FAILURES
from rlvlm.judge_bench.figures import Floats
from rlvlm.judge_bench.items import CASES, NUM_BINS, Item
from rlvlm.judge_bench.prediction import ExpectedSuccess, fit_curves
from rlvlm.pages.charts import COLOURS, INK, OUTCOMES, STYLE
from rlvlm.pages.judge_charts import THEIRS, shares_of, shorten

WIDTH = 5.2
"""Width of a figure, in inches."""
GRADE_COLOURS: dict[str, str] = {
    "good enough": "#2a9d8f",
    "probably good enough": "#7cc4bb",
    "uncertain": "#e9a23b",
    "can be fooled": "#8d6e97",
    "probably too weak": "#f0a48f",
    "too weak": "#e76f51",
}
ASKED_FOR = {"pairs": "comparisons", "scores": "scores"}
_GOOD, _MISS, _BAD, _CONTROL = "#2a9d8f", "#e9a23b", "#e76f51", "#8d6e97"
_ROWS = (
    {"success": _GOOD, "nearer": _GOOD, "near miss": _MISS, "cut short": _BAD, "failure": _BAD, "farther": _BAD}
    | dict.fromkeys(FAILURES, _CONTROL)
    | {"jump": _GOOD, "other camera": _GOOD, "mirrored": _GOOD}
)
"""Cases and controls from top to bottom, each with its colour: green if the goal is reached."""
assert set(CASES) < set(_ROWS)


def draw_bench(
    row: Mapping[str, Any],
    predictions: Sequence[ExpectedSuccess],
    runs: Sequence[Mapping[str, str]],
    items: Sequence[Item],
    answers: Sequence[Answer],
) -> tuple[dict[str, Figure], dict[str, Figure]]:
    """Returns two sets of figures by title: what the judge would teach, and how it answers.

    Args:
        row: row returned by `judge_bench.bench.summarise`.
        predictions: predictions for the tasks that were asked about.
        runs: rows of `prediction.read_curve`.
        items: [N] in the order of asking.
        answers: [N] in the order of asking.
    """
    asked = [(prediction.task, prediction.kind) for prediction in predictions]
    with matplotlib.rc_context(STYLE):
        teaches = {"worth of its answers, task by task": draw_worths(predictions)} if predictions else {}
        # curves of other tasks show only the limits that the figure of the worth shows too
        for task, kind in dict.fromkeys((run["task"], run["kind"]) for run in runs):
            if (task, kind) in asked:
                own = [run for run in runs if (run["task"], run["kind"]) == (task, kind)]
                name = f"success after training {task} with {ASKED_FOR[kind]} of a judge of some worth"
                teaches[name] = draw_success(own, predictions, columns=1)
        answered = {}
        if any(map(np.any, row["figures"]["pairs"].get("by_difficulty", []))):
            answered["accuracy on pairs, by difficulty"] = draw_difficulty(row)
        if any(item.case in _ROWS and np.isfinite(answer.value) for item, answer in zip(items, answers, strict=True)):
            answered["scores, by truth"] = draw_scores(items, answers, row["figures"]["scores"].get("threshold"))
    return teaches, answered


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


def draw_difficulty(row: Mapping[str, Any]) -> Figure:
    """Draws the share of right labels among the decided by the gap in progress, with 95 % intervals, and the share of
    undecided or unread answers; below, each task separately if there are several.
    """
    tasks = {
        task: np.array(figures["pairs"].get("by_difficulty", np.zeros((NUM_BINS, 3))))
        for task, figures in row["tasks"].items()
    }
    tasks = {task: counts for task, counts in tasks.items() if counts.any()} if len(tasks) > 1 else {}
    height = 0.25 * len(tasks) + 0.4
    figure = Figure(figsize=(WIDTH, 3.4 + (height if tasks else 0)), layout="constrained")
    panels = figure.subplots(
        2 if tasks else 1, 1, sharex=True, squeeze=False, height_ratios=(2.9, height) if tasks else (1,)
    )[:, 0]
    axes, places = panels[0], np.arange(NUM_BINS)
    right, wrong, rest = np.array(row["figures"]["pairs"]["by_difficulty"], int).T
    values, low, high = (100 * each for each in shares_of(right, right + wrong))
    silent = 100 * rest / np.maximum(right + wrong + rest, 1)
    axes.bar(places, silent, color=OUTCOMES["no preference"], width=0.86, linewidth=0, label="undecided or unread")
    axes.axhline(50, color="#8a979d", linewidth=1, linestyle="--")
    error = np.abs(np.stack([values - low, high - values]))
    look: dict[str, Any] = {"color": _GOOD, "marker": "o", "markersize": 5, "linewidth": 2, "elinewidth": 1.2}
    axes.errorbar(places, values, yerr=error, capsize=3, label="right, of the decided", **look)
    axes.set(ylabel="answers, %", ylim=(0, 104), xlim=(-0.5, NUM_BINS - 0.5))
    axes.set_title("Pairs by difficulty (bars: 95 %)")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    if tasks:
        shares = np.stack([100 * shares_of(counts[:, 0], counts[:, :2].sum(1))[0] for counts in tasks.values()])
        panels[1].imshow(shares, cmap="RdYlGn", vmin=-20, vmax=120, aspect="auto", alpha=0.75)
        for line, place in np.ndindex(*shares.shape):
            if np.isfinite(shares[line, place]):
                panels[1].text(
                    place, line, f"{shares[line, place]:.0f}", ha="center", va="center", fontsize=8, color=INK
                )
        panels[1].set_yticks(range(len(tasks)), [shorten(task, 18) for task in tasks], fontsize=8)
        panels[1].grid(visible=False)
        panels[1].set_title("right on each task, % of the decided", fontsize=9, fontweight="normal")
    panels[-1].set_xticks(places, [f"{10 * place}-{10 * place + 10}" for place in places], fontsize=7.5)
    panels[-1].set_xlabel("gap in true progress, %: hard pairs left, easy pairs right")
    return figure


def draw_scores(items: Sequence[Item], answers: Sequence[Answer], threshold: float | None) -> Figure:
    """Draws every score of an episode or turn by its case, with the middle half of each row; and the share of scores
    from `threshold` on, if there is one.
    """
    scored = [
        (item.case, answer.value) for item, answer in zip(items, answers, strict=True) if np.isfinite(answer.value)
    ]
    by_case = {case: np.array([value for of, value in scored if of == case]) for case in _ROWS}
    by_case = {case: values for case, values in by_case.items() if len(values)}
    figure = Figure(figsize=(WIDTH, 1.1 + 0.42 * len(by_case)), layout="constrained")
    axes = figure.add_subplot()
    for place, (case, values) in enumerate(by_case.items()):
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
        axes.plot([low, high], [place, place], color=_ROWS[case], linewidth=13, alpha=0.22, solid_capstyle="butt")
        axes.plot(values, place + _swarm(values), "o", color=_ROWS[case], markersize=3.2, alpha=0.75, linewidth=0)
        axes.plot([middle, middle], [place - 0.3, place + 0.3], color=INK, linewidth=1.8)
        if threshold is not None:
            axes.text(1.04, place, f"{(values >= threshold).mean():.0%}", va="center", fontsize=9, color=INK)
    if threshold is not None:
        axes.axvline(threshold, color=INK, linewidth=1, linestyle="--")
        axes.text(1.04, -0.75, "called\nsuccess", va="bottom", fontsize=8, color="#6b7a80")
    axes.set_yticks(range(len(by_case)), [f"{case} ({len(values)})" for case, values in by_case.items()], color=INK)
    axes.set(xlim=(-0.03, 1.03), ylim=(len(by_case) - 0.5, -0.6))
    line = "" if threshold is None else "; dashed: best threshold"
    axes.set(xlabel=f"score; bar: middle half, stroke: median{line}")
    axes.grid(visible=False, axis="y")
    axes.set_title("Scores by truth")
    return figure


def _swarm(values: Floats) -> Floats:
    """Returns [N] offsets that place equal scores side by side, within 0.36 of a row."""
    bins = np.round(50 * values).astype(int)
    aside = np.zeros(len(values))
    widest = max(np.unique(bins, return_counts=True)[1])
    for level in np.unique(bins):
        (places,) = np.nonzero(bins == level)
        aside[places] = (np.arange(len(places)) - (len(places) - 1) / 2) * min(0.12, 0.72 / widest)
    return aside
