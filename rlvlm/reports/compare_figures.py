"""The images of a comparison: final scores with their intervals, and curves over env steps."""

import math
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rlvlm.reports.results import Results, RunResult
from rlvlm.reports.statistics import SEED, Finding, find, interquartile_mean, percentiles, resampled_means
from rlvlm.runs.plots import COLOURS, INK

COLUMNS = 3
_FEW_POINTS = 4
"""Curves of fewer evaluations show each as a point."""


def colours(results: Results) -> dict[str, str]:
    """A source's colour in all images and tables."""
    return {source: COLOURS[place % len(COLOURS)] for place, source in enumerate(results.sources)}


def draw_scores(results: Results) -> Figure:
    """Final scores: a panel over all common tasks, then one per task; per source the mean, its interval, every run."""
    common = results.common_tasks
    panels = [("all tasks" if len(common) == len(results.tasks) else f"{len(common)} tasks", common)]
    panels = panels if len(common) > 1 else []
    panels += [(task, [task]) for task in results.tasks]
    width, height = min(len(panels), COLUMNS), math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(1.2 + 3.4 * width, height * (1.1 + 0.36 * len(results.sources))), layout="constrained")
    grid = figure.subplots(height, width, sharex=True, sharey=True, squeeze=False)
    for axes, (title, tasks) in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, results, tasks, find(results, tasks))
        axes.set_title(title)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    grid[-1][0].set_xlabel("final score")
    return figure


def draw_curves(results: Results) -> Figure:
    """True score over env steps, a panel per task: interquartile mean over the seeds, and its interval."""
    tasks = results.tasks
    width, height = min(len(tasks), COLUMNS), math.ceil(len(tasks) / COLUMNS)
    figure = Figure(figsize=(max(4.6 * width, 6.5), 3.3 * height + 0.6), layout="constrained")
    grid = figure.subplots(height, width, squeeze=False)
    for axes, task in zip(grid.flat, tasks, strict=False):
        for source, colour in colours(results).items():
            runs = [run for run in results.of(task, source) if len(run.steps)]
            if runs:
                _draw_curve(axes, runs, colour)
        axes.set(title=task, xlabel="env steps, thousands", ylabel=results.axis_name(task))
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, -0.04), max(high, 1.04))  # scores: 0 is nothing and 1 is solved, on every task
    for axes in list(grid.flat)[len(tasks) :]:
        axes.set_visible(False)
    drawn = [
        source for source in results.sources if any(len(run.steps) for run in results.runs if run.source == source)
    ]
    handles = [Line2D([], [], color=colours(results)[source], linewidth=2.2) for source in drawn]
    titles = [_label(results.sources[source]) for source in drawn]
    columns = 5 if max(map(len, titles), default=0) < 20 else 2
    figure.legend(handles, titles, loc="outside lower center", ncols=max(min(len(drawn), columns), 1))
    return figure


def common_grid(runs: Sequence[RunResult]) -> np.ndarray:
    """Env steps at which the runs are compared: all their evaluations, to where the shortest unfinished one has come.

    A finished run counts to the end of its budget with its last score, also where it ended early. A last rollout may
    reach a little further.
    """
    steps = np.unique(np.concatenate([run.steps for run in runs]))
    reach = [max(run.config.steps, run.steps[-1]) if run.is_finished else run.steps[-1] for run in runs]
    return steps[steps <= min(reach)]


def _draw_panel(axes: Axes, results: Results, tasks: Sequence[str], finding: Finding) -> None:
    places = {source: -place for place, source in enumerate(results.sources)}
    for source, colour in colours(results).items():
        finals = [run.final for task in tasks for run in results.finished(task, source)]
        axes.plot(finals, [places[source]] * len(finals), "|", color=colour, alpha=0.45, markersize=11)
    for ranked in finding.ranking:
        score, place, colour = ranked.score, places[ranked.source], colours(results)[ranked.source]
        axes.plot([score.low, score.high], [place, place], color=colour, linewidth=5, alpha=0.4, solid_capstyle="butt")
        axes.plot(score.value, place, "o", color=colour, markersize=7)
    axes.set_yticks(list(places.values()), [_label(results.sources[source]) for source in places], color=INK)
    axes.set_ylim(min(places.values()) - 0.6, 0.6)
    axes.grid(axis="y", visible=False)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.04), max(high, 1.04))


def _draw_curve(axes: Axes, runs: Sequence[RunResult], colour: str) -> None:
    grid = common_grid(runs)
    values = np.stack([run.curve(grid) for run in runs])  # [N, steps]
    marker = "o" if len(grid) < _FEW_POINTS else None  # a line through one point is invisible
    axes.plot(grid / 1_000, interquartile_mean(values, axis=0), color=colour, linewidth=2.2, marker=marker)
    if len(runs) > 1:
        low, high = percentiles(resampled_means([values], np.random.default_rng(SEED)))
        axes.fill_between(grid / 1_000, low, high, color=colour, alpha=0.15, linewidth=0)


def _label(title: str) -> str:
    """A source's title in lines that leave room for the image; a dollar sign would begin a formula."""
    return textwrap.fill(title, 32).replace("$", r"\$")
