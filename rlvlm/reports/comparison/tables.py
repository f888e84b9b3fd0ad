"""The rows of a comparison's tables: one per source and task, and one per run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.reports.comparison.finding import find
from rlvlm.reports.comparison.results import Results, RunResult
from rlvlm.reports.comparison.statistics import interquartile_mean
from rlvlm.runs.artifacts.summary import FINAL_EVALUATIONS
from rlvlm.runs.folder.tables import CsvTable

GROUP_COLUMNS = (
    "task",
    "source",
    "title",
    "finished",
    "score",
    "score_low",
    "score_high",
    "mean_over_run",
    "steps_to_solve",
    "successes",
    "final_success_rate",
    "final_return",
    "label_accuracy",
    "queries",
    "minutes",
    "minutes_per_success",
    "queries_per_success",
    "usd_per_success",
    "peak_rss_mb",
)
RUN_COLUMNS = (
    "task",
    "source",
    "seed",
    "state",
    "env_steps",
    "final_score",
    "final_success_rate",
    "final_return",
    "first_solved",
    "queries",
    "label_accuracy",
    "wall_s",
    "cost_usd",
    "peak_rss_mb",
    "cause",
)


def group_rows(results: Results, task: str) -> list[dict[str, Any]]:
    """One row per source on a task, best first; None where there is nothing to say.

    Scores in the task's score, times in minutes, `steps_to_solve` the median over the runs that got there.
    """
    scores = {standing.source: standing.score for standing in find(results, [task]).standings}
    ordered = [*scores, *(source for source in results.sweep.sources if source not in scores)]
    return [
        _group_row(results, task, source)
        | {
            "score": scores[source].value if source in scores else None,
            "score_low": scores[source].low if source in scores else None,
            "score_high": scores[source].high if source in scores else None,
        }
        for source in ordered
    ]


def run_rows(results: Results) -> list[dict[str, Any]]:
    """One row per run of the sweep, finished or not."""
    return [
        {
            "task": run.plan.task,
            "source": run.plan.source,
            "seed": run.plan.seed,
            "state": str(run.record.state),
            "env_steps": run.record.env_steps,
            "final_score": run.final if run.is_compared else None,
            "final_success_rate": _last(run.success) if run.is_compared else None,
            "final_return": _last(run.returns) if run.is_compared else None,
            "first_solved": run.first_solved,
            "queries": run.queries,
            "label_accuracy": run.label_accuracy,
            "wall_s": run.wall_s,
            "cost_usd": run.cost_usd,
            "peak_rss_mb": run.peak_rss_mb,
            "cause": run.record.cause,
        }
        for run in results.runs
    ]


def write_csv(file: Path, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Puts a table in place anew."""
    file.unlink(missing_ok=True)
    CsvTable(file, columns, columns[0]).append(rows)


def _group_row(results: Results, task: str, source: str) -> dict[str, Any]:
    runs = results.compared(task, source)
    solved = [run.first_solved for run in runs if run.first_solved is not None]
    successes = sum(run.is_success for run in runs)

    def per_success(total: float | None) -> float | None:
        return total / successes if total is not None and successes else None

    minutes = sum(run.wall_s for run in runs) / 60
    return {
        "task": task,
        "source": source,
        "title": results.title(source),
        "finished": f"{len(runs)} of {len(results.of(task, source))}",
        "mean_over_run": _mean_over_run(runs),
        "steps_to_solve": float(np.median(solved)) if solved else None,
        "successes": successes if runs else None,
        "final_success_rate": _mean([_last(run.success) for run in runs]),
        "final_return": _mean([_last(run.returns) for run in runs]),
        "label_accuracy": _mean([run.label_accuracy for run in runs]),
        "queries": _mean([run.queries for run in runs]),
        "minutes": minutes / len(runs) if runs else None,
        "minutes_per_success": per_success(minutes if runs else None),
        "queries_per_success": per_success(_sum([run.queries for run in runs])),
        "usd_per_success": per_success(_sum([run.cost_usd for run in runs])),
        "peak_rss_mb": max((run.peak_rss_mb for run in runs if run.peak_rss_mb is not None), default=None),
    }


def _mean_over_run(runs: Sequence[RunResult]) -> float | None:
    """The interquartile mean over runs of each run's mean score over its whole budget: how early it became good."""
    if not runs:
        return None
    config = runs[0].plan.config
    grid = np.arange(config.eval.every_steps, config.steps + 1, config.eval.every_steps, dtype=float)
    grid = grid if len(grid) else np.array([float(config.steps)])
    return float(interquartile_mean([run.curve(grid).mean() for run in runs]))


def _last(values: np.ndarray) -> float:
    return float(values[-FINAL_EVALUATIONS:].mean())


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(sum(known)) if known else None
