"""Sends output of libraries to the run's log, from any process; the terminal is left to the run's own output."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


class _Terminal(io.FileIO):
    """A terminal that may be closed meanwhile: writing to it then raises BrokenPipeError, as for any closed reader."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise BrokenPipeError(*error.args) from error


@contextmanager
def quiet_output(log: Path) -> Iterator[TextIO]:
    """Redirects file descriptors 1 and 2 of this process, and of its child processes, to `log`.

    Warnings of C++ libraries bypass Python's logging, so the descriptors themselves are redirected.

    Args:
        log: file to append to.

    Yields:
        The terminal, or whatever standard output was before.
    """
    # text that Python has buffered so far belongs to the terminal
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        terminal = io.TextIOWrapper(io.BufferedWriter(_Terminal(os.dup(kept[0]), "w")), line_buffering=True)
        try:
            yield terminal
        finally:
            with suppress(BrokenPipeError):  # its reader has gone, with text still unread
                terminal.close()
    finally:
        sys.stdout.flush()  # and text that it has buffered since, to the log
        sys.stderr.flush()
        for target, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, target)
            os.close(descriptor)
