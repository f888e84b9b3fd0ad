"""The page of a comparison: the finding first, then pictures, a table per task, every run, and how to read it."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlvlm.reports.comparison.figures import colours
from rlvlm.reports.comparison.finding import find
from rlvlm.reports.comparison.results import SOLVED, Results
from rlvlm.reports.comparison.statistics import CONFIDENCE, RESAMPLES
from rlvlm.reports.comparison.tables import RUN_COLUMNS, group_rows, run_rows
from rlvlm.runs.scores import score_name
from rlvlm.sweeps.folder import State
from rlvlm.sweeps.plan import planned_queries

SHOWN = {
    "title": "source",
    "finished": "runs finished",
    "score": "final score",
    "mean_over_run": "mean over the run",
    "steps_to_solve": f"steps to {SOLVED:g}",
    "final_success_rate": "success",
    "final_return": "true return",
    "label_accuracy": "labels right",
    "queries": "queries",
    "minutes": "minutes",
    "minutes_per_success": "min / success",
    "queries_per_success": "queries / success",
    "usd_per_success": "USD / success",
}
"""The columns of a task's table, and their heads."""
_CSS = """
body{font:15px/1.55 system-ui,-apple-system,sans-serif;color:#22343c;background:#fff;max-width:1180px;margin:36px auto;
padding:0 28px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:36px 0 8px}
.lead{font-size:17px;background:#eef6f5;border-left:4px solid #2a9d8f;padding:12px 16px;margin:18px 0}
.note{color:#5d6f77}.warn{background:#fdf3ec;border-left:4px solid #e76f51;padding:8px 16px}
img{max-width:100%}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13.5px;margin:8px 0 12px;width:100%}
th,td{text-align:right;padding:6px 9px;border-bottom:1px solid #e3e7e8;white-space:nowrap}
th{color:#5d6f77;font-weight:600;vertical-align:bottom;white-space:normal}
th:first-child,td:first-child,td.text,th.text{text-align:left}td .ci{color:#5d6f77;font-size:12px}
i.dot{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:7px}
"""


def comparison_page(results: Results, scores: Path, curves: Path) -> str:
    """The whole page's HTML, self-contained.

    Args:
        results: of the sweep.
        scores: PNG of `draw_scores`.
        curves: PNG of `draw_curves`.
    """
    parts = [
        f"<h1>{escape(results.sweep.title)}</h1>",
        f'<p class="note">{escape(_extent(results))}</p>',
        f'<p class="lead">{escape(overall(results))}</p>',
        _warnings(results),
        _image("final scores", scores),
        f'<p class="note">{_READ_SCORES}</p>',
        "<h2>Learning curves</h2>",
        _image("true score over env steps", curves),
        f'<p class="note">{_READ_CURVES}</p>',
        *(_task_section(results, task) for task in results.sweep.tasks),
        "<h2>Every run</h2>",
        _run_table(results),
        "<h2>How to read this</h2>",
        _explanation(),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(results.sweep.title)}</title>'
        f"<style>{_CSS}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def overall(results: Results) -> str:
    """The sentence that heads page and terminal: over all tasks that every source has finished runs on."""
    tasks = results.common_tasks
    if not tasks or len(results.sweep.tasks) == 1:
        return find(results, results.sweep.tasks[:1] if len(results.sweep.tasks) == 1 else []).text
    where = f"Over all {len(tasks)} tasks"
    if len(tasks) < len(results.sweep.tasks):
        where = f"Over {', '.join(tasks)}, where every source has a finished run"
    return f"{where}. {find(results, tasks).text}"


_READ_SCORES = (
    f"Dot: interquartile mean of the final scores over all seeds. Bar: its {100 * CONFIDENCE:.0f} % "
    "stratified-bootstrap interval. Small strokes: the single runs."
)
_READ_CURVES = (
    "Line: interquartile mean over the seeds of the true score of the deterministic policy. Band: its "
    f"{100 * CONFIDENCE:.0f} % bootstrap interval. After a run that ended early its last score counts on."
)


def _extent(results: Results) -> str:
    sweep = results.sweep
    finished = sum(run.is_compared for run in results.runs)
    counts = sorted({len(sweep.seeds_of(task)) for task in sweep.tasks})
    seeds = "1 seed" if counts == [1] else f"{' or '.join(map(str, counts))} seeds"
    return (
        f"{len(sweep.sources)} sources, {len(sweep.tasks)} {'task' if len(sweep.tasks) == 1 else 'tasks'}, "
        f"{seeds}: {finished} of {len(results.runs)} runs finished"
    )


def _warnings(results: Results) -> str:
    """What a reader must know before believing the page."""
    states = [run.record.state for run in results.runs]
    told = []
    if states.count(State.HALTED):
        told.append(
            f"{states.count(State.HALTED)} runs were halted half-way by the sweep's halving. They have no "
            "final score and are left out, so a source's score is that of its better runs."
        )
    if states.count(State.FAILED):
        told.append(f"{states.count(State.FAILED)} runs failed and are left out; their causes are in the last table.")
    if states.count(State.FLAT):
        told.append(f"{states.count(State.FLAT)} runs ended early because their curve was flat.")
    if results.sweep.budget.may_differ:
        told.append("The sources have different budgets, because the budget is what is compared.")
    if results.sweep.smoke:
        told.append("This is a smoke test: every run was cut to minutes, and nothing was learnt to the end.")
    return "".join(f'<p class="warn">{escape(text)}</p>' for text in told)


def _task_section(results: Results, task: str) -> str:
    rows = group_rows(results, task)
    shown = [key for key in SHOWN if key in ("title", "finished", "score") or any(row[key] is not None for row in rows)]
    head = "".join(f"<th>{escape(SHOWN[key])}</th>" for key in shown)
    dots = colours(results)
    body = "".join(
        "<tr>" + "".join(f"<td>{_group_cell(key, row, dots)}</td>" for key in shown) + "</tr>" for row in rows
    )
    return (
        f"<h2>{escape(task)}</h2><p>{escape(find(results, [task]).text)}</p>"
        f'<p class="note">Score: {escape(score_name(task))}. Budget: {escape(_budget(results, task))}.</p>'
        f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
    )


def _budget(results: Results, task: str) -> str:
    configs = [run.plan.config for run in results.runs if run.plan.task == task]
    steps = sorted({config.steps for config in configs})
    queries = sorted({planned_queries(config) for config in configs if config.asks_teacher})
    told = f"{_range(steps)} env steps"
    return f"{told}, {_range(queries)} queries for those who ask" if queries else told


def _range(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _group_cell(key: str, row: Mapping[str, Any], dots: Mapping[str, str]) -> str:
    value = row[key]
    if key == "title":
        return f'<i class="dot" style="background:{dots[row["source"]]}"></i>{escape(value)}'
    if key == "score" and value is not None:
        return f'<b>{value:.2f}</b> <span class="ci">{row["score_low"]:.2f} to {row["score_high"]:.2f}</span>'
    return _cell(key, value)


def _cell(key: str, value: Any) -> str:
    """One number for readers; shares as percent."""
    if value is None or value == "" or (key.startswith("queries") and not value):
        return "-"
    if key == "queries":
        return f"{value:,.0f}"
    if key in ("label_accuracy", "final_success_rate"):
        return f"{value:.0%}" if key == "final_success_rate" else f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) and key != "seed" else escape(str(value))


def _run_table(results: Results) -> str:
    rows = run_rows(results)
    shown = [key for key in RUN_COLUMNS if any(row[key] not in (None, "") for row in rows)]
    texts = ("task", "source", "state", "cause")

    def kind(key: str) -> str:
        return ' class="text"' if key in texts else ""

    head = "".join(f"<th{kind(key)}>{escape(key.replace('_', ' '))}</th>" for key in shown)
    body = "".join(
        "<tr>" + "".join(f"<td{kind(key)}>{_cell(key, row[key])}</td>" for key in shown) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _image(alt: str, file: Path) -> str:
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}">'


def _explanation() -> str:
    lines = (
        "Sources are compared by the true score of their deterministic policy, never by the reward that they learn "
        "from. The final score of a run is the mean of its last three evaluations.",
        "The interquartile mean drops the lowest and the highest quarter of the runs; the interval comes from drawing "
        f"the runs of each task again with replacement, {RESAMPLES:,} times (Agarwal et al. 2021). A difference is "
        "supported when its own interval excludes zero; each difference is judged by itself.",
        f"A run is a success when its final score reaches {SOLVED:g}. Costs per success divide what all finished runs "
        "of a source took by its successes. Minutes are of training and evaluation, beside whatever else the machine "
        "did then.",
        "Mean over the run is the score averaged over the whole budget: of two sources with equal final scores, the "
        "one that learns from fewer steps has more.",
    )
    return "".join(f"<p>{escape(line)}</p>" for line in lines)
