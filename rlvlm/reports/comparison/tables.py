"""The rows of a comparison's tables: one per source and task, and one per run."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvlm.reports.comparison.finding import find
from rlvlm.reports.comparison.results import SOLVED, Results
from rlvlm.reports.comparison.statistics import interquartile_mean


def group_rows(results: Results, task: str) -> list[dict[str, Any]]:
    """One row per source on a task, best first; None where there is nothing to say.

    Scores in the task's score, times in minutes, `steps_to_solve` the median over the runs that got there.
    """
    scores = {ranked.source: ranked.score for ranked in find(results, [task]).ranking}
    rows = []
    for source in [*scores, *(source for source in results.sources if source not in scores)]:
        runs, score = results.finished(task, source), scores.get(source)
        if not results.of(task, source):
            continue
        solved = [run.first_solved for run in runs if run.first_solved is not None]
        successes = sum(run.final >= SOLVED for run in runs)
        minutes = _total([run.wall_s / 60 for run in runs])
        budget = runs[0].config if runs else None
        curves = []
        if budget is not None:  # a run's mean score over its whole budget says how early it became good
            grid = np.arange(budget.eval.every_steps, budget.steps + 1, budget.eval.every_steps, dtype=float)
            curves = [run.curve(grid if len(grid) else np.array([float(budget.steps)])).mean() for run in runs]
        rows.append(
            {
                "task": task,
                "source": source,
                "title": results.sources[source],
                "finished": f"{len(runs)} of {len(results.of(task, source))}",
                "score": score.value if score else None,
                "score_low": score.low if score else None,
                "score_high": score.high if score else None,
                "mean_over_run": float(interquartile_mean(curves)) if curves else None,
                "steps_to_solve": float(np.median(solved)) if solved else None,
                "successes": successes if runs else None,
                "final_success_rate": _mean([run.mean_of_last(run.success) for run in runs]),
                "success_at_end": _mean([finite(run.mean_of_last(run.at_end)) for run in runs]),
                "final_return": _mean([run.mean_of_last(run.returns) for run in runs]),
                "label_accuracy": _mean([run.label_accuracy for run in runs]),
                "queries": _mean([run.queries for run in runs]),
                "minutes": _mean([run.wall_s / 60 for run in runs]),
                "minutes_per_success": minutes / successes if minutes is not None and successes else None,
                "queries_per_success": sum(run.queries for run in runs) / successes if successes else None,
                "usd_per_success": cost / successes
                if successes and (cost := _total([run.cost_usd for run in runs])) is not None
                else None,
                "peak_rss_mb": max((run.peak_rss_mb for run in runs if run.peak_rss_mb is not None), default=None),
            }
        )
    return rows


def run_rows(results: Results) -> list[dict[str, Any]]:
    """One row per run, finished or not."""
    return [
        {
            "task": run.task,
            "source": run.source,
            "seed": run.config.seed,
            "state": run.state,
            "env_steps": int(run.steps[-1]) if len(run.steps) else 0,
            "final_score": run.final if run.is_finished else None,
            "final_success_rate": run.mean_of_last(run.success) if run.is_finished else None,
            "success_at_end": finite(run.mean_of_last(run.at_end)) if run.is_finished else None,
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


def finite(value: float) -> float | None:
    """The value, or None where it is none."""
    return value if np.isfinite(value) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(sum(known)) if known else None
