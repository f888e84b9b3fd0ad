"""The price of questions, as `--dry-run` of `judge-bench` and `score` prints it."""

import math
from collections.abc import Sequence

from rlvlm.core.console.tables import plain_console, plain_table
from rlvlm.judge_bench.price import Price


def print_prices(prices: Sequence[Price]) -> None:
    """Prints what parts of a command would take, and their sum."""
    total = Price(
        what="together",
        questions=sum(price.questions for price in prices),
        images=sum(price.images for price in prices),
        seconds=sum(price.seconds for price in prices),
        usd=sum(price.usd for price in prices),
    )
    rows = [
        (
            price.what,
            f"{price.questions:,}",
            f"{price.images:,}",
            f"{price.seconds:,.1f}",
            "-" if math.isnan(price.usd) else f"{price.usd:.2f}",
        )
        for price in (*prices, total)
    ]
    console = plain_console(soft_wrap=True)
    console.print(plain_table(("", "questions", "images", "seconds of answers", "USD"), rows, words=("",)))
    console.print(
        "Nothing was measured: leave out --dry-run. A budget ends it: --judge.api.max-cost-usd or max-requests."
    )
