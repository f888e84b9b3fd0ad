"""Results of runs, read from their folders: of the runs of a sweep, or of any runs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import read_json
from rlvlm.judge_bench.rows import ROW_FILE, is_of, read_row
from rlvlm.pages.run_charts import column
from rlvlm.runs.files.folder import RunFolder, find_folders
from rlvlm.runs.files.scores import Floats, scores
from rlvlm.runs.files.summary import FINAL_EVALUATIONS, summarise_answers, summarise_judge, summarise_queries
from rlvlm.runs.settings.config import RunConfig
from rlvlm.runs.settings.tree import flat
from rlvlm.sweeps.folder import ENDED, State, SweepFolder
from rlvlm.sweeps.plan import app_name

SOLVED = 0.8
"""Final score from which a run counts as a success."""
_ASIDE = ("eval.", "track.", "serve.", "engine.")
"""Sections of settings that do not distinguish runs: evaluation, tracking, serving and engines."""
_FEW_SETTINGS = 3
"""Maximum number of settings in a source's name."""


def mean_known(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the finite values, without None and NaN; None if there is none."""
    known = [value for value in values if value is not None and np.isfinite(value)]
    return float(np.mean(known)) if known else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Result of one run, finished or not."""

    task: str
    source: str
    """Group in comparisons: a key of `Results.sources`."""
    config: RunConfig
    path: Path
    """The run's folder, which need not exist yet."""
    state: str
    """`State` of a sweep's run; for other runs the exit reason, or that it has not finished."""
    cause: str = ""
    """Cause of a failure."""
    steps: Floats
    """[N] env steps of the evaluations."""
    scores: Floats
    """[N] true scores."""
    success: Floats
    """[N] success rates."""
    at_end: Floats
    """[N] share of episodes that ended in success; NaN if the env does not define it."""
    returns: Floats
    """[N] true episode returns."""
    queries: int
    label_accuracy: float | None
    """Share of right labels among the decided; None if nothing was asked."""
    wall_s: float
    peak_rss_mb: float | None
    cost_usd: float | None = None
    """Cost of a paid judge; None without one."""
    false_positives: float | None = None
    """Share of the newest failures that a rewarding judge called successes; None without such a judge."""
    alarm_step: int | None = None
    """Env step of the alarm of that judge's monitor; None without an alarm."""
    alarm_reason: str = ""
    """Reason of that alarm, in words."""
    judge: tuple[str, str] = ("", "")
    """Name and prompt in the stamp of the first answer; empty without answers."""

    @property
    def is_finished(self) -> bool:
        """Whether the run ended properly, so that it has a final score and is compared."""
        return self.state in ENDED and len(self.steps) > 0

    @property
    def final(self) -> float:
        """Mean score of the last evaluations."""
        return self.mean_of_last(self.scores)

    def mean_of_last(self, values: Floats) -> float:
        """Returns the mean of the last of `values` [N], one per evaluation; that at step 0 precedes training."""
        trained = values[self.steps > 0]
        return float((trained if len(trained) else values)[-FINAL_EVALUATIONS:].mean())

    @property
    def first_solved(self) -> int | None:
        """Env step of the first evaluation that reached `SOLVED`; None without one."""
        # the first time counts even if it is lost again: the final score shows what remained
        reached = np.flatnonzero(self.scores >= SOLVED)
        return int(self.steps[reached[0]]) if len(reached) else None

    def curve(self, grid: Floats) -> Floats:
        """Returns the [len(grid)] scores at these steps; after an early end, the last score."""
        # beyond the last evaluation numpy repeats its score, with which a run that ended early is credited
        return np.interp(grid, self.steps, self.scores)


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Runs to compare: on each task, sources against one another, over their seeds."""

    title: str
    sources: dict[str, str]
    """Display names, in the order of figures and tables."""
    tasks: Sequence[str]
    runs: Sequence[RunResult]
    remarks: Sequence[str] = ()
    """Caveats for the reader of the comparison."""
    benches: Sequence[Mapping[str, Any]] = ()
    """Rows of judge benches, for judges that some of the runs asked."""

    def of(self, task: str, source: str) -> list[RunResult]:
        """Returns all runs of one task with one source."""
        return [run for run in self.runs if (run.task, run.source) == (task, source)]

    def finished(self, task: str, source: str) -> list[RunResult]:
        """Returns the finished runs of one task with one source."""
        return [run for run in self.of(task, source) if run.is_finished]

    @property
    def common_tasks(self) -> list[str]:
        """Tasks on which every source has a finished run; the overall comparison covers these."""
        return [task for task in self.tasks if all(self.finished(task, source) for source in self.sources)]


def sweep_results(folder: SweepFolder) -> Results:
    """Returns the results of a sweep, finished or not.

    Raises:
        UsageError: the sweep's file cannot be read.
    """
    sweep = folder.config()
    plans = list(folder.plans().values())
    records = folder.records(plans)
    runs = []
    for plan in plans:
        record, about = records[plan.key], {"task": plan.task, "source": plan.source, "config": plan.config}
        run, path = folder.run(plan), folder.run_path(plan)
        runs.append(_read(run, path=path, state=str(record.state), cause=record.cause, **about))
    states = [run.state for run in runs]
    remarks = []
    if halted := states.count(State.HALTED):
        remarks.append(
            f"{halted} runs were halted half-way by the sweep's halving. They have no final score and are left out, so "
            "a source's score is that of its better runs."
        )
    if failed := states.count(State.FAILED):
        remarks.append(f"{failed} runs failed and are left out; their causes are in the last table.")
    if ended := states.count(State.FLAT):
        remarks.append(f"{ended} runs ended early because their curve was flat.")
    remarks += _alarms(runs)
    if sweep.budget.may_differ:
        remarks.append("The sources have different budgets, because the budget is what is compared.")
    if sweep.smoke:
        remarks.append("This is a smoke test: each run was shortened to minutes, nothing was trained to convergence.")
    return Results(
        title=sweep.title,
        sources={name: source.title for name, source in sweep.sources.items()},
        tasks=sweep.tasks,
        runs=_with_costs(folder, runs),
        remarks=remarks,
    )


def run_results(paths: Sequence[Path]) -> Results:
    """Returns the results of any runs: runs of one task that differ only in their seed share a source.

    A source is named after its reward, and, if two of a task share that name, also after the settings in which they
    differ; if these are many, after the folder of its first run, and a remark lists them.

    Raises:
        UsageError: there is no path, or no run under one.
    """
    if not paths:
        raise UsageError("name at least one run's folder", "rlvlm report runs/")
    runs: list[RunResult] = []
    for folder in {folder.path: folder for path in paths for folder in find_folders(path)}.values():
        config = folder.config()
        state = folder.summary().get("exit_reason", "not finished")
        runs.append(_read(folder, path=folder.path, state=state, task=config.task, source="", config=config))
    kinds = [
        {
            name: value
            for name, value in flat(replace(run.config, seed=0, out=None)).items()
            # monitoring, storage, serving and settings without effect do not define a run
            if not name.startswith(_ASIDE) and run.config.why_unused(name) is None
        }
        for run in runs
    ]
    named, short = [], dict[str, str]()
    for run, kind in zip(runs, kinds, strict=True):
        # within a task and a kind of reward, which is in the name already, settings distinguish the runs
        rivals = [
            other
            for rival, other in zip(runs, kinds, strict=True)
            if (rival.task, rival.config.reward_name) == (run.task, run.config.reward_name)
        ]
        keys = sorted({key for other in rivals for key in kind.keys() | other if kind.get(key) != other.get(key)})
        # empty settings would only say that another run has set them
        settings = [f"{key}={kind[key]}" for key in keys if kind.get(key) not in (None, "")]
        source = ", ".join([run.config.reward_name, *settings])
        if len(keys) > _FEW_SETTINGS:
            if source not in short:
                name, whole = (f"{run.config.reward_name} ({place})" for place in (run.path.name, run.path))
                short[source] = whole if name in short.values() else name  # folders of sweeps have equal names
            source = short[source]
        named.append(replace(run, source=source))
    longer = [f"{name} is: {settings}." for settings, name in short.items()]
    unfinished = sum(not run.is_finished for run in named)
    remark = f"{unfinished} of {len(named)} runs are unfinished: they have no final score and are left out."
    return Results(
        title="Runs compared",
        sources={run.source: run.source for run in named},
        tasks=list(dict.fromkeys(run.task for run in named)),
        runs=sorted(named, key=lambda run: (run.task, run.source, run.config.seed)),
        remarks=[*([remark] if unfinished else []), *_alarms(named), *longer],
    )


def _alarms(runs: Sequence[RunResult]) -> list[str]:
    """Returns a remark for each reason for which the monitors of some runs' judges gave an alarm."""
    reasons = sorted({run.alarm_reason for run in runs if run.alarm_step is not None})
    return [
        f"The monitor of a judge gave an alarm, {reason}: "
        f"{', '.join(run.path.name for run in runs if run.alarm_reason == reason)}. "
        "Its rewards prove nothing; the scores here are true ones."
        for reason in reasons
    ]


def _read(run: RunFolder | None, **about: Any) -> RunResult:
    """Reads the result of a run's folder, combined with the facts in `about`; `run` is None before it begins."""
    rows = run.evaluations.read() if run else []
    summary = run.summary() if run else {}
    asked = summarise_answers(run) if run else summarise_queries([])
    watched = summarise_judge(run) if run else {}
    alarm_step = watched.get("alarm_step")
    return RunResult(
        steps=column(rows, "step").astype(float),
        scores=scores(about["task"], rows),
        success=column(rows, "success_rate").astype(float),
        at_end=column(rows, "success_at_end").astype(float),
        returns=column(rows, "episode_return").astype(float),
        queries=asked["queries"],
        label_accuracy=asked["label_accuracy"],
        false_positives=watched.get(metrics.JUDGE_FALSE_POSITIVES),
        alarm_step=None if alarm_step is None else int(alarm_step),
        alarm_reason=watched.get("alarm_reason") or "",
        judge=_judge_of(run) if run else ("", ""),
        peak_rss_mb=summary.get("peak_rss_mb"),
        wall_s=summary.get("wall_s", float(rows[-1]["wall_s"] or 0) if rows else 0.0),
        **about,
    )


def _judge_of(run: RunFolder) -> tuple[str, str]:
    """Returns judge and prompt of the first example in the log; the others are megabytes of images."""
    try:
        with run.samples.path.open() as file:
            first = json.loads(file.readline())
        return str(first["judge"]), str(first["prompt"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # nothing was asked, or the line is damaged
        return "", ""


def with_benches(results: Results, paths: Sequence[Path]) -> Results:
    """Returns the results with the rows of their judges' benches; `paths` are rows, or folders with some.

    Raises:
        UsageError: there is no row, or one that cannot be read.
    """
    files = [file for path in paths for file in (sorted(path.rglob(ROW_FILE)) if path.is_dir() else [path])]
    if paths and not files:
        raise UsageError(f"no {ROW_FILE} under {', '.join(map(str, paths))}", "make one with `rlvlm judge-bench`")
    rows = [read_row(file) for file in files]
    asked = {run.judge for run in results.runs}
    unused = [
        str(file) for file, row in zip(files, rows, strict=True) if not any(is_of(row, *judge) for judge in asked)
    ]
    remark = f"No run here asked the judge of {', '.join(unused)}." if unused else ""
    return replace(results, benches=rows, remarks=[*results.remarks, *filter(None, [remark])])


def _with_costs(folder: SweepFolder, runs: Sequence[RunResult]) -> list[RunResult]:
    """Returns the runs with the costs of their judges: each ledger of the sweep, divided by the queries asked."""
    # one ledger per judge; a run's cost is its share of the questions to this judge
    apps = [app_name(run.config, folder.path) if run.config.reward.asks_judge else "" for run in runs]
    paid = []
    for run, app in zip(runs, apps, strict=True):
        # by questions asked: runs share the judge's cache too, and it is chance which one asked first
        ledger = folder.ledger(app)
        total = sum(other.queries for other, its in zip(runs, apps, strict=True) if its == app)
        if app and total and ledger.exists():
            try:
                spent = float(read_json(ledger)["cost_usd"])
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise UsageError(f"{ledger} cannot be read: {error}", "restore it, or remove it") from error
            run = replace(run, cost_usd=spent * run.queries / total)
        paid.append(run)
    return paid
