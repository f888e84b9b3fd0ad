"""`python -m rlvlm.run TASK`: the word `run` without `rlvlm` before it."""

import sys
from collections.abc import Sequence

from rlvlm.core.console.boxes import guarded
from rlvlm.core.disk import expand_home
from rlvlm.core.imports import uncollected


def main(words: Sequence[str] | None = None) -> int:
    """Runs a task and returns the exit code of `rlvlm.core.errors`."""
    with uncollected():
        from rlvlm.commands import run
    given = [expand_home(word) for word in (sys.argv[1:] if words is None else words)]
    return guarded(lambda: run.command(given, "python -m rlvlm.run"))


if __name__ == "__main__":
    sys.exit(main())
