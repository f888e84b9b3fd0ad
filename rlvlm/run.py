"""`python -m rlvlm.run TASK`: parse, hand over to `rlvlm.experiments`, exit code."""

import sys
from collections.abc import Sequence

from rlvlm.commands.commands import run_command
from rlvlm.console.boxes import guarded


def main(words: Sequence[str] | None = None) -> int:
    """Runs a task and returns the exit code of `rlvlm.errors`."""
    given = sys.argv[1:] if words is None else words
    return guarded(lambda: run_command(given, "python -m rlvlm.run"))


if __name__ == "__main__":
    sys.exit(main())
