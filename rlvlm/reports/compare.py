"""`rlvlm report DIR...`: compares runs, or the sources of a sweep, and names the winner: tables, page, figures."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rlvlm.core.console.tables import plain_console, plain_table
from rlvlm.core.disk import make_output_folder, write_whole
from rlvlm.core.errors import EXIT_DONE
from rlvlm.envs.registry import find_task
from rlvlm.judge_bench.prediction import predict_row, read_curve
from rlvlm.judge_bench.rows import is_of, number_cell, share_cell, task_figures
from rlvlm.pages.charts import COLOURS, INK, STYLE, save, show_coinciding
from rlvlm.reports.results import SOLVED, Results, RunResult, mean_known, run_results, sweep_results, with_benches
from rlvlm.reports.statistics import (
    CONFIDENCE,
    RESAMPLES,
    SEED,
    Finding,
    find,
    interquartile_mean,
    percentiles,
    resampled_means,
)
from rlvlm.runs.files.scores import score_name
from rlvlm.runs.files.tables import CsvTable
from rlvlm.sweeps.folder import find_sweep
from rlvlm.templates import inline, render

COLUMNS = 3
_FEW_POINTS = 4
"""Number of evaluations below which a curve shows each as a point."""
SHOWN = {
    "title": "source",
    "finished": "runs finished",
    "bench": "bench of its judge",
    "expected": "expected success",
    "score": "final score",
    "mean_over_run": "mean over the run",
    "steps_to_solve": f"steps to {SOLVED:g}",
    "success_at_end": "success at the end",
    "final_success_rate": "success at any step",
    "final_return": "true return",
    "label_accuracy": "labels right",
    "queries": "queries",
    "minutes": "minutes",
    "minutes_per_success": "min / success",
    "queries_per_success": "queries / success",
    "usd_per_success": "USD / success",
}
"""Columns of a task's table, with their headings."""
WORDS = ("task", "source", "state", "cause", "run")
"""Columns of text in the table of all runs; the others hold numbers."""
ALWAYS = ("title", "finished", "score")
"""Columns that are shown even if empty."""


def compare(paths: Sequence[Path], out: Path | None = None, benches: Sequence[Path] = ()) -> int:
    """Prints the winner, and writes report.html, report.png, report_curves.png, report.csv and report_runs.csv.

    Args:
        paths: the folder of one sweep; or folders of runs, or folders that contain runs.
        out: folder for the files; by default the sweep's, or `report`.
        benches: rows of judges, or folders with some, as for `with_benches`.

    Raises:
        UsageError: there is no path, nothing to compare under one, or a file that cannot be read.
    """
    # several paths are runs, even if one of them is a sweep's folder
    sweep = find_sweep(paths[0]) if len(paths) == 1 else None
    results = with_benches(sweep_results(sweep) if sweep else run_results(paths), benches)
    out = out or (sweep.path if sweep else Path("report"))
    make_output_folder(out)
    with matplotlib.rc_context(STYLE):
        scores = save(draw_scores(results), out / "report.png")
        curves = save(draw_curves(results), out / "report_curves.png")
    groups = [row for task in results.tasks for row in group_rows(results, task)]
    for name, rows in (("report.csv", groups), ("report_runs.csv", run_rows(results))):
        CsvTable(out / name, tuple(rows[0]), "task").write(rows)
    write_whole(out / "report.html", comparison_page(results, scores, curves))

    heads = ("task", "source", "finished", "score", "interval", "success at end", "labels right", "minutes")
    rows = []
    for row in groups:
        # a single run, or equal runs, have no interval
        is_known_exactly = row["score"] is None or row["score_low"] == row["score_high"]
        interval = "-" if is_known_exactly else f"{row['score_low']:.2f} to {row['score_high']:.2f}"
        facts = [cell(key, row[key]) for key in ("success_at_end", "label_accuracy", "minutes")]
        rows.append((row["task"], row["title"], row["finished"], cell("score", row["score"]), interval, *facts))
    console = plain_console()
    console.print(plain_table(heads, rows, words=("task", "source"), wraps=("source",)))
    for row in groups:
        if row["bench"]:
            said = f"{row['task']}, {row['title']}: bench of its judge: {row['bench']}; expected success "
            said += f"{row['expected'] or 'unknown'}, scored {cell('score', row['score'])}"
            console.print(said, soft_wrap=True)
    console.print(f"\n{overall(results)}\n")
    console.print(f"page, images and tables: {out / 'report.html'}", soft_wrap=True)
    return EXIT_DONE


def comparison_page(results: Results, scores: Path, curves: Path) -> str:
    """Returns the whole page's HTML, including the PNGs of `draw_scores` and `draw_curves`."""
    tasks = []
    for task in results.tasks:
        rows = group_rows(results, task)
        shown = [key for key in SHOWN if key in ALWAYS or any(row[key] is not None for row in rows)]
        about = {"name": task, "finding": find(results, [task]).text, "score": score_name(task)}
        tasks.append(about | {"budget": _budget(results, task), "rows": rows, "shown": shown})
    runs = run_rows(results)
    columns = [key for key in runs[0] if any(row[key] not in (None, "") for row in runs)]
    return render(
        "comparison.html.j2",
        title=results.title,
        extent=_extent(results),
        finding=overall(results),
        has_benches=bool(results.benches),
        remarks=results.remarks,
        scores=inline(scores),
        curves=inline(curves),
        tasks=tasks,
        heads=SHOWN,
        colours=colours(results),
        run_heads=[key.replace("_", " ") for key in columns],
        run_cells=[[cell(key, row[key]) for key in columns] for row in runs],
        run_words=[place for place, key in enumerate(columns) if key in WORDS],
        cell=cell,
        confidence=f"{100 * CONFIDENCE:.0f} %",
        resamples=f"{RESAMPLES:,}",
        solved=f"{SOLVED:g}",
    )


def overall(results: Results) -> str:
    """Returns the headline of page and terminal, over all tasks on which every source has finished runs."""
    # a mean over other tasks would credit a source with tasks that its rivals never tried
    tasks = results.common_tasks
    if len(results.tasks) == 1:
        return find(results, results.tasks).text
    if not tasks:
        if not any(run.is_finished for run in results.runs):
            return find(results, []).text
        return "There is no task on which every source has a finished run, so they are compared on each task by itself."
    where = f"Over all {len(tasks)} tasks"
    if len(tasks) < len(results.tasks):
        where = f"Over {', '.join(tasks)}, where every source has a finished run"
    return f"{where}. {find(results, tasks).text}"


def cell(key: str, value: object) -> str:
    """Formats one value for readers; shares in percent."""
    # a source that asks no judge has no number of queries, rather than zero
    if value is None or value == "" or (key.startswith("queries") and not value):
        return "-"
    if key in ("label_accuracy", "false_positives"):
        return f"{value:.1%}"
    if key in ("final_success_rate", "success_at_end"):
        return f"{value:.0%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 or key == "queries" else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) and key != "seed" else str(value)


def _extent(results: Results) -> str:
    """Returns the size of the comparison, e.g. `2 sources, 1 task, 3 seeds: 5 of 6 runs finished`."""

    def several(counts: Sequence[int], noun: str) -> str:
        return f"{' or '.join(map(str, counts))} {noun}{'' if list(counts) == [1] else 's'}"

    finished = sum(run.is_finished for run in results.runs)
    seeds = {len({run.config.seed for run in results.runs if run.task == task}) for task in results.tasks}
    parts = ([len(results.sources)], "source"), ([len(results.tasks)], "task"), (sorted(seeds), "seed")
    return (
        f"{', '.join(several(*part) for part in parts)}: {finished} of {several([len(results.runs)], 'run')} finished"
    )


def _budget(results: Results, task: str) -> str:
    """Returns the range of env steps and queries of a task's runs."""

    def span(values: set[int]) -> str:
        return f"{min(values):,}" if len(values) == 1 else f"{min(values):,} to {max(values):,}"

    configs = [run.config for run in results.runs if run.task == task]
    steps = f"{span({config.steps for config in configs})} env steps"
    queries = {config.kind.max_queries(config) for config in configs} - {0}
    return f"{steps}, {span(queries)} queries for sources that ask" if queries else steps


def group_rows(results: Results, task: str) -> list[dict[str, Any]]:
    """Returns one row per source on a task, best first; unknown values are None.

    Scores are in the task's score, times in minutes; `steps_to_solve` is the median over runs that solved the task.
    """
    scores = {ranked.source: ranked.score for ranked in find(results, [task]).ranking}
    rows = []
    for source in [*scores, *(source for source in results.sources if source not in scores)]:
        runs, score = results.finished(task, source), scores.get(source)
        if not results.of(task, source):
            continue  # compared runs need not be a sweep: some sources may have been tried on some tasks only
        # median over the runs that solved the task; their number stands beside it
        solved = [run.first_solved for run in runs if run.first_solved is not None]
        # costs cover all finished runs, also the unsuccessful ones: they had to be paid for a success
        successes = sum(run.final >= SOLVED for run in runs)
        minutes = sum(run.wall_s / 60 for run in runs)
        costs = [run.cost_usd for run in runs if run.cost_usd is not None]
        budget = runs[0].config if runs else None
        curves = []
        if budget is not None:  # a run's mean score over its whole budget rewards early learning
            grid = np.arange(budget.eval.every_steps, budget.steps + 1, budget.eval.every_steps, dtype=float)
            curves = [run.curve(grid if len(grid) else np.array([float(budget.steps)])).mean() for run in runs]
        rows.append(
            {
                "task": task,
                "source": source,
                "title": results.sources[source],
                "finished": f"{len(runs)} of {len(results.of(task, source))}",
                **_benched(results, task, source),
                "score": score.value if score else None,
                "score_low": score.low if score else None,
                "score_high": score.high if score else None,
                "mean_over_run": float(interquartile_mean(curves)) if curves else None,
                "steps_to_solve": float(np.median(solved)) if solved else None,
                "successes": successes if runs else None,
                "final_success_rate": mean_known([run.mean_of_last(run.success) for run in runs]),
                "success_at_end": mean_known([run.mean_of_last(run.at_end) for run in runs]),
                "final_return": mean_known([run.mean_of_last(run.returns) for run in runs]),
                "label_accuracy": mean_known([run.label_accuracy for run in runs]),
                "queries": mean_known([run.queries for run in runs]),
                "minutes": minutes / len(runs) if runs else None,
                "minutes_per_success": minutes / successes if successes else None,
                "queries_per_success": sum(run.queries for run in runs) / successes if successes else None,
                "usd_per_success": sum(costs) / successes if successes and costs else None,
                "peak_rss_mb": max((run.peak_rss_mb for run in runs if run.peak_rss_mb is not None), default=None),
            }
        )
    return rows


def _benched(results: Results, task: str, source: str) -> dict[str, str | None]:
    """Returns the bench figures of a source's judge on the task, and the predicted success; None if unknown."""
    runs = results.of(task, source)
    # runs of one source ask the same judge; the first run that asked one names it
    row = next((bench for run in runs for bench in results.benches if is_of(bench, *run.judge)), None)
    if row is None:
        return {"bench": None, "expected": None}
    kind = "pairs" if runs[0].config.reward.source == "preference" else "scores"
    figures = task_figures(row, task, kind)
    if kind == "pairs":
        bench = f"{share_cell(figures.get('accuracy'))} right, {share_cell(figures.get('undecided'))} undecided"
    else:
        bench = f"AUC {number_cell(figures.get('auc'))}"
    if faults := [fault["name"] for fault in row["faults"]]:
        bench += f"; {', '.join(faults)}"
    found = next(
        (
            prediction
            for prediction in predict_row(row, read_curve())
            if (prediction.task, prediction.kind) == (task, kind)
        ),
        None,
    )
    if found is None or found.success is None:  # no runs of such a task or with such judges, or a fault
        return {"bench": bench, "expected": None}
    return {"bench": bench, "expected": f"{found.success:.2f} ({found.low:.2f} to {found.high:.2f})"}


def run_rows(results: Results) -> list[dict[str, Any]]:
    """Returns one row per run, finished or not."""
    return [
        {
            "task": run.task,
            "source": run.source,
            "seed": run.config.seed,
            "state": run.state,
            "env_steps": int(run.steps[-1]) if len(run.steps) else 0,
            "final_score": run.final if run.is_finished else None,
            "final_success_rate": mean_known([run.mean_of_last(run.success)]) if run.is_finished else None,
            "success_at_end": mean_known([run.mean_of_last(run.at_end)]) if run.is_finished else None,
            "final_return": run.mean_of_last(run.returns) if run.is_finished else None,
            "first_solved": run.first_solved,
            "queries": run.queries,
            "label_accuracy": run.label_accuracy,
            "false_positives": run.false_positives,
            "alarm_step": run.alarm_step,
            "wall_s": run.wall_s,
            "cost_usd": run.cost_usd,
            "peak_rss_mb": run.peak_rss_mb,
            "cause": run.cause,
            "run": run.path.name,
        }
        for run in results.runs
    ]


def colours(results: Results) -> dict[str, str]:
    """Returns each source's colour in all figures and tables."""
    return {source: COLOURS[place % len(COLOURS)] for place, source in enumerate(results.sources)}


def draw_scores(results: Results) -> Figure:
    """Draws final scores: a panel over all common tasks, then one per task; per source mean, interval and every run."""
    common = results.common_tasks
    panels = [("all tasks" if len(common) == len(results.tasks) else f"{len(common)} tasks", common)]
    panels = panels if len(common) > 1 else []  # for a single task the panel over all would repeat it
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
    """Draws the true score over env steps, a panel per task: interquartile mean over the seeds, with its interval."""
    tasks = results.tasks
    width, height = min(len(tasks), COLUMNS), math.ceil(len(tasks) / COLUMNS)
    figure = Figure(figsize=(max(4.6 * width, 6.5), 3.3 * height + 0.6), layout="constrained")
    grid = figure.subplots(height, width, squeeze=False)
    for axes, task in zip(grid.flat, tasks, strict=False):
        for source, colour in colours(results).items():
            runs = [run for run in results.of(task, source) if len(run.steps)]
            if runs:
                _draw_curve(axes, runs, colour, results.sources[source])
        ylabel = "success at the end" if find_task(task).return_range is None else "true return, 0 to 1"
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, -0.04), max(high, 1.04))  # scores: 0 is nothing and 1 is solved, on every task
        # noted in each panel, since the legend is shared by all tasks
        note = textwrap.fill(show_coinciding(axes).replace("$", r"\$"), 56)
        axes.set(title=task, xlabel=f"env steps, thousands\n{note}".strip(), ylabel=ylabel)
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
    """Returns the env steps at which runs are compared: all evaluations, up to the end of the shortest unfinished run.

    A finished run counts to the end of its budget with its last score, even if it ended early. A last rollout may reach
    a little further.
    """
    # runs may be evaluated at different steps; curves are linear in between
    steps = np.unique(np.concatenate([run.steps for run in runs]))
    reach = [max(run.config.steps, run.steps[-1]) if run.is_finished else run.steps[-1] for run in runs]
    return steps[steps <= min(reach)]


def _draw_panel(axes: Axes, results: Results, tasks: Sequence[str], finding: Finding) -> None:
    # from the bottom up, so that the first source is at the top
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
    # from a little below 0 to a little above 1 on every task, so that panels can be compared by eye
    axes.set_xlim(min(low, -0.04), max(high, 1.04))


def _draw_curve(axes: Axes, runs: Sequence[RunResult], colour: str, label: str) -> None:
    grid = common_grid(runs)
    values = np.stack([run.curve(grid) for run in runs])  # [N, steps]
    marker = "o" if len(grid) < _FEW_POINTS else None  # a line through one point is invisible
    means = interquartile_mean(values, axis=0)
    axes.plot(grid / 1_000, means, color=colour, linewidth=2.2, marker=marker, label=label)
    if len(runs) > 1:
        # whole curves are resampled, so that the band is consistent from step to step
        low, high = percentiles(resampled_means([values], np.random.default_rng(SEED)))
        axes.fill_between(grid / 1_000, low, high, color=colour, alpha=0.15, linewidth=0)


def _label(title: str) -> str:
    """Wraps a source's title to leave room for the figure; a dollar sign would begin a formula."""
    return textwrap.fill(title, 32).replace("$", r"\$")
