"""Runs commands; the only place that turns failures into a boxed message with the fix, and an exit code."""

import logging
import os
import re
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.panel import Panel
from rich.text import Text

from rlvlm.core.console.screen import QuietConsole
from rlvlm.core.errors import EXIT_DONE, FULL, MachineError, RunError, UsageError
from rlvlm.core.foreign import visible
from rlvlm.core.imports import end_quickly
from rlvlm.core.install import missing_train

# a line of a traceback; one that came from a Ray worker may begin with the worker's name and process in brackets
_FRAME = re.compile(r'\s*(?:\(\w+, .*\)\s*)?File "(.+)", line (\d+), in (\w+)')
EXIT_CRASH = 1
EXIT_INTERRUPTED = 130
"""Exit code of shells for Ctrl-C; only before a run has anything to save."""
EXIT_UNREAD = 141
"""Exit code of shells for a program whose reader closed the pipe, as `| head` does."""


class _VisibleText(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def open_streams() -> None:
    """Replaces standard output and error by streams without a reader if they are closed (`>&-`), and makes control
    characters in warnings visible.
    """
    if logging.lastResort:  # warnings of a command without a log go straight to standard error
        logging.lastResort.setFormatter(_VisibleText())
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        # else the next file that is opened gets the number, and what libraries print goes into it
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
        if getattr(sys, name) is None:  # Python leaves None for a closed descriptor
            setattr(sys, name, open(descriptor, "w", closefd=False))


def guarded(action: Callable[[], int]) -> int:
    """Returns the exit code of `action`; exceptions are shown as a box on stderr, never as a traceback."""
    open_streams()
    end_quickly()
    try:
        code = action()
        sys.stdout.flush()  # here, where a closed reader is expected, and not at the interpreter's end
        return code
    except RunError as error:
        show_failure(str(error), error.fix)
        return error.exit_code
    except SystemExit as end:  # from the argument parser, which has shown its help, or from a user's own code
        if end.code is None or isinstance(end.code, int):
            return end.code or EXIT_DONE
        show_failure(str(end.code), users_place(end))  # as in Python: a text is a failure
        return EXIT_CRASH
    except KeyboardInterrupt:
        show_failure("stopped by Ctrl-C", "")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes again at its end, and would complain on stderr: unwritten output is discarded instead
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    except Exception as error:  # the outermost frame: the user gets a box, the file keeps the traceback
        return _show_crash(error)


def _show_crash(error: Exception) -> int:
    """Shows an exception that no command foresaw, while it is handled, and returns the exit code."""
    if isinstance(error, OSError) and error.errno in FULL:
        place = f": {error.filename}" if error.filename else ""
        fix = "free some space (`df -h` shows where), or name a place on another disk; then give the command again"
        show_failure(f"the disk is full{place}", fix)
        return MachineError.exit_code
    if isinstance(error, ImportError) and (lacks := missing_train(error)):
        show_failure(str(lacks), lacks.fix)
        return lacks.exit_code
    kept = _keep_traceback()
    if isinstance(error, OSError) and error.filename is not None:
        fix = f"name another place, or mend this one; if you did not name it, please report {kept}"
        show_failure(f"{error.strerror}: {error.filename2 or error.filename}", fix)
        return MachineError.exit_code
    if place := users_place(error):
        show_failure(f"{type(error).__name__}: {error}", f"this is code of your own, {place}; see also {kept}")
        return UsageError.exit_code
    show_failure(f"unexpected {type(error).__name__}: {error}", f"please report it with {kept}")
    return EXIT_CRASH


def _keep_traceback() -> str:
    """Returns the file with the traceback of the current exception, or the traceback if none can be written."""
    with (
        suppress(OSError),
        tempfile.NamedTemporaryFile("w", prefix="rlvlm-crash-", suffix=".txt", delete=False) as file,
    ):
        file.write(traceback.format_exc())
        return file.name
    return traceback.format_exc()


def users_place(error: BaseException) -> str:
    """Returns where in a user's file an error was raised, or its call that raised it; empty if there is none.

    A user's files are those that rlvlm called and that belong neither to it nor to Python and its packages. An error
    from a Ray worker carries its traceback as text, which is parsed too.
    """
    package = Path(__file__).parents[2]
    foreign = (str(package), sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), "<")
    place, is_inside = "", False
    for line in "".join(traceback.format_exception(error)).splitlines():
        found = _FRAME.match(line)
        # the last such frame is the deepest, which is where the user has to look
        if found and found[1].startswith(str(package)) and found[1] != __file__:
            is_inside = True  # frames above ours are the caller's, and are not the cause
        elif found and is_inside and not found[1].startswith(foreign):
            place = f"in {found[3]}() at line {found[2]} of {found[1]}"
    return place


def show_failure(what: str, fix: str) -> None:
    """Draws the box: the failure, and the fix below it."""
    text = Text(visible(what.strip()))
    if fix:
        text.append("\n\nfix: ", style="bold green")
        text.append(visible(fix))
    QuietConsole(stderr=True).print(Panel(text, title="rlvlm", title_align="left", border_style="red"))
