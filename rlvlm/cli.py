"""`rlvlm run | resume | eval | collect | sweep | serve | report | fetch | slurm | doctor`: one screen, no logic."""

import difflib
import importlib
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rlvlm.console.boxes import guarded
from rlvlm.errors import EXIT_DONE, UsageError

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("TASK [options]   learn a task from a VLM's preferences", "commands:run_command"),
    "resume": ("DIR              go on with a run that was stopped", "commands:resume_command"),
    "eval": ("DIR              play the policy of a run", "commands:eval_command"),
    "sweep": ("FILE             tasks x reward sources x seeds, side by side", "sweep:sweep_command"),
    "collect": ("TASK            episodes of a scripted expert to learn from", "collect:collect_command"),
    "data": ("show | export | import   folders of such episodes", "collect:data_command"),
    "serve": ("NAME           put a judge behind HTTP; --list shows the apps", "serve:serve_command"),
    "report": ("DIR...           compare runs: table, curves, page", "commands:report_command"),
    "judge-report": (
        "RUN|STORE...     how right, sure, consistent and fast a judge was",
        "labels:judge_report_command",
    ),
    "labels": ("show | export | import   label stores", "labels:labels_command"),
    "distill": ("--from STORE --out DIR   teach a pocket judge another judge's labels", "labels:distill_command"),
    "check-task": ("TASK         does a task keep its promises? with a contact sheet", "commands:check_task_command"),
    "fetch": ("MODEL          bring a judge's weights here, for machines without a network", "fetch:fetch_command"),
    "slurm": ("TASK [options] [-- run options]   the same run as a SLURM job", "slurm:slurm_command"),
    "doctor": ("                 try what a run needs of this machine", "commands:doctor_command"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = sys.argv[1:] if words is None else list(words)
    return guarded(lambda: _dispatch(given))


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        _show_help()
        return EXIT_DONE
    name = words[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean rlvlm {near[0]}?" if near else "rlvlm --help"
        raise UsageError(f"there is no command {name!r}; commands: {', '.join(COMMANDS)}", hint)
    module, _, function = COMMANDS[name][1].partition(":")
    # a command's module is imported when it is called: some need torch and ray, and `rlvlm --help` is not to wait
    command = getattr(importlib.import_module(f"rlvlm.commands.{module}"), function)
    return command(words[1:], f"rlvlm {name}")


def _show_help() -> None:
    table = Table(box=None, show_header=False, padding=(0, 2))
    for name, (text, _) in COMMANDS.items():
        table.add_row(f"[bold]rlvlm {name}[/bold]", text.replace("[", r"\["))
    console = Console()
    console.print("Reinforcement learning whose reward comes from vision-language models, on Ray.\n")
    console.print(table)
    console.print("\nStart with [bold]rlvlm run drawer_open --smoke[/bold]; all options: rlvlm run drawer_open --help")


if __name__ == "__main__":
    sys.exit(main())
