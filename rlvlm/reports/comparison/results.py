"""What the runs of a sweep have come to, read from their folders."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.envs.registry import return_range
from rlvlm.runs.artifacts.plots import column
from rlvlm.runs.artifacts.summary import FINAL_EVALUATIONS, summarise_answers, summarise_queries
from rlvlm.runs.scores import Floats, scores
from rlvlm.sweeps.config import SweepConfig
from rlvlm.sweeps.folder import State, SweepFolder, TrialRecord
from rlvlm.sweeps.plan import TrialPlan, app_name

SOLVED = 0.8
"""A run whose final score reaches this counts as a success."""
COMPARED = (State.DONE, State.FLAT)
"""The runs that have a final score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """One run as far as it has come."""

    plan: TrialPlan
    record: TrialRecord
    steps: Floats
    """[N] env steps of its evaluations."""
    scores: Floats
    """[N] true scores."""
    success: Floats
    """[N] success rates."""
    returns: Floats
    """[N] true episode returns."""
    queries: int
    label_accuracy: float | None
    """Share of right labels among the decided, None where nothing was asked."""
    wall_s: float
    peak_rss_mb: float | None
    cost_usd: float | None
    """What a paid judge was paid, None where nobody was."""

    @property
    def is_compared(self) -> bool:
        """Whether it is finished, so that it has a final score."""
        return self.record.state in COMPARED and len(self.steps) > 0

    @property
    def final(self) -> float:
        """Mean of the last evaluations' scores."""
        return float(self.scores[-FINAL_EVALUATIONS:].mean())

    @property
    def is_success(self) -> bool:
        """Whether the final score counts as success."""
        return self.is_compared and self.final >= SOLVED

    @property
    def first_solved(self) -> int | None:
        """Env step of the first evaluation that reached `SOLVED`."""
        reached = np.flatnonzero(self.scores >= SOLVED)
        return int(self.steps[reached[0]]) if len(reached) else None

    def curve(self, grid: Floats) -> Floats:
        """[len(grid)] its scores at these steps; after a run that ended early, its last one."""
        return np.interp(grid, self.steps, self.scores)


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """A sweep's results."""

    sweep: SweepConfig
    path: Path
    runs: list[RunResult]

    def of(self, task: str, source: str) -> list[RunResult]:
        """All runs of one task with one source."""
        return [run for run in self.runs if (run.plan.task, run.plan.source) == (task, source)]

    def compared(self, task: str, source: str) -> list[RunResult]:
        """Those of them that are finished."""
        return [run for run in self.of(task, source) if run.is_compared]

    def strata(self, source: str, tasks: Sequence[str]) -> list[Floats]:
        """Per task, the final scores [N] of a source's finished runs."""
        return [np.array([run.final for run in self.compared(task, source)]) for task in tasks]

    @property
    def common_tasks(self) -> list[str]:
        """The tasks on which every source has a finished run: over these sources are compared as a whole."""
        return [task for task in self.sweep.tasks if all(self.compared(task, source) for source in self.sweep.sources)]

    def title(self, source: str) -> str:
        """A source's name for readers."""
        return self.sweep.sources[source].title

    def axis_name(self, task: str) -> str:
        """What a task is compared by, short enough for an axis."""
        return "success rate" if return_range(task) is None else "true return, 0 to 1"


def read_results(folder: SweepFolder) -> Results:
    """The results of a sweep, finished or not.

    Raises:
        UsageError: its file cannot be read.
    """
    plans = list(folder.plans().values())
    records = folder.records(plans)
    asked = {plan.key: _read_queries(folder, plan) for plan in plans}
    shares = _shared_costs(folder, plans, {key: answers["queries"] for key, answers in asked.items()})
    runs = [_read(folder, plan, records[plan.key], asked[plan.key], shares.get(plan.key)) for plan in plans]
    return Results(sweep=folder.config(), path=folder.path, runs=runs)


def _read_queries(folder: SweepFolder, plan: TrialPlan) -> dict[str, Any]:
    run = folder.run(plan)
    return summarise_answers(run) if run else summarise_queries([])


def _read(
    folder: SweepFolder, plan: TrialPlan, record: TrialRecord, asked: dict[str, Any], cost_usd: float | None
) -> RunResult:
    run = folder.run(plan)
    rows = run.evaluations.read() if run else []
    summary = run.summary() if run else {}
    return RunResult(
        plan=plan,
        record=record,
        steps=column(rows, "step").astype(float),
        scores=scores(plan.task, rows),
        success=column(rows, "success_rate").astype(float),
        returns=column(rows, "episode_return").astype(float),
        queries=asked["queries"],
        label_accuracy=asked["label_accuracy"],
        peak_rss_mb=summary.get("peak_rss_mb"),
        cost_usd=cost_usd,
        wall_s=summary.get("wall_s", float(rows[-1]["wall_s"]) if rows else 0.0),
    )


def _shared_costs(folder: SweepFolder, plans: Sequence[TrialPlan], asked: dict[str, int]) -> dict[str, float]:
    """By run, what its judge was paid: the sweep's ledger of each paid judge, shared out by the queries asked."""
    costs: dict[str, float] = {}
    by_app: dict[str, list[str]] = {}
    for plan in plans:
        if plan.config.asks_judge:
            by_app.setdefault(app_name(plan.config, folder.path), []).append(plan.key)
    for app, keys in by_app.items():
        ledger = folder.ledger(app)
        total = sum(asked[key] for key in keys)
        if ledger.exists() and total:
            spent = json.loads(ledger.read_text())["cost_usd"]
            costs |= {key: spent * asked[key] / total for key in keys}
    return costs
