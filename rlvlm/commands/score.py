"""`rlvlm score DATA`: labels recorded episodes."""

from collections.abc import Sequence

from rlvlm.reports.options import ScoreOptions, parse_judged


def command(words: Sequence[str], prog: str) -> int:
    """Runs `score DATA [--judge.* ...] [--out DIR]`."""
    options = parse_judged(ScoreOptions, words, prog)
    from rlvlm.demonstrations.recordings import find_form

    find_form(options.data.absolute())  # a wrong folder is reported before the rest is imported
    from rlvlm.reports.score import score_data  # matplotlib and more, not needed for help

    return score_data(options)
