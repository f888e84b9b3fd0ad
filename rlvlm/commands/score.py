"""`rlvlm score DATA`: labels recorded episodes."""

from collections.abc import Sequence

from rlvlm.core.console.arguments import parse
from rlvlm.reports.options import ScoreOptions


def command(words: Sequence[str], prog: str) -> int:
    """Runs `score DATA [--judge.* ...] [--out DIR]`."""
    options = parse(ScoreOptions, words, prog)
    from rlvlm.reports.score import score_data  # matplotlib and more, not needed for help

    return score_data(options)
