"""`judge_report.html`: one file, no scripts, everything that a judge wrote escaped."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from rlvlm.labels.pictures import MissingPicture
from rlvlm.reports.judge.answers import Answers
from rlvlm.reports.judge.measures import outcomes
from rlvlm.runs.artifacts.samples import encode_png

MAX_MISTAKES = 6
"""Shown per source."""
_CARD_PX = 200

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>$style</style></head><body><main>
<h1>$title</h1><p class="lead">$lead</p>
<div class="wide">$table</div>
$sections
<h2>The most confident mistakes</h2>$mistakes
<h2>How to read this</h2>$notes
</main></body></html>
""")
_STYLE = """
:root { --ink:#264653; --faint:#6b7a80; --line:#e3e7e8 } * { box-sizing:border-box }
body { margin:0; background:#f6f7f5; color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
main { max-width:1060px; margin:0 auto; padding:0 24px 64px } h1 { margin:32px 0 4px; font-size:26px }
h2 { margin:40px 0 8px; font-size:19px } .lead,.note { color:var(--faint); margin:0 0 14px }
.wide { overflow-x:auto } table { border-collapse:collapse; background:#fff; border:1px solid var(--line); width:100% }
th,td { padding:7px 11px; border-bottom:1px solid var(--line); text-align:right; white-space:nowrap; font-size:14px }
th { font-weight:600; white-space:normal; min-width:150px; vertical-align:top; overflow-wrap:anywhere }
td:first-child { text-align:left; color:var(--faint) }
th small { display:block; color:var(--faint); font-size:12px; font-weight:400 }
figure { margin:0; background:#fff; border:1px solid var(--line); border-radius:10px; padding:14px }
figure img { max-width:100%; display:block; margin:0 auto }
.cards { display:grid; grid-template-columns:repeat(auto-fill,minmax(310px,1fr)); gap:16px }
article { background:#fff; border:1px solid var(--line); border-top:4px solid #e76f51; border-radius:10px;
 padding:12px }
.pair { display:grid; grid-template-columns:1fr 1fr; gap:8px } .pair img { width:100%; display:block; border-radius:6px;
 border:3px solid transparent } .pair .said img { border-color:var(--ink) } .pair div { font-size:13px }
pre { white-space:pre-wrap; overflow-wrap:anywhere; font-size:12px; max-height:120px; overflow-y:auto; margin:8px 0 0 }
li { margin-bottom:6px }
"""
_SECTIONS = {
    "accuracy": (
        "Right answers by difficulty",
        "Solid: the answers reported here. Dashed: the reference's own, from its paper; another VLM, other "
        "pictures, other pairs. They show the shape to expect, not a race.",
    ),
    "difficulty": (
        "What became of the answers, by difficulty",
        "Numbers above the bars count answers. Hatched panels are the reference's.",
    ),
    "confusion": ("True side against said side", "Rows are true, columns said; shares are of the row."),
    "calibration": (
        "How sure, and how right",
        "Points on the diagonal: as right as it was sure. ECE is the mean distance from it, weighted by answers.",
    ),
    "outcomes": ("All answers", "The four statuses are counted apart: a failure is no tie, and neither is a guess."),
    "latency": (
        "Latency",
        "Answers come in batches, so this is the time until the whole batch was answered, as the judge saw it; "
        "answers found in a store keep the time they once took.",
    ),
}
COLUMNS = (
    "answers",
    "right of the decided",
    "95 %",
    "no preference",
    "invalid",
    "failed",
    "said left",
    "ECE",
    "swaps with order",
    "p50 / p95",
    "tokens",
    "USD per 1,000",
)
"""Of `table_cells`."""
_NOTES = """<ul>
<li><b>Right of the decided</b>: labels that name the side with more true progress. Undecided and unreadable answers,
and pairs whose truth is a tie, do not count. The interval is Wilson's.</li>
<li><b>Said left</b>: share of decided labels that name the first picture. Pairs are drawn at random, so far from 50 %
means a preference for a place.</li>
<li><b>Swaps with order</b>: of the pairs asked in both orders, how many labels swap with the pictures. Runs ask in one
order; <code>rlvlm judge-report RUN --ask-swapped 100</code> asks in the other afterwards.</li>
<li><b>The truth</b> is the simulator's. No judge sees it: runs write it into the store after the answers.</li>
<li><b>Theirs</b> is read off a published figure by eye and stands here for the shape alone.</li>
</ul>"""


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
    sections = [
        f"<h2>{_SECTIONS[name][0]}</h2><p class=note>{_SECTIONS[name][1]}</p>"
        f'<figure><img alt="{_SECTIONS[name][0]}" src="data:image/png;base64,{_encode(pictures[name])}"></figure>'
        for name in _SECTIONS
        if name in pictures
    ]
    total = sum(len(source) for source in sources)
    return _PAGE.substitute(
        title=escape(title),
        style=_STYLE,
        lead=f"{total:,} answers from {len(sources)} source{'s' * (len(sources) > 1)}.",
        table=_table(rows),
        sections="".join(sections),
        mistakes="".join(_mistakes(source) for source in sources),
        notes=_NOTES,
    )


def table_cells(row: Mapping[str, Any]) -> list[str]:
    """A row's figures as text, in the order of `COLUMNS`."""
    low, high, p50, p95 = (row[name] for name in ("accuracy_low", "accuracy_high", "latency_p50_s", "latency_p95_s"))
    swaps, pairs = row["swap_consistency"], row["asked_both_ways"]
    return [
        f"{row['answers']:,}",
        _percent(row["accuracy"]),
        "-" if low is None else f"{_percent(low)} to {_percent(high)}",
        *(_percent(row[name] / row["answers"]) for name in ("no_preference", "invalid", "failed")),
        _percent(row["said_left"]),
        _percent(row["ece"]),
        "-" if swaps is None else f"{_percent(swaps)} of {pairs:,}",
        "-" if p50 is None else f"{1_000 * p50:,.0f} / {1_000 * p95:,.0f} ms",
        _plain(row["tokens_per_answer"], "{:,.0f}"),
        _plain(row["usd_per_1000_answers"], "{:,.2f}"),
    ]


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A column per source; lines that say nothing of any of them are left out."""
    heads = "".join(f"<th>{escape(row['source'])}<small>{escape(row['about'])}</small></th>" for row in rows)
    lines = zip(COLUMNS, zip(*map(table_cells, rows), strict=True), strict=True)
    body = "".join(
        f"<tr><td>{name}</td>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for name, cells in lines
        if set(cells) != {"-"}
    )
    return f"<table><tr><th></th>{heads}</tr>{body}</table>"


def _mistakes(source: Answers) -> str:
    """Cards of the wrong answers that the judge was surest of."""
    wrong = np.flatnonzero(outcomes(source) == "incorrect")
    heading = f"<h3>{escape(source.name)}</h3>"
    if not len(wrong):
        return f"{heading}<p class=note>None: no decided label with a known truth is wrong.</p>"
    gaps = np.abs(source.truth[wrong, 1] - source.truth[wrong, 0])
    sure = np.nan_to_num(source.p[wrong, :2].max(1), nan=0.0)
    order = wrong[np.lexsort((-gaps, -sure))]
    cards = [card for place in order[: 4 * MAX_MISTAKES] if (card := _card(source, int(place)))]
    if not cards:
        return f"{heading}<p class=note>{len(wrong):,} are wrong; their pictures are not in a store.</p>"
    return f"{heading}<div class=cards>{''.join(cards[:MAX_MISTAKES])}</div>"


def _card(source: Answers, place: int) -> str:
    """One wrong answer with its pictures; empty where these cannot be read."""
    sides = []
    for side, name in enumerate(("left", "right")):
        try:
            if source.store is None:
                return ""
            picture = source.store.picture(source.pictures[place][side])
        except MissingPicture:
            return ""
        step = -(-max(picture.shape[:2]) // _CARD_PX)
        said = " class=said" if source.label[place] == name else ""
        probability = source.p[place, side]
        sure = f", judge {_percent(float(probability))}" if np.isfinite(probability) else ""
        sides.append(
            f'<div{said}><img alt="{name}" src="data:image/png;base64,{encode_png(picture[::step, ::step])}">'
            f"{name}: truth {source.truth[place, side]:.3g}{sure}</div>"
        )
    text = f"<pre>{escape(source.text[place])}</pre>" if source.text[place] else ""
    return f"<article><div class=pair>{''.join(sides)}</div>{text}</article>"


def _encode(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _plain(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
