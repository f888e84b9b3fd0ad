"""`judge_report.html`, and the table of figures that it shares with the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.labels.images import MissingImage
from rlvlm.reports.judge.answers import Answers
from rlvlm.reports.judge.measures import outcomes
from rlvlm.runs.artifacts.samples import encode_png
from rlvlm.templates import inline, render

MAX_MISTAKES = 6
"""Shown per source."""
_CARD_PX = 200


def report_page(
    sources: Sequence[Answers], rows: Sequence[Mapping[str, Any]], pictures: Mapping[str, Path], title: str
) -> str:
    """The page's HTML.

    Args:
        sources: what is reported.
        rows: `measures.summarise` of each.
        pictures: files from `figures.draw_all`.
        title: of the page.
    """
    tables = [table_cells(row) for row in rows]
    lines = [(name, [table[name] for table in tables]) for name in tables[0]]
    return render(
        "judge_report.html.j2",
        title=title,
        total=sum(map(len, sources)),
        heads=[(row["source"], row["about"]) for row in rows],
        lines=[(name, cells) for name, cells in lines if set(cells) != {"-"}],
        pictures={name: inline(file) for name, file in pictures.items()},
        mistakes=[_mistakes(source) for source in sources],
    )


def table_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """A row's figures as text, by name."""

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.1f} %"

    low, high, p50, p95 = (row[name] for name in ("accuracy_low", "accuracy_high", "latency_p50_s", "latency_p95_s"))
    swaps, tokens, usd = row["swap_consistency"], row["tokens_per_answer"], row["usd_per_1000_answers"]
    return {
        "answers": f"{row['answers']:,}",
        "right of the decided": percent(row["accuracy"]),
        "95 %": "-" if low is None else f"{percent(low)} to {percent(high)}",
        **{
            name.replace("_", " "): percent(row[name] / row["answers"])
            for name in ("no_preference", "invalid", "failed")
        },
        "said left": percent(row["said_left"]),
        "ECE": percent(row["ece"]),
        "swaps with order": "-" if swaps is None else f"{percent(swaps)} of {row['asked_both_ways']:,}",
        "p50 / p95": "-" if p50 is None else f"{1_000 * p50:,.0f} / {1_000 * p95:,.0f} ms",
        "tokens": "-" if tokens is None else f"{tokens:,.0f}",
        "USD per 1,000": "-" if usd is None else f"{usd:,.2f}",
    }


def _mistakes(source: Answers) -> tuple[str, int, list[dict[str, Any]]]:
    """A source's name, how many of its answers are wrong, and cards of those that it was surest of."""
    wrong = np.flatnonzero(outcomes(source) == "incorrect")
    gaps = np.abs(source.truth[wrong, 1] - source.truth[wrong, 0])
    sure = np.nan_to_num(source.p[wrong, :2].max(1, initial=0.0), nan=0.0)
    cards = []
    for place in wrong[np.lexsort((-gaps, -sure))][: 4 * MAX_MISTAKES]:  # more than shown: some have no images
        try:
            cards.append({"text": source.text[place], "sides": [_side(source, int(place), side) for side in (0, 1)]})
        except MissingImage:
            continue
    return source.name, len(wrong), cards[:MAX_MISTAKES]


def _side(source: Answers, place: int, side: int) -> dict[str, Any]:
    """One image of a question, with the truth about it and how sure the judge was of it."""
    if source.store is None:
        raise MissingImage("the answers come from no store")
    image = source.store.image(source.images[place][side])
    step = -(-max(image.shape[:2]) // _CARD_PX)
    name, sure = ("left", "right")[side], float(source.p[place, side])
    return {
        "name": name,
        "is_said": source.label[place] == name,
        "picture": f"data:image/png;base64,{encode_png(image[::step, ::step])}",
        "truth": float(source.truth[place, side]),
        "sure": sure if np.isfinite(sure) else None,
    }
