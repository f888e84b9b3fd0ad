"""The page of a comparison: the finding first, then images, a table per task, every run, and how to read it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlvlm.reports.comparison.figures import colours
from rlvlm.reports.comparison.finding import find
from rlvlm.reports.comparison.results import SOLVED, Results
from rlvlm.reports.comparison.statistics import CONFIDENCE, RESAMPLES
from rlvlm.reports.comparison.tables import group_rows, run_rows
from rlvlm.runs.scores import score_name
from rlvlm.templates import inline, render

SHOWN = {
    "title": "source",
    "finished": "runs finished",
    "score": "final score",
    "mean_over_run": "mean over the run",
    "steps_to_solve": f"steps to {SOLVED:g}",
    "final_success_rate": "success",
    "success_at_end": "at the end",
    "final_return": "true return",
    "label_accuracy": "labels right",
    "queries": "queries",
    "minutes": "minutes",
    "minutes_per_success": "min / success",
    "queries_per_success": "queries / success",
    "usd_per_success": "USD / success",
}
"""The columns of a task's table, and their heads."""
ALWAYS = ("title", "finished", "score")
"""Columns that are shown even where nothing stands in them."""


def comparison_page(results: Results, scores: Path, curves: Path) -> str:
    """The whole page's HTML.

    Args:
        results: what is compared.
        scores: PNG of `draw_scores`.
        curves: PNG of `draw_curves`.
    """
    tasks = []
    for task in results.tasks:
        rows = group_rows(results, task)
        shown = [key for key in SHOWN if key in ALWAYS or any(row[key] is not None for row in rows)]
        about = {"name": task, "finding": find(results, [task]).text, "score": score_name(task)}
        tasks.append(about | {"budget": _budget(results, task), "rows": rows, "shown": shown})
    runs = run_rows(results)
    return render(
        "comparison.html.j2",
        title=results.title,
        extent=_extent(results),
        finding=overall(results),
        remarks=results.remarks,
        scores=inline(scores),
        curves=inline(curves),
        tasks=tasks,
        heads=SHOWN,
        colours=colours(results),
        runs=runs,
        run_columns=[key for key in runs[0] if any(row[key] not in (None, "") for row in runs)],
        cell=cell,
        confidence=f"{100 * CONFIDENCE:.0f} %",
        resamples=f"{RESAMPLES:,}",
        solved=f"{SOLVED:g}",
    )


def overall(results: Results) -> str:
    """The sentence that heads page and terminal: over all tasks that every source has finished runs on."""
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


def cell(key: str, value: Any) -> str:
    """One fact for readers; shares as percent."""
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
    """How much is compared, e.g. `2 sources, 1 task, 3 seeds: 5 of 6 runs finished`."""

    def several(counts: Sequence[int], noun: str) -> str:
        return f"{' or '.join(map(str, counts))} {noun}{'' if list(counts) == [1] else 's'}"

    finished = sum(run.is_finished for run in results.runs)
    seeds = {len({run.config.seed for run in results.runs if run.task == task}) for task in results.tasks}
    parts = ([len(results.sources)], "source"), ([len(results.tasks)], "task"), (sorted(seeds), "seed")
    return (
        f"{', '.join(several(*part) for part in parts)}: {finished} of {several([len(results.runs)], 'run')} finished"
    )


def _budget(results: Results, task: str) -> str:
    """Env steps and queries of a task's runs, from the least to the most."""

    def span(values: set[int]) -> str:
        return f"{min(values):,}" if len(values) == 1 else f"{min(values):,} to {max(values):,}"

    configs = [run.config for run in results.runs if run.task == task]
    steps = f"{span({config.steps for config in configs})} env steps"
    queries = {config.max_queries for config in configs} - {0}
    return f"{steps}, {span(queries)} queries for those who ask" if queries else steps
