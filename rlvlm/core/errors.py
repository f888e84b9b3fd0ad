"""Errors that end a run, each with what to do about it and the exit code that `rlvlm` returns.

Wrong values inside the library stay plain `ValueError`s; these classes are for what a user sees.
"""

import errno
from collections.abc import Mapping
from typing import Any

EXIT_DONE = 0
EXIT_PREEMPTED = 75
"""Stopped by a signal after saving; run the same command or `rlvlm resume` to go on."""


class RunError(Exception):
    """A run cannot start or go on; `fix` says what the user can do.

    Args:
        what: what happened and the rule it breaks, with the value that was met.
        fix: one line that mends it, a command where there is one.
    """

    exit_code = 1

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


class UsageError(RunError):
    """A wrong word or value on the command line or in a file."""

    exit_code = 2


class UnsupportedQuestion(UsageError):  # noqa: N818 - beside JudgeUnavailable
    """The judge works, but it cannot be asked this; trying again would not help."""


class MachineError(RunError):
    """The machine lacks something: a renderer, disk, a port, memory, a GPU."""

    exit_code = 3


class NumericsError(RunError):
    """An observation, reward, label, loss, gradient or weight is not finite.

    Args:
        what: as of a `RunError`.
        fix: likewise.
        found: arrays by name that were there when it was met; a run leaves them in its folder.
    """

    exit_code = 4

    def __init__(self, what: str, fix: str = "", found: Mapping[str, Any] | None = None) -> None:
        super().__init__(what, fix)
        self.found = dict(found or {})


class ModelUnavailable(RunError):  # noqa: N818 - beside JudgeUnavailable
    """A VLM cannot be loaded, or the API behind which it runs does not answer."""

    exit_code = 5


class JudgeUnavailable(ModelUnavailable):
    """The judge cannot be loaded, or stopped answering."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of an OSError that says that a disk, or a user's share of it, is full."""


def first_line(error: BaseException) -> str:
    """What an error says in its first line, or its class's name where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of a GPU or of the machine is too small."""
    # CUDA, the CPU's allocator and bitsandbytes each have their own class and words for it
    words = ("out of memory", "allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
