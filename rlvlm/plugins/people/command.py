"""`rlvlm labels ask`."""

import sys
from collections.abc import Sequence

from rlvlm.core.console.arguments import parse
from rlvlm.core.errors import EXIT_DONE
from rlvlm.core.foreign import visible
from rlvlm.plugins.people.config import AskArguments


def command(words: Sequence[str], prog: str) -> int:
    """Runs `labels ask PLACE`."""
    arguments = parse(AskArguments, words, prog)
    from rlvlm.plugins.people.asking import ask  # reads recordings, which help texts do not

    sys.stdout.write(visible(ask(arguments)))
    return EXIT_DONE
