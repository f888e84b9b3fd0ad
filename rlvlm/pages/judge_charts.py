"""Charts of judges' answers, whoever kept them: a bench, a run, a label store, scored data. Each fits on a phone."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray
from rlvlm.judge_bench.attempts import ATTEMPTS
from rlvlm.judge_bench.controls import FAILURES
from rlvlm.judge_bench.figures import Floats, confidences, share
from rlvlm.judge_bench.items import CASES, NUM_BINS
from rlvlm.judges.agreement import Reliability, calibration_error, reliability
from rlvlm.pages.answers import GIVEN, TRUTHS, Answers, confusion, outcomes
from rlvlm.pages.charts import COLOURS, INK, OUTCOMES, STYLE, show_coinciding, stack_shares
from rlvlm.preferences.config import THEIR_TASKS
from rlvlm.preferences.teachers import SHARES

THEIRS = "#9aa5ab"
WIDTH = 5.2
"""Width of a chart, in inches."""
REFERENCE = "RL-VLM-F (Wang et al. 2024), read off their figure"
_MAX_NAME = 34
_CENTRED: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
_GOOD, _MISS, _BAD, _CONTROL = "#2a9d8f", "#e9a23b", "#e76f51", "#8d6e97"
CASE_COLOURS = (
    {"success": _GOOD, "nearer": _GOOD, "near miss": _MISS, "cut short": _BAD, "failure": _BAD, "farther": _BAD}
    | dict.fromkeys(ATTEMPTS, _BAD)
    | dict.fromkeys(FAILURES, _CONTROL)
    | {"jump": _GOOD, "other camera": _GOOD, "mirrored": _GOOD}
)
"""Cases and controls from top to bottom, each with its colour: green if the goal is reached."""
assert set(CASES) < set(CASE_COLOURS)


def answer_charts(sources: Sequence[Answers], parts: Sequence[Answers] = ()) -> dict[str, Figure]:
    """Returns the charts of some judges' answers for which there is data, by title.

    Args:
        sources: answers of each judge.
        parts: answers of the only judge to each task, if there are several.
    """
    found: dict[str, Figure] = {}
    known = [source for source in sources if source.has_truth]
    rows = [part for part in parts or known if part.has_truth]
    with matplotlib.rc_context(STYLE):
        if known:
            found["answers to pairs, by difficulty"] = draw_difficulty(known)
        if len(rows) > 1:
            found["accuracy by difficulty, one row each"] = draw_accuracies(rows)
        for source in sources:
            if groups := score_groups(source):
                name = "scores, by truth" + (f": {source.name}" if len(sources) > 1 else "")
                found[name] = draw_scores(groups, source.graded.scores.get("threshold"))
        if known:
            found["true side against chosen side"] = draw_confusion(known)
        if any(len(_sure(source)) for source in sources):
            found["calibration"] = draw_calibration(sources)
    return found


def draw_difficulty(sources: Sequence[Answers], *, by_count: bool = False, title: str = "") -> Figure:
    """Draws the outcomes of answers to pairs by the gap in the truth, as shares of each bar, with the accuracy of the
    decided ones and its 95 % interval: a panel per source, and one of the reference for each of its tasks.

    Args:
        sources: answers; those whose truth is unknown are left out.
        by_count: whether each bar has about a tenth of the answers, and not a tenth of the gaps: most pairs of a run
            differ little. Then there is no panel of the reference.
        title: title of the only panel; else each has its source's name.
    """
    theirs = (
        []
        if by_count
        else [THEIR_TASKS[task] for task in dict.fromkeys(s.task for s in sources) if task in THEIR_TASKS]
    )
    count = len(sources) + len(theirs)
    figure = Figure(figsize=(WIDTH, 2.5 * count + 0.7), layout="constrained")
    panels = figure.subplots(count, 1, sharex=not by_count, squeeze=False)[:, 0]
    shown: dict[str, Any] = {}
    for axes, source in zip(panels, sources, strict=False):
        rows = [
            (abs(item.gap), str(end))
            for item, end in zip(source.items, outcomes(source), strict=True)
            if item.case == "pair" and np.isfinite(item.gap)
        ]
        gaps, ends = np.array([gap for gap, _ in rows]), np.array([end for _, end in rows])
        starts = np.arange(NUM_BINS) / NUM_BINS
        if by_count:  # equal gaps share a bar, so there may be fewer than ten
            starts = np.unique(np.sort(gaps)[np.arange(NUM_BINS) * len(gaps) // NUM_BINS])
        # the small sum keeps 0.3 in the bar that begins there
        bins = np.searchsorted(starts, gaps + 1e-9, side="right") - 1
        counts = {
            name: np.bincount(bins[ends == name], minlength=len(starts)) for name in OUTCOMES if (ends == name).any()
        }
        totals = np.bincount(bins, minlength=len(starts))
        stack_shares(axes, {name: 100 * own / np.maximum(totals, 1) for name, own in counts.items()}, OUTCOMES)
        none = np.zeros(len(starts), int)
        right, decided = counts.get("correct", none), counts.get("correct", none) + counts.get("incorrect", none)
        values, low, high = (100 * each for each in shares_of(right, decided))
        look: dict[str, Any] = {"color": INK, "marker": "o", "markersize": 3, "linewidth": 0.8, "elinewidth": 0.8}
        error = np.abs(np.stack([values - low, high - values]))
        axes.errorbar(
            np.arange(len(starts)) + 0.36, values, yerr=error, capsize=2, label="correct, of the decided (95 %)", **look
        )
        for place, total in enumerate(totals):
            axes.text(place, 103, f"{total:,}", ha="center", va="bottom", fontsize=7, color="#6b7a80")
        axes.set_title(title or f"{shorten(source.name)}: {totals.sum():,} answers", pad=16)
        axes.set_xticks(range(len(starts)), [f"{100 * start:.2g}" for start in starts])
        shown |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    for axes, task in zip(panels[len(sources) :], theirs, strict=True):
        known = zip(("correct", "incorrect", "no preference"), SHARES[task].T, strict=True)
        stack_shares(axes, dict(known), OUTCOMES, alpha=0.5, hatch="///", edgecolor="white")
        axes.set_title(f"published, for comparison: {task}", color="#6b7a80", fontweight="normal")
    for axes in panels:
        axes.set(ylabel="answers, %", ylim=(0, 102))
    panels[-1].set_xlabel("gap in truth from here on, % of the task (of the widest, for returns)", fontsize=9)
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def draw_accuracies(sources: Sequence[Answers]) -> Figure:
    """Draws the share of right labels among the decided, by difficulty: a row per source, and per task of the reference
    that one of them has.
    """
    rows: dict[str, Floats] = {}
    for source in sources:
        counts = source.by_difficulty
        rows[shorten(source.name, 18)] = 100 * shares_of(counts[:, 0], counts[:, :2].sum(1))[0]
    for task in dict.fromkeys(THEIR_TASKS[source.task] for source in sources if source.task in THEIR_TASKS):
        correct, wrong, _ = SHARES[task].T
        rows[f"published: {task}"] = 100 * correct / np.maximum(correct + wrong, 1)
    figure = Figure(figsize=(WIDTH, 0.9 + 0.28 * len(rows)), layout="constrained")
    axes, shares = figure.add_subplot(), np.stack(list(rows.values()))
    axes.imshow(shares, cmap="RdYlGn", vmin=-20, vmax=120, aspect="auto", alpha=0.75)
    for row, place in np.argwhere(np.isfinite(shares)).tolist():
        axes.text(place, row, f"{shares[row, place]:.0f}", color=INK, **_CENTRED)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_xticks(range(NUM_BINS), [f"{10 * place}-{10 * place + 10}" for place in range(NUM_BINS)], fontsize=7.5)
    axes.set_xlabel("gap in truth, %: hard pairs left, easy pairs right", fontsize=9)
    axes.grid(visible=False)
    axes.set_title("Right, % of the decided")
    return figure


def score_groups(source: Answers) -> dict[str, Floats]:
    """Returns the scores of episodes and turns by case and control, in the order of `CASE_COLOURS`."""
    rows = [
        (item.case, answer.value)
        for item, answer in zip(source.items, source.answers, strict=True)
        if not (item.case in ATTEMPTS and item.success)  # a few attempts reach the goal
    ]
    by_case = {case: np.array([value for of, value in rows if of == case]) for case in CASE_COLOURS}
    by_case = {case: values[np.isfinite(values)] for case, values in by_case.items()}
    return {case: values for case, values in by_case.items() if len(values)}


def draw_scores(
    groups: Mapping[str, Floats | FloatArray],
    threshold: float | None = None,
    title: str = "Scores by truth",
    rule: str = "best threshold",
) -> Figure:
    """Draws every score in the row of its group, with the middle half and the median of each row; and the share of
    scores from `threshold` on, if there is one.

    Args:
        groups: [N] scores in [0, 1] by name: of a case, a control, or a part of progress; the first on top.
        threshold: score from which a success is claimed.
        title: title of the chart.
        rule: what the threshold is.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.1 + 0.42 * len(groups)), layout="constrained")
        axes = figure.add_subplot()
        for place, (name, values) in enumerate(groups.items()):
            low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
            colour = CASE_COLOURS.get(name, COLOURS[2])
            axes.plot([low, high], [place, place], color=colour, linewidth=13, alpha=0.22, solid_capstyle="butt")
            axes.plot(values, place + _swarm(values), "o", color=colour, markersize=3.2, alpha=0.75, linewidth=0)
            axes.plot([middle, middle], [place - 0.3, place + 0.3], color=INK, linewidth=1.8)
            if threshold is not None:
                axes.text(1.04, place, f"{(values >= threshold).mean():.0%}", va="center", fontsize=9, color=INK)
        if threshold is not None:
            axes.axvline(threshold, color=INK, linewidth=1, linestyle="--")
            axes.text(1.04, -0.75, "from\nthere", va="bottom", fontsize=8, color="#6b7a80")
        axes.set_yticks(range(len(groups)), [f"{name} ({len(values):,})" for name, values in groups.items()], color=INK)
        line = "" if threshold is None else f"; dashed: {rule}"
        axes.set(xlim=(-0.03, 1.03), ylim=(len(groups) - 0.5, -0.6))
        axes.set_xlabel(f"score; bar: middle half, stroke: median{line}", fontsize=9)
        axes.grid(visible=False, axis="y")
        axes.set_title(title)
    return figure


def draw_confusion(sources: Sequence[Answers]) -> Figure:
    """Draws counts of truths against answers, shaded by the share of the row."""
    figure = Figure(figsize=(WIDTH, 2.6 * len(sources)), layout="constrained")
    panels = figure.subplots(len(sources), 1, squeeze=False)
    for axes, source in zip(panels[:, 0], sources, strict=True):
        table = confusion(source)
        rows = [row for row in range(len(TRUTHS)) if table[row].any()]
        shares = table[rows] / np.maximum(table[rows].sum(1, keepdims=True), 1)
        # a scale that ends at 2 keeps the darkest cell light enough for dark numbers
        axes.imshow(shares, cmap="GnBu", vmin=0, vmax=2, aspect="auto")
        for row, column in np.ndindex(*shares.shape):
            if count := table[rows[row], column]:
                axes.text(column, row, f"{count:,}\n{100 * shares[row, column]:.0f} %", color=INK, **_CENTRED)
        axes.set_xticks(range(len(GIVEN)), [name.replace(" ", "\n") for name in GIVEN])
        axes.set_yticks(range(len(rows)), [TRUTHS[row] for row in rows])
        axes.set(xlabel="said", ylabel="true")
        axes.set_title(shorten(source.name))
        axes.grid(visible=False)
    return figure


def draw_calibration(sources: Sequence[Answers]) -> Figure:
    """Draws accuracy against confidence, and the number of answers behind each point."""
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
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
    axes.legend(loc="lower right", fontsize=8, title=show_coinciding(axes, curves))
    counts.set(xlabel="probability of the chosen side against the other, %", ylabel="answers")
    silent = [shorten(source.name) for source in sources if not len(_sure(source))]
    if silent:
        axes.text(50, 101, f"without probabilities: {', '.join(silent)}", va="top", fontsize=8, color="#6b7a80")
    return figure


def _sure(source: Answers) -> Floats:
    return confidences(source.items, source.answers)


def _swarm(values: Floats | FloatArray) -> Floats:
    """Returns [N] offsets that place equal scores side by side, within 0.36 of a row."""
    bins = np.round(50 * values).astype(int)
    aside = np.zeros(len(values))
    widest = max(np.unique(bins, return_counts=True)[1])
    for level in np.unique(bins):
        (places,) = np.nonzero(bins == level)
        aside[places] = (np.arange(len(places)) - (len(places) - 1) / 2) * min(0.12, 0.72 / widest)
    return aside


def shares_of(hits: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
    """Returns shares and the bounds of their 95 % intervals, as `share` does; NaN if the count is 0."""
    found = [share(*pair) or {} for pair in zip(hits.tolist(), counts.tolist(), strict=True)]
    value, low, high = (np.array([row.get(name, np.nan) for row in found]) for name in ("value", "low", "high"))
    return value, low, high


def _coloured(sources: Sequence[Answers]) -> list[tuple[Answers, str]]:
    return [(source, COLOURS[place % len(COLOURS)]) for place, source in enumerate(sources)]


def shorten(name: str, most: int = _MAX_NAME) -> str:
    """Returns a name of at most `most` characters for titles and legends; a dollar sign would begin a formula."""
    short = name if len(name) <= most else f"{name[: most - 1]}…"
    return short.replace("$", r"\$")
