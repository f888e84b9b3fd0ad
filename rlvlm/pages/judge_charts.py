"""Figures of a judge report, each with all sources."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray
from rlvlm.judge_bench.figures import Floats, confidences, share
from rlvlm.judge_bench.items import NUM_BINS
from rlvlm.judges.agreement import Reliability, calibration_error, reliability
from rlvlm.pages.answers import GIVEN, OUTCOMES, TRUTHS, Recorded, by_bin, confusion, outcomes
from rlvlm.pages.charts import COLOURS as LINES
from rlvlm.pages.charts import INK, STYLE, save, show_coinciding, stack_shares
from rlvlm.pages.charts import OUTCOMES as OUTCOME_COLOURS
from rlvlm.preferences.config import THEIR_TASKS
from rlvlm.preferences.teachers import SHARES

COLOURS = {**OUTCOME_COLOURS, "not checked": "#d9c9a3"}
THEIRS = "#9aa5ab"
_MAX_NAME = 34
_BINS = np.arange(NUM_BINS)
_CENTRED: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9}

REFERENCE = "RL-VLM-F (Wang et al. 2024), read off their figure"


def draw_all(sources: Sequence[Recorded], folder: Path) -> dict[str, Path]:
    """Draws every figure with data into `folder`; returns the files by name, in the order of the page."""
    wanted: dict[str, Callable[[Sequence[Recorded]], Figure]] = {}
    if any(source.has_truth for source in sources):
        wanted["difficulty"] = draw_difficulty
        wanted["accuracy"] = draw_accuracy
        wanted["confusion"] = draw_confusion
    if any(len(_sure(source)) for source in sources):
        wanted["calibration"] = draw_calibration
    wanted["outcomes"] = draw_outcomes
    if any(len(source.latencies) for source in sources):
        wanted["latency"] = draw_latency
    with matplotlib.rc_context(STYLE):
        return {name: save(draw(sources), folder / f"{name}.png") for name, draw in wanted.items()}


def draw_difficulty(sources: Sequence[Recorded]) -> Figure:
    """Draws the status of the answers by difficulty: a panel per source, and the reference's task of the same name."""
    known = [source for source in sources if source.has_truth]
    tasks = list(dict.fromkeys(THEIR_TASKS[source.task] for source in known if source.task in THEIR_TASKS))
    figure = Figure(figsize=(9, 2.7 * (len(known) + len(tasks)) + 0.6), layout="constrained")
    rows = figure.subplots(len(known) + len(tasks), 1, sharex=True, squeeze=False)
    for axes, source in zip(rows[:, 0], known, strict=False):
        counts = by_bin(source)
        totals = np.sum(list(counts.values()), axis=0)
        shares = {name: 100 * counts[name] / np.maximum(totals, 1) for name in OUTCOMES if counts[name].any()}
        stack_shares(axes, shares, COLOURS)
        for place, total in enumerate(totals):
            axes.text(place, 102, f"{total:,}", ha="center", va="bottom", fontsize=8, color="#6b7a80")
        axes.set_title(f"{shorten(source.name)}: {totals.sum():,} answers", pad=18)
    for axes, task in zip(rows[len(known) :, 0], tasks, strict=True):
        known_shares = zip(("correct", "incorrect", "no preference"), SHARES[task].T, strict=True)
        theirs: dict[str, FloatArray] = dict(known_shares)
        stack_shares(axes, theirs, COLOURS, alpha=0.5, hatch="///", edgecolor="white")
        axes.set_title(f"published, for comparison: {task}, {REFERENCE}", color="#6b7a80")
    for axes in rows[:, 0]:
        axes.set(ylabel="answers, %", ylim=(0, 100))
        axes.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), fontsize=9)
    _label_bins(rows[-1, 0])
    return figure


def draw_accuracy(sources: Sequence[Recorded]) -> Figure:
    """Draws the share of right labels among the decided by difficulty, with 95 % intervals and published curves."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.add_subplot()
    ours = {THEIR_TASKS.get(source.task) for source in sources}
    for task, shares in sorted(SHARES.items(), key=lambda item: item[0] in ours):  # ours last, so on top
        look = {"color": "#5f6b70", "linewidth": 2, "label": f"theirs: {task}"}
        if task not in ours:
            look = {"color": THEIRS, "linewidth": 0.9, "alpha": 0.7}
        axes.plot(_BINS, decided_accuracy(shares), linestyle="--", zorder=1, **look)
    axes.plot([], [], color=THEIRS, linestyle="--", linewidth=0.9, label="published: other tasks")
    curves: dict[str, Line2D] = {}
    for source, colour in _coloured(sources):
        counts = by_bin(source)
        checked = counts["correct"] + counts["incorrect"]
        values, low, high = (100 * each for each in shares_of(counts["correct"], checked))
        if checked.any():
            axes.fill_between(_BINS, low, high, color=colour, alpha=0.15, linewidth=0)
            look = {"color": colour, "marker": "o", "markersize": 5, "linewidth": 2.2, "label": shorten(source.name)}
            (curves[look["label"]],) = axes.plot(_BINS, values, **look)
    axes.axhline(50, color="#c9cfd2", linewidth=1, zorder=0)
    axes.text(NUM_BINS - 0.55, 50, "guessing", va="bottom", ha="right", fontsize=8, color="#8a979d")
    axes.set(ylabel="accuracy on decided pairs, %", ylim=(0, 104), xlim=(-0.5, NUM_BINS - 0.5))
    axes.set_title("Accuracy on decided pairs, by difficulty (bands: 95 %)")
    axes.legend(loc="lower right", fontsize=9, title=show_coinciding(axes, curves))
    _label_bins(axes)
    return figure


def draw_confusion(sources: Sequence[Recorded]) -> Figure:
    """Draws counts of truths against answers, shaded by the share of the row."""
    figure = Figure(figsize=(max(4.6 * len(sources), 5.6), 3.6), layout="constrained")
    panels = figure.subplots(1, len(sources), squeeze=False)
    for axes, source in zip(panels[0], sources, strict=True):
        table = confusion(source)
        rows = [row for row in range(len(TRUTHS)) if table[row].any()]
        shares = table[rows] / np.maximum(table[rows].sum(1, keepdims=True), 1)
        # a scale that ends at 1.25 keeps the darkest cell light enough for black numbers
        axes.imshow(shares, cmap="GnBu", vmin=0, vmax=1.25, aspect="auto")
        for row, column in np.ndindex(*shares.shape):
            if count := table[rows[row], column]:
                axes.text(column, row, f"{count:,}\n{100 * shares[row, column]:.0f} %", color=INK, **_CENTRED)
        axes.set_xticks(range(len(GIVEN)), [name.replace(" ", "\n") for name in GIVEN])
        axes.set_yticks(range(len(rows)), [TRUTHS[row] for row in rows])
        axes.set(xlabel="said", ylabel="true")
        axes.set_title(shorten(source.name))
        axes.grid(visible=False)
    return figure


def draw_calibration(sources: Sequence[Recorded]) -> Figure:
    """Draws accuracy against confidence, and the number of answers behind each point."""
    figure = Figure(figsize=(6.6, 6.2), layout="constrained")
    axes, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1))
    axes.plot([50, 100], [50, 100], color=THEIRS, linestyle="--", linewidth=1.2, label="perfectly calibrated")
    edges = np.linspace(50, 100, NUM_BINS + 1)
    drawn = [(source, colour, table) for source, colour in _coloured(sources) if len(table := _sure(source))]
    width = 5 / (len(drawn) + 0.4)
    lowest, curves = 50.0, {}
    for place, (source, colour, table) in enumerate(drawn):
        # between two sides the confidence is at least one half, so the bins begin there
        found: Reliability = reliability(table[:, 0], table[:, 1] > 0, NUM_BINS, lowest=0.5)
        ece = calibration_error(table[:, 0], table[:, 1] > 0, lowest=0.5)
        # back from shares to counts, which Wilson's interval needs
        hits = np.round(np.nan_to_num(found.true * found.counts)).astype(int)
        values, low, high = shares_of(hits, found.counts)
        has = found.counts > 0
        points = 100 * np.stack([found.sure, found.true])[:, has]
        error = 100 * np.abs(np.stack([values - low, high - values])[:, has])
        look = {"color": colour, "marker": "o", "markersize": 5, "linewidth": 2, "elinewidth": 1, "capsize": 2}
        bars = axes.errorbar(*points, yerr=error, label=f"{shorten(source.name)}: ECE {100 * ece:.1f} %", **look)
        curves[shorten(source.name)] = bars.lines[0]
        counts.bar(edges[:-1] + (place + 0.7) * width, found.counts, width=width, color=colour)
        lowest = min(lowest, 100 * float(np.nanmin(found.true)))
    axes.set(ylabel="right, %", ylim=(min(44.0, lowest - 4), 104), xlim=(49.5, 101))
    axes.set_title("Accuracy against confidence (bars: 95 %)")
    axes.legend(loc="lower right", fontsize=9, title=show_coinciding(axes, curves))
    counts.set(xlabel="probability of the chosen side against the other, %", ylabel="answers")
    silent = [shorten(source.name) for source in sources if not len(_sure(source))]
    if silent:
        axes.text(50, 101, f"without probabilities: {', '.join(silent)}", va="top", fontsize=8, color="#6b7a80")
    return figure


def draw_outcomes(sources: Sequence[Recorded]) -> Figure:
    """Draws the outcomes of all answers, one bar per source."""
    figure = Figure(figsize=(9, 0.6 * len(sources) + 1.3), layout="constrained")
    axes = figure.add_subplot()
    became = [outcomes(source) for source in sources]
    for row, found in enumerate(became):
        base = 0.0
        for name in OUTCOMES:
            width = 100 * float((found == name).mean())
            axes.barh(row, width, left=base, color=COLOURS[name], height=0.66)
            if width >= 4:
                ink = "white" if name in ("correct", "incorrect", "invalid", "failed") else INK
                axes.text(base + width / 2, row, f"{width:.0f}", color=ink, **_CENTRED)
            base += width
    present = [name for name in OUTCOMES if any((found == name).any() for found in became)]
    handles = [Patch(color=COLOURS[name]) for name in present]
    figure.legend(handles, present, ncols=len(present), loc="outside lower center", fontsize=9)
    axes.set_yticks(range(len(sources)), [shorten(source.name) for source in sources])
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), title="Status of the answers, %")
    axes.grid(visible=False, axis="y")
    return figure


def draw_latency(sources: Sequence[Recorded]) -> Figure:
    """Draws the share of answers that came within a time: that of the whole batch of an answer."""
    figure = Figure(figsize=(6.6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for source, colour in _coloured(sources):
        times = np.sort(source.latencies)
        if len(times):
            middle, late = 1_000 * np.median(times), 1_000 * np.quantile(times, 0.95)
            shares = 100 * np.arange(1, len(times) + 1) / len(times)
            label = f"{shorten(source.name)}: p50 {middle:,.0f}, p95 {late:,.0f} ms"
            axes.step(1_000 * times, shares, where="post", color=colour, linewidth=2.2, label=label)
    axes.set(xscale="log", xlabel="milliseconds until its batch was answered", ylabel="answers, %", ylim=(0, 103))
    axes.set_title("Latency")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.22), fontsize=9)
    return figure


def _sure(source: Recorded) -> Floats:
    return confidences(source.items, source.answers)


def shares_of(hits: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
    """Returns shares and the bounds of their 95 % intervals, as `share` does; NaN if the count is 0."""
    found = [share(*pair) or {} for pair in zip(hits.tolist(), counts.tolist(), strict=True)]
    value, low, high = (np.array([row.get(name, np.nan) for row in found]) for name in ("value", "low", "high"))
    return value, low, high


def decided_accuracy(shares: FloatArray) -> FloatArray:
    """Returns [10] percentages of right labels among the reference's decided ones, from one task's `SHARES`."""
    correct, incorrect, _ = shares.T
    return 100 * correct / np.maximum(correct + incorrect, 1)


def _label_bins(axes: Axes) -> None:
    axes.set_xticks(_BINS, [f"{10 * place}-{10 * place + 10}" for place in _BINS])
    axes.set_xlabel("gap in truth, % of the task (of the widest gap, where only returns are known); easy pairs right")


def _coloured(sources: Sequence[Recorded]) -> list[tuple[Recorded, str]]:
    return [(source, LINES[place % len(LINES)]) for place, source in enumerate(sources)]


def shorten(name: str, most: int = _MAX_NAME) -> str:
    """Returns a name of at most `most` characters for titles and legends; a dollar sign would begin a formula."""
    short = name if len(name) <= most else f"{name[: most - 1]}…"
    return short.replace("$", r"\$")
