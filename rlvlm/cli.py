"""`rlvlm run | resume | eval | collect | sweep | serve | report | fetch | doctor`: one screen, no logic."""

import difflib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from rlvlm.core.console.boxes import guarded
from rlvlm.core.console.screen import QuietConsole
from rlvlm.core.disk import expand_home
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.guests import Command, forms_of, guest_of, load, with_guests
from rlvlm.core.imports import uncollected
from rlvlm.core.install import check_train

COMMANDS: dict[str, str] = {
    "run": "TASK [options]   train on a task: preference rewards, a VLM policy or a VLA policy",
    "resume": "DIR              resume a run that was stopped",
    "eval": "DIR              play the policy of a run",
    "export": "DIR --out NEW    write a run's policy as LeRobot, transformers and PEFT, or OpenVLA-OFT load it",
    "sweep": "FILE             tasks x reward sources x seeds, side by side",
    "collect": "TASK             collect demonstrations by a scripted expert or a VLM",
    "sft": "TASK --from DATA fine-tune a policy on a folder of demonstrations",
    "data": "show   folders of demonstrations",
    "serve": "NAME|RUN         serve a judge, or a run's policy, over HTTP; --list shows the judges",
    "report": "DIR...           compare runs: table, curves, page",
    "judge-report": "RUN|STORE...     a judge's accuracy, calibration, consistency and latency",
    "judge-bench": "[SUITE]          measure a judge on known answers, before anything is trained",
    "score": "DATA             a judge's labels of recorded episodes, and which of them to drop",
    "labels": "show | export | import   label stores",
    "check-task": "TASK             check a task against the env contract; makes a contact sheet",
    "fetch": "MODEL            download a judge's weights, for machines without a network",
    "doctor": "                 check that this machine has what a run needs",
}
"""The core's commands and what `rlvlm --help` says of them; each is the function `command` of the file of its name."""

TRAIN = ("run", "resume", "eval", "export", "sweep", "collect", "sft", "serve", "fetch")
"""Commands that need the train extra; the others are the judge's kit, and need it for some arguments alone."""
_MEANT = {"train": "run", "learn": "run", "start": "run", "play": "eval", "test": "eval", "benchmark": "judge-bench"}
"""Words that others use for our commands, none of which is spelled like them."""


def commands() -> dict[str, Command]:
    """Returns all commands by name: the core's, with the forms that guests add to them, and the guests' own."""
    known: dict[str, Command] = {}
    for name, text in COMMANDS.items():
        usage, gap, about = text.partition("   ")
        text = " | ".join([usage, *forms_of(name)]) + gap + about
        call = f"rlvlm.commands.{name.replace('-', '_')}:command"
        known[name] = Command(call=call, text=text, needs_train=name in TRAIN)
    return with_guests("commands", known)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = [expand_home(word) for word in (sys.argv[1:] if argv is None else argv)]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # `python -m rlvlm.run my_file:TASK` finds it there, and so should `rlvlm`
    return guarded(lambda: run_command(given))


def run_command(argv: Sequence[str]) -> int:
    """Hands over to the file of the first word.

    Raises:
        UsageError: there is none.
    """
    known = commands()
    if not argv or argv[0] in ("-h", "--help"):
        table = Table(box=None, show_header=False, padding=(0, 2))
        for name, command in known.items():
            if " " not in name:
                table.add_row(Text(f"rlvlm {name}", style="bold"), command.text)
        console = QuietConsole()
        console.print("Reinforcement learning whose reward comes from vision-language models, on Ray.\n")
        console.print(table)
        first = ("rlvlm run drawer_open --smoke", "bold")
        console.print(Text.assemble("\nStart with ", first, "; options: rlvlm run drawer_open --help"))
        return EXIT_DONE
    name = argv[0]
    if name == "--version":
        print(f"rlvlm {importlib.metadata.version('rlvlm')}")  # noqa: T201 - what was asked for, and nothing else
        return EXIT_DONE
    # a guest's form of a command, such as `labels agree`, goes before the command itself
    name = next((form for form in (" ".join(argv[:2]), name) if form in known), name)
    for wanted in (" ".join(argv[:2]), name):
        if missing := guest_of("commands", wanted):
            raise UsageError(f"there is no command {wanted!r}{missing}", "install it, or see rlvlm --help")
    if name not in known:
        near = [_MEANT[name]] if name in _MEANT else difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean rlvlm {near[0]}?" if near else "rlvlm --help"
        listed = ", ".join(command for command in known if " " not in command)
        raise UsageError(f"there is no command {name!r}; commands: {listed}", hint)
    if known[name].needs_train:
        check_train(f"rlvlm {name}")
    # imported when it is called: some commands need torch and ray, and `rlvlm --help` is not to wait
    with uncollected():
        command = load(known[name].call)
    return command(argv[len(name.split()) :], f"rlvlm {name}")


if __name__ == "__main__":
    sys.exit(main())
