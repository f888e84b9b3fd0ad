"""`rlvlm report DIR...`: runs side by side, grouped over their seeds: a table, curves, and a page."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 - the backend must be chosen first
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from rlvlm.disk import write_whole
from rlvlm.errors import EXIT_DONE, UsageError
from rlvlm.reports.comparison.statistics import interquartile_mean
from rlvlm.runs.artifacts.plots import COLOURS, STYLE, column, save
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder import settings
from rlvlm.runs.folder.run_folder import RunFolder, find_folder
from rlvlm.runs.folder.tables import CsvTable
from rlvlm.types.steps import FloatArray

COLUMNS = (
    "run",
    "group",
    "task",
    "seed",
    "exit_reason",
    "env_steps",
    "final_success_rate",
    "best_success_rate",
    "final_episode_return",
    "queries",
    "label_accuracy",
    "wall_s",
    "peak_rss_mb",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run as far as it has come."""

    folder: RunFolder
    config: RunConfig
    summary: dict[str, Any]
    steps: FloatArray
    """[N] env steps of its evaluations."""
    success: FloatArray
    """[N] in [0, 1]."""


def compare_runs(paths: Sequence[Path], out: Path) -> int:
    """Prints the table and writes report.html, report.png and report.csv into `out`.

    Raises:
        UsageError: no path, or no run under one.
    """
    runs = [read_run(folder) for folder in find_runs(paths)]
    groups = group_runs(runs)
    out.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        picture = save(draw_curves(groups), out / "report.png")
    _write_csv(groups, out / "report.csv")
    write_whole(out / "report.html", report_page(groups, picture))
    console = Console(highlight=False)
    console.print(_terminal_table(groups))
    console.print(f"curves and table: {out / 'report.html'}", soft_wrap=True)
    return EXIT_DONE


def find_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """The runs that `paths` name: a run's folder (or a file in it), or any folder with runs below it.

    Raises:
        UsageError: no path, or no run under one.
    """
    if not paths:
        raise UsageError("name at least one run's folder", "rlvlm report runs/")
    found: dict[Path, RunFolder] = {}
    for path in paths:
        below = sorted(file.parent for file in path.glob("**/command.txt")) if path.is_dir() else []
        for folder in map(find_folder, below or [path]):
            found[folder.path] = folder
    return list(found.values())


def read_run(folder: RunFolder) -> Run:
    """What a run has reached; one without a summary is still running or was killed."""
    rows = folder.evaluations.read()
    return Run(
        folder=folder,
        config=folder.config(),
        summary=folder.summary() or {"exit_reason": "not finished"},
        steps=column(rows, "step"),
        success=column(rows, "success_rate"),
    )


def group_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in nothing but their seed, under a name that says what sets the group apart."""
    groups: list[list[Run]] = []
    for run in runs:
        same = [group for group in groups if _but_seed(group[0].config) == _but_seed(run.config)]
        if same:
            same[0].append(run)
        else:
            groups.append([run])
    names = _name_groups([group[0].config for group in groups])
    return {name: sorted(group, key=lambda run: run.config.seed) for name, group in zip(names, groups, strict=True)}


def draw_curves(groups: dict[str, list[Run]]) -> Figure:
    """Success over env steps: a line per group (IQM over seeds), a band from the worst to the best seed."""
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for place, (name, runs) in enumerate(groups.items()):
        curves = [run for run in runs if len(run.steps)]
        if not curves:
            continue
        colour = COLOURS[place % len(COLOURS)]
        steps = np.unique(np.concatenate([run.steps for run in curves]))
        steps = steps[steps <= min(run.steps.max() for run in curves)]
        values = 100 * np.stack([np.interp(steps, run.steps, run.success) for run in curves])
        seeds = f"{len(curves)} seed" + "s" * (len(curves) > 1)
        axes.fill_between(steps / 1_000, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
        middle = interquartile_mean(values, axis=0)
        axes.plot(steps / 1_000, middle, color=colour, linewidth=2.2, label=f"{name} ({seeds})")
    axes.set(xlabel="env steps, thousands", ylabel="episodes, %", ylim=(-3, 103), title="Success of the policy")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    return figure


def report_page(groups: dict[str, list[Run]], picture: Path) -> str:
    """The page's HTML: curves and both tables, self-contained."""
    image = base64.b64encode(picture.read_bytes()).decode()
    overview = _html_table(_OVERVIEW, [_overview(name, runs) for name, runs in groups.items()])
    each = _html_table(COLUMNS, [[_text(row[key]) for key in COLUMNS] for row in _rows(groups)])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>rlvlm report</title><style>'
        "body{font:15px/1.5 system-ui,sans-serif;color:#264653;max-width:1100px;margin:32px auto;padding:0 24px}"
        "img{max-width:100%}table{border-collapse:collapse;width:100%;font-size:13px;margin:12px 0 28px}"
        "th,td{text-align:left;padding:6px 10px;border-bottom:1px solid #e3e7e8}th{color:#6b7a80}"
        "div{overflow-x:auto}</style></head><body><h1>Runs compared</h1>"
        f'<img alt="success over env steps" src="data:image/png;base64,{image}">'
        f"<h2>Groups</h2><div>{overview}</div><h2>Runs</h2><div>{each}</div></body></html>\n"
    )


_OVERVIEW = ("group", "seeds", "final success", "worst to best seed", "queries", "label accuracy", "minutes")


def _overview(name: str, runs: Sequence[Run]) -> list[str]:
    def known(key: str) -> list[float]:
        return [run.summary[key] for run in runs if run.summary.get(key) is not None]

    final, accuracy, wall, queries = map(known, ("final_success_rate", "label_accuracy", "wall_s", "queries"))
    return [
        name,
        ", ".join(str(run.config.seed) for run in runs),
        f"{interquartile_mean(final):.0%}" if final else "-",
        f"{min(final):.0%} to {max(final):.0%}" if final else "-",
        f"{np.mean(queries):,.0f}" if queries else "-",
        f"{np.mean(accuracy):.1%}" if accuracy else "-",
        f"{np.mean(wall) / 60:.1f}" if wall else "-",
    ]


def _terminal_table(groups: dict[str, list[Run]]) -> Table:
    table = Table(*_OVERVIEW, box=None, padding=(0, 2, 0, 0))
    for name, runs in groups.items():
        table.add_row(*_overview(name, runs))
    return table


def _rows(groups: dict[str, list[Run]]) -> list[dict[str, Any]]:
    return [
        {key: run.summary.get(key) for key in COLUMNS}
        | {"run": run.folder.path.name, "group": name, "task": run.config.task, "seed": run.config.seed}
        for name, runs in groups.items()
        for run in runs
    ]


def _write_csv(groups: dict[str, list[Run]], file: Path) -> None:
    file.unlink(missing_ok=True)
    CsvTable(file, COLUMNS, "env_steps").append(_rows(groups))


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _but_seed(config: RunConfig) -> RunConfig:
    return replace(config, seed=0, out=None)


def _name_groups(configs: Sequence[RunConfig]) -> list[str]:
    """The reward's name; where two groups share it, also the settings in which they differ."""
    plain = [f"{config.task}: {config.reward_name}" for config in configs]
    flat = [settings.flat(_but_seed(config)) for config in configs]
    names = []
    for place, name in enumerate(plain):
        others = [flat[other] for other in range(len(configs)) if other != place and plain[other] == name]
        differing = sorted({key for other in others for key in other if other[key] != flat[place][key]})
        names.append(name + "".join(f", {key}={flat[place][key]}" for key in differing))
    return names
