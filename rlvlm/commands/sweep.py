"""`rlvlm sweep FILE`: runs a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from rlvlm.core.console.arguments import parse
from rlvlm.core.console.tables import plain_console, plain_table
from rlvlm.core.errors import EXIT_DONE
from rlvlm.sweeps.config import SweepConfig, find_sweep_file, read_sweep
from rlvlm.sweeps.plan import expand, notes_of_plans


@dataclass(frozen=True)
class SweepArguments:
    """Run every task with every reward source and every seed of a file; repeating the command resumes the rest."""

    file: tyro.conf.Positional[str]
    """YAML file, or the name of one in tune_configs/."""
    out: Path | None = None
    """The sweep's folder; by default runs/sweeps/NAME."""
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Shorten every run to minutes: all parts run, nothing is trained to convergence."""
    plan: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show the runs and their budgets, and stop."""
    dashboard: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Open the dashboard of the sweep's Ray, and print a link to it."""
    dashboard_port: int = 8265
    """Port of that dashboard, on the loopback address."""


def command(words: Sequence[str], prog: str) -> int:
    """Runs `sweep FILE [--out DIR] [--smoke] [--plan] [--dashboard]`: runs unfinished runs, or shows them."""
    arguments = parse(SweepArguments, words, prog)
    file = find_sweep_file(arguments.file)
    sweep = read_sweep(file)
    if arguments.smoke:
        sweep = replace(sweep, smoke=True)
    out = arguments.out or Path("runs/sweeps") / (f"{file.stem}-smoke" if sweep.smoke else file.stem)
    if arguments.plan:
        show_plan(sweep, out)
        return EXIT_DONE
    from rlvlm.runs.start.preflight import check_dashboard
    from rlvlm.sweeps.sweep import run_sweep  # torch and ray, after everything that can be checked without them

    if arguments.dashboard:
        check_dashboard(arguments.dashboard_port, "--dashboard-port")
    return run_sweep(out, sweep, arguments.dashboard_port if arguments.dashboard else None)


def show_plan(sweep: SweepConfig, out: Path) -> None:
    """Prints the runs of a sweep.

    Raises:
        UsageError: a setting is wrong.
    """
    plans = expand(sweep)
    rows = []
    for task in sweep.tasks:
        for source, about in sweep.sources.items():
            # runs of a task and source differ only in their seed
            config = next(plan.config for plan in plans if (plan.task, plan.source) == (task, source))
            most = config.kind.max_queries(config)
            queries = f"{most:,}" if most else "-"
            seeds = ", ".join(map(str, sweep.seeds_of(task)))
            rows.append((task, source, seeds, f"{config.steps:,}", queries, f"{about.title} ({config.reward_name})"))
    heads = ("task", "source", "seeds", "steps", "queries", "reward")
    words = ("task", "source", "seeds", "reward")
    console = plain_console()
    console.print(sweep.title, style="bold")
    console.print(plain_table(heads, rows, words=words, wraps=words))
    for note in notes_of_plans(plans):
        console.print(note)
    console.print(f"{len(plans)} runs, in {out}")
