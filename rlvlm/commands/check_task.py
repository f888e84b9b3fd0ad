"""`rlvlm check-task TASK`: checks a task's env."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlvlm.core.checks import PositiveInt, check_bounds
from rlvlm.core.console.arguments import parse
from rlvlm.core.errors import UsageError
from rlvlm.envs.registry import task_summary


@dataclass(frozen=True)
class CheckTaskArguments:
    """Hold a task to its contract, and draw a contact sheet: random and scripted play, a spread of progress, starts."""

    task: tyro.conf.Positional[str] = ""
    """Task by name, `gym:ID`, or `package.module:NAME` for your own."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """List all tasks, or those of the named family, and stop."""
    out: Path | None = None
    """Image file for the sheet; by default contact_sheets/TASK.png."""
    episodes: PositiveInt = 7
    """Episodes of each way to play, from each start, >= 1."""
    seed: int = 0
    """Seed of the first episode; the others follow."""

    def __post_init__(self) -> None:
        check_bounds(self, "--")


def command(words: Sequence[str], prog: str) -> int:
    """Runs `check-task TASK [--out FILE] [--episodes N] [--seed N]` or `check-task [FAMILY] --list`."""
    arguments = parse(CheckTaskArguments, words, prog)
    from rlvlm.reports.check_task import check_task, list_tasks  # numpy and the envs: not needed for help

    if arguments.list:
        return list_tasks(arguments.task)
    if not arguments.task:
        raise UsageError(f"name a task: {prog} TASK; tasks: {task_summary()}", f"{prog} --list")
    name = arguments.task.replace("/", "-").replace(":", ".")
    out = arguments.out or Path("contact_sheets") / f"{name}.png"
    return check_task(arguments.task, out, arguments.episodes, arguments.seed)
