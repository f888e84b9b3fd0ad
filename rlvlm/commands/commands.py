"""The commands behind `rlvlm WORD`: each reads its words and hands over.

The rooms that need torch and ray are imported inside the commands, after everything that can be checked without.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import tyro

from rlvlm.commands.arguments import parse_run
from rlvlm.commands.sweep import resume_sweep
from rlvlm.envs.registry import task_kind, task_summary
from rlvlm.errors import EXIT_DONE, UsageError
from rlvlm.runs.doctor import check_before_run
from rlvlm.runs.folder.run_folder import check_newest, create_folder, find_folder
from rlvlm.runs.folder.settings import to_yaml


@dataclass(frozen=True)
class ResumeArguments:
    """Go on with a run that was stopped, exactly where its newest checkpoint is; or with a sweep."""

    path: tyro.conf.Positional[Path]
    """The run's folder, a checkpoint in it, or any file in it; or a sweep's folder."""


@dataclass(frozen=True)
class EvalArguments:
    """Play the best policy of a run."""

    path: tyro.conf.Positional[Path]
    """The run's folder, a checkpoint in it, or any file in it."""
    episodes: int = 10
    """Episodes to play, with the deterministic policy."""
    video: bool = False
    """Whether to write one video per episode into the run's folder."""


@dataclass(frozen=True)
class ReportArguments:
    """Compare runs, or the sources of a sweep: a table here; report.html, report.csv and report.png in a folder."""

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs; runs that differ only in their seed form a group. Or the folder of one sweep."""
    out: Path | None = None
    """Folder for the page, the tables and the pictures; by default `report`, or the sweep's own folder."""


@dataclass(frozen=True)
class CheckTaskArguments:
    """Hold a task to its contract, and draw a contact sheet: random and scripted play, a spread of progress, starts."""

    task: tyro.conf.Positional[str] = ""
    """A task by name, or `package.module:NAME` for one of your own."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the tasks that there are, and stop."""
    out: Path | None = None
    """The sheet to write, a picture; by default contact_sheets/TASK.png."""
    episodes: int = 7
    """Episodes of each way to play, from each start."""
    seed: int = 0
    """Of the first episode; the others follow."""


@dataclass(frozen=True)
class DoctorArguments:
    """Try what a run needs of this machine, and say the fix for what fails."""

    json: bool = False
    """Print one JSON object instead of lines."""


def run_command(words: Sequence[str], prog: str) -> int:
    """`run TASK [options]`."""
    arguments = parse_run(words, prog)
    if arguments.print_config:
        sys.stdout.write(to_yaml(arguments.config))
        return EXIT_DONE
    check_before_run(arguments.config)
    folder = create_folder(arguments.config, [*prog.split(), *words], datetime.now())
    from rlvlm.runs.train import start_run

    return start_run(folder, arguments.config)


def resume_command(words: Sequence[str], prog: str) -> int:
    """`resume DIR`."""
    arguments = tyro.cli(ResumeArguments, args=words, prog=prog)
    from rlvlm.sweeps.folder import find_sweep

    sweep = find_sweep(arguments.path)
    if sweep is not None:
        return resume_sweep(sweep)
    folder = find_folder(arguments.path)
    if folder.summary().get("exit_reason") == "done":
        sys.stdout.write(f"{folder.path} is finished; see its README.md\n")
        return EXIT_DONE
    check_newest(folder, arguments.path)
    config = folder.config()
    check_before_run(config)
    from rlvlm.runs.train import resume_run

    return resume_run(folder, config)


def eval_command(words: Sequence[str], prog: str) -> int:
    """`eval DIR [--episodes N] [--video]`."""
    arguments = tyro.cli(EvalArguments, args=words, prog=prog)
    folder = find_folder(arguments.path)
    from rlvlm.runs.evaluate import evaluate_run

    return evaluate_run(folder, arguments.path, arguments.episodes, arguments.video)


def report_command(words: Sequence[str], prog: str) -> int:
    """`report DIR... [--out DIR]`."""
    arguments = tyro.cli(ReportArguments, args=words, prog=prog)
    from rlvlm.reports.comparison.comparison import compare

    return compare(arguments.paths, arguments.out)


def check_task_command(words: Sequence[str], prog: str) -> int:
    """`check-task TASK [--out FILE] [--episodes N] [--seed N]` and `check-task --list`."""
    arguments = tyro.cli(CheckTaskArguments, args=words, prog=prog)
    from rlvlm.reports.task.check import check_task, list_tasks

    if arguments.list:
        return list_tasks()
    if not arguments.task:
        raise UsageError(f"name a task first: {prog} TASK; tasks: {task_summary()}", f"{prog} --list")
    if arguments.episodes < 1:
        raise UsageError(f"--episodes must be >= 1, got {arguments.episodes}")
    name = arguments.task.replace("/", "-").replace(":", ".")
    out = arguments.out or Path("contact_sheets") / f"{name}.png"
    kind = task_kind(arguments.task)
    if kind == "chunks":
        raise UsageError(f"{arguments.task} is a world in chunks, which check-task does not draw yet", f"{prog} --list")
    from rlvlm.reports.task.turns import check_turn_task

    check = check_turn_task if kind == "turns" else check_task
    return check(arguments.task, out, arguments.episodes, arguments.seed)


def doctor_command(words: Sequence[str], prog: str) -> int:
    """`doctor [--json]`."""
    arguments = tyro.cli(DoctorArguments, args=words, prog=prog)
    from rlvlm.runs.doctor import examine_machine

    return examine_machine(arguments.json)
