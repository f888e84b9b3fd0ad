"""`judge_panel.html`: sampled queries as the judge saw them, with its answer and the truth."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlvlm.runs.artifacts.plots import OUTCOMES
from rlvlm.templates import render

MAX_CARDS = 120
FIRST = ("incorrect", "correct", "truth ties")
"""What is shown first: answers that say something, and of these the wrong ones; the others follow."""


def judge_page(rows: Sequence[Mapping[str, Any]], counts: Mapping[str, int], heading: str, prompt: str) -> str:
    """The page's HTML.

    Args:
        rows: of `judge_panel.jsonl`.
        counts: of all queries of the run, by the keys of `OUTCOMES`.
        heading: e.g. the task and the reward source.
        prompt: the text that is put to the judge; empty for teachers that are not asked in words.
    """
    stride = -(-len(rows) // MAX_CARDS) or 1
    cards = [{**row, "outcome": outcome_of(row)} for row in rows[::stride]]
    cards.sort(key=lambda card: FIRST.index(card["outcome"]) if card["outcome"] in FIRST else len(FIRST))
    found = Counter(card["outcome"] for card in cards)
    total = sum(counts.values())
    decided = counts.get("correct", 0) + counts.get("incorrect", 0)
    tiles = {
        "queries": f"{total:,}",
        "no preference": f"{100 * counts.get('no preference', 0) / total:.1f} %" if total else "none",
        "right of the decided": f"{100 * counts.get('correct', 0) / decided:.1f} %" if decided else "none",
        "unreadable": counts.get("invalid", 0),
        "no answer": counts.get("failed", 0),
    }
    return render(
        "judge_panel.html.j2",
        title=f"What the judge saw: {heading}",
        judge=rows[0]["judge"] if rows else "no judge",
        cards=cards,
        shown_counts={name: found[name] for name in OUTCOMES if found[name]},
        total=total,
        tiles=tiles,
        shares={name: 100 * counts[name] / total for name in OUTCOMES if counts.get(name)},
        colours=OUTCOMES,
        prompt=prompt,
    )


def outcome_of(row: Mapping[str, Any]) -> str:
    """What became of a sampled query, as a key of `OUTCOMES`."""
    if row["status"] == "ok":
        return {True: "correct", False: "incorrect", None: "truth ties"}[row["correct"]]
    return str(row["status"]).replace("_", " ")
