"""Parsing of a command's arguments, for the commands of rlvlm and those of guests. Imports neither torch nor ray."""

import difflib
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from types import MappingProxyType
from typing import Any, TypeVar

import tyro

from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.foreign import visible
from rlvlm.core.guests import forms_of

HELP = ("-h", "--help")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
T = TypeVar("T")


def parse(kind: type[T], words: Sequence[str], prog: str, default: T | None = None, **look: Any) -> T:
    """Parses the arguments of a command.

    Args:
        kind: class of the arguments.
        words: words of the command line.
        prog: the command as the user called it, for help texts.
        default: values of options that `words` lacks; None takes those of `kind`.
        look: options for tyro's display.

    Raises:
        UsageError: an option is wrong, or a value breaks a rule.
        SystemExit: help was requested (code 0).
    """
    settings: dict[str, Any] = look if default is None else look | {"default": default}
    said, fix = io.StringIO(), f"{prog} --help"
    try:
        with redirect_stderr(said):  # tyro draws its own boxes, but ours are all alike
            return tyro.cli(kind, args=words, prog=prog, **settings)
    except ValueError as error:  # a rule of `kind` itself; those of its parts are shown by the parser
        raise UsageError(str(error), fix) from error
    except SystemExit as end:
        if end.code == EXIT_DONE:
            raise
        lines = [line.strip("│").removeprefix(" ").rstrip() for line in _COLOUR.sub("", said.getvalue()).splitlines()]
        # between its borders, and without the last line, which names the help
        blocks = re.split(r"\n─+\n", "\n".join(line for line in lines if line[:1] not in ("╭", "╰")))
        what = "\n\n".join(block for block in blocks if not block.startswith("For full helptext"))
        raise UsageError(what, fix) from None


def value_of(option: str, options: Sequence[str]) -> str | None:
    """Returns the value after `option` on the command line, empty if there is none; None without the option."""
    for place, word in enumerate(options):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else "".join(options[place + 1 : place + 2])
    return None


def print_progress(line: str) -> None:
    """Shows a line on what a command is doing, beside its output."""
    sys.stderr.write(f"{visible(line)}\n")


def run_form(
    words: Sequence[str],
    prog: str,
    forms: Mapping[str, tuple[type, Callable[..., str]]],
    others: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Runs a command with several forms, such as `labels show`, and prints the result. Guests' forms are run before.

    Args:
        words: the name of a form first, then its own arguments.
        prog: the command as the user called it.
        forms: arguments and function by name; the function returns the text to print.
        others: what further forms do, by name; the caller has run these.

    Raises:
        UsageError: there is no such form, or a value breaks a rule.
    """
    wanted = words[0] if words else ""
    about = {name: (kind.__doc__ or "").splitlines()[0] for name, (kind, _) in forms.items()}
    about |= others
    about |= {name: command.text for name, command in forms_of(prog.rpartition(" ")[2]).items()}
    if wanted in HELP:
        lines = [f"  {prog} {name:8} {text}" for name, text in about.items()]
        sys.stdout.write("\n".join([*lines, f"\noptions: {prog} {next(iter(forms))} --help", ""]))
        return EXIT_DONE
    if wanted not in forms:
        near = difflib.get_close_matches(wanted, about, n=1) or list(about)
        found = f"{prog} is followed by {', '.join(about)}; got {wanted or 'nothing'}"
        raise UsageError(found, f"{prog} {near[0]} --help")
    kind, act = forms[wanted]
    sys.stdout.write(visible(act(parse(kind, words[1:], f"{prog} {wanted}"))))
    return EXIT_DONE
