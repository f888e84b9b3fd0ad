"""`judge_panel.html`: sampled queries as the judge saw them, with its answer and the truth. One file, no scripts."""

from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from rlvlm.runs.artifacts.plots import OUTCOMES

MAX_CARDS = 120

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style></head><body>
<header><h1>$title</h1><p class="lead">$lead</p><div class="tiles">$tiles</div>$bar
<details><summary>What the judge is asked</summary><pre>$prompt</pre></details></header>
<form class="filter">$filters</form>
<main>$cards</main>
</body></html>
""")

_STYLE = """
:root { --ink:#264653; --faint:#6b7a80; --line:#e3e7e8; --paper:#f6f7f5; }
* { box-sizing:border-box } body { margin:0; background:var(--paper); color:var(--ink);
 font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
header,main,.filter { max-width:1240px; margin:0 auto; padding:0 24px } h1 { margin:32px 0 4px; font-size:26px }
.lead { color:var(--faint); margin:0 0 18px } .tiles { display:flex; gap:12px; flex-wrap:wrap }
.tile { background:#fff; border:1px solid var(--line); border-radius:10px; padding:10px 16px; min-width:120px }
.tile b { display:block; font-size:22px } .tile span { color:var(--faint); font-size:13px }
.bar { display:flex; height:12px; border-radius:6px; overflow:hidden; margin:18px 0 6px; background:var(--line) }
.legend { font-size:13px; color:var(--faint); display:flex; gap:16px; flex-wrap:wrap; margin-bottom:14px }
.legend i { display:inline-block; width:10px; height:10px; border-radius:3px; margin-right:6px }
details { background:#fff; border:1px solid var(--line); border-radius:10px; padding:8px 16px; margin-bottom:16px }
article details { margin:10px 0 0 }
summary { cursor:pointer } pre { white-space:pre-wrap; overflow-wrap:anywhere; font-size:13px; margin:8px 0 }
.filter { padding-bottom:14px } .filter input { position:absolute; opacity:0 }
.filter label { display:inline-block; padding:5px 14px; margin-right:6px; border:1px solid var(--line);
 border-radius:99px; background:#fff; cursor:pointer; font-size:14px }
.filter input:checked + label { background:var(--ink); color:#fff; border-color:var(--ink) }
.filter input:focus-visible + label { outline:2px solid var(--ink); outline-offset:2px }
main { display:grid; grid-template-columns:repeat(auto-fill,minmax(370px,1fr)); gap:18px; padding-bottom:48px }
article { background:#fff; border:1px solid var(--line); border-top:4px solid var(--mark); border-radius:10px;
 padding:14px } .top { display:flex; justify-content:space-between; margin-bottom:10px; font-size:13px;
 color:var(--faint) } .badge { color:#fff; background:var(--mark); border-radius:99px; padding:2px 11px;
 font-weight:600 } .badge.dark { color:#263238 } .pair { display:grid; grid-template-columns:1fr 1fr; gap:10px }
figure { margin:0 } figure img { width:100%; display:block; border-radius:6px; border:3px solid transparent }
figure.chosen img { border-color:var(--ink) } figcaption { font-size:13px; margin-top:5px; min-height:40px }
figcaption em { font-style:normal; color:var(--faint); display:block }
.probs { display:flex; height:8px; border-radius:4px; overflow:hidden; margin:10px 0 4px }
.probs i { display:block } .answer { font-size:13px; color:var(--faint) }
"""

_FILTERS = ("all", *OUTCOMES)
_SIDES = ("left", "right", "tie")
_PROBABILITY_COLOURS = ("#457b9d", "#e9a23b", "#cfcfcf")


def judge_page(rows: Sequence[Mapping[str, Any]], counts: Mapping[str, int], heading: str, prompt: str) -> str:
    """The page's HTML. Everything that comes from a judge is escaped, and the page allows no scripts.

    Args:
        rows: of `judge_panel.jsonl`.
        counts: of all queries of the run, by the keys of `OUTCOMES`.
        heading: e.g. the task and the reward source.
        prompt: the text that is put to the judge; empty for teachers that are not asked in words.
    """
    shown = _thin(rows)
    judge = escape(rows[0]["judge"]) if rows else "no judge"
    return _PAGE.substitute(
        title=escape(f"What the judge saw: {heading}"),
        style=_STYLE + _filter_rules(),
        lead=f"{len(shown)} of {sum(counts.values())} queries, evenly sampled over the run. Answered by {judge}.",
        tiles=_tiles(counts),
        bar=_bar(counts),
        prompt=escape(prompt or "Nothing in words: this teacher compares numbers of the simulator."),
        filters="".join(_filter(name) for name in _FILTERS if name == "all" or counts.get(name)),
        cards="".join(_card(row) for row in shown) or "<p>No query was asked.</p>",
    )


def outcome_of(row: Mapping[str, Any]) -> str:
    """What became of a sampled query, as a key of `OUTCOMES`."""
    if row["status"] == "ok":
        return {True: "correct", False: "incorrect", None: "truth ties"}[row["correct"]]
    return str(row["status"]).replace("_", " ")


def _thin(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    stride = -(-len(rows) // MAX_CARDS) or 1
    return list(rows[::stride])


def _tiles(counts: Mapping[str, int]) -> str:
    decided = counts.get("correct", 0) + counts.get("incorrect", 0)
    total = sum(counts.values())
    accuracy = f"{100 * counts.get('correct', 0) / decided:.1f} %" if decided else "none"
    undecided = f"{100 * counts.get('no preference', 0) / total:.1f} %" if total else "none"
    tiles = (
        ("queries", str(total)),
        ("right of the decided", accuracy),
        ("no preference", undecided),
        ("unreadable", str(counts.get("invalid", 0))),
        ("no answer", str(counts.get("failed", 0))),
    )
    return "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in tiles)


def _bar(counts: Mapping[str, int]) -> str:
    total = sum(counts.values()) or 1
    parts = [(name, colour, 100 * counts.get(name, 0) / total) for name, colour in OUTCOMES.items()]
    bar = "".join(f'<i style="width:{share:.2f}%;background:{colour}"></i>' for _, colour, share in parts)
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{name} {share:.1f} %</span>'
        for name, colour, share in parts
        if share
    )
    return f'<div class="bar">{bar}</div><div class="legend">{legend}</div>'


def _filter(name: str) -> str:
    key, checked = _key(name), " checked" if name == "all" else ""
    return f'<input type="radio" name="show" id="show-{key}"{checked}><label for="show-{key}">{name}</label>'


def _filter_rules() -> str:
    return "".join(
        f"body:has(#show-{_key(name)}:checked) article:not(.{_key(name)}) {{ display:none }}\n" for name in OUTCOMES
    )


def _card(row: Mapping[str, Any]) -> str:
    name = outcome_of(row)
    dark = " dark" if name == "no preference" else ""
    sides = "".join(_side(row, side, place) for place, side in enumerate(("left", "right")))
    text = f"<details><summary>raw answer</summary><pre>{escape(row['text'])}</pre></details>" if row["text"] else ""
    return (
        f'<article class="{_key(name)}" style="--mark:{OUTCOMES[name]}"><div class="top">'
        f"<span>step {int(row['env_steps']):,}, query {int(row['index']) + 1} of its session</span>"
        f'<span class="badge{dark}">{name}</span></div>'
        f'<div class="pair">{sides}</div>{_probabilities(row)}'
        f'<div class="answer">judge: {escape(row["label"] or "none")}, truth: {_truth(row["progress"])}</div>'
        f"{text}</article>"
    )


def _side(row: Mapping[str, Any], side: str, place: int) -> str:
    chosen = ' class="chosen"' if row["label"] == side else ""
    said = "<b>chosen by the judge</b>" if chosen else "&nbsp;"
    caption = f"{said}<em>true progress {100 * row['progress'][place]:.1f} %</em>"
    return (
        f'<figure{chosen}><img alt="{side} picture" src="data:image/png;base64,{escape(row[side])}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _probabilities(row: Mapping[str, Any]) -> str:
    if row["probabilities"] is None:
        return ""
    shares = list(zip(_SIDES, _PROBABILITY_COLOURS, row["probabilities"], strict=True))
    bars = "".join(f'<i style="width:{100 * p:.1f}%;background:{colour}"></i>' for _, colour, p in shares)
    words = ", ".join(f"{name} {100 * p:.0f} %" for name, _, p in shares)
    return f'<div class="probs">{bars}</div><div class="answer">{words}</div>'


def _truth(progress: Sequence[float]) -> str:
    left, right = progress
    return "tie" if left == right else ("left" if left > right else "right")


def _key(name: str) -> str:
    return name.replace(" ", "-")
