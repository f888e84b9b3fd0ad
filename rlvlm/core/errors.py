"""Errors that end a run, each with a fix and the exit code that `rlvlm` returns.

Wrong values inside the library stay plain `ValueError`s; these classes are for errors that a user sees.
"""

import errno
from collections.abc import Mapping
from typing import Any

EXIT_DONE = 0
EXIT_PREEMPTED = 75
"""Exit code after a signal and saving; the same command or `rlvlm resume` continues."""


class RunError(Exception):
    """A run cannot start or go on; `fix` says what the user can do.

    Args:
        what: what happened and the rule, with the value.
        fix: one line with the remedy, a command if possible.
    """

    exit_code = 1

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix
        if fix:
            self.add_note(f"fix: {fix}")  # a traceback shows it, as the box of a command does


class UsageError(RunError):
    """A word or value on the command line or in a file is wrong."""

    exit_code = 2


class UnsupportedQuestion(UsageError):  # noqa: N818 - beside JudgeUnavailable
    """The judge works, but cannot be asked this; trying again would not help."""


class MachineError(RunError):
    """The machine lacks something: a renderer, disk, a port, memory, a GPU."""

    exit_code = 3


class NumericsError(RunError):
    """An observation, reward, label, loss, gradient or weight is not finite.

    Args:
        what: as for `RunError`.
        fix: as for `RunError`.
        found: arrays at hand, by name; a run saves them in its folder.
    """

    exit_code = 4

    def __init__(self, what: str, fix: str = "", found: Mapping[str, Any] | None = None) -> None:
        super().__init__(what, fix)
        self.found = dict(found or {})


class ModelUnavailable(RunError):  # noqa: N818 - beside JudgeUnavailable
    """A VLM cannot be loaded, or the API behind which it runs does not answer."""

    exit_code = 5
    is_final = False
    """Whether asking again cannot help: the key is wrong, the budget or the quota is spent."""


class JudgeUnavailable(ModelUnavailable):
    """The judge cannot be loaded, or stopped answering."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of an OSError for a full disk or quota."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class if it is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error is about insufficient memory of a GPU or of the machine."""
    # CUDA, the CPU's allocator and bitsandbytes each have their own class and message for it
    words = ("out of memory", "allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
