"""A judge's answers on a page: figures, faults, charts, and answers with their images. Benches, runs, label stores and
scored data all show these; each adds sections of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlvlm.core.steps import Frames
from rlvlm.judge_bench.rows import PAIR_NAMES, SCORE_NAMES, number_cell, share_cell
from rlvlm.pages.answers import Answers
from rlvlm.pages.judge_charts import answer_charts
from rlvlm.pages.page import Card, Picture, Section, Table
from rlvlm.templates import inline
from rlvlm.vlms.stills import to_png

CARD_PX = 180
"""Longer side of an image on a card, pixels."""
_READING = (
    "The gap is the difference in truth; both orders count. Bars are shares of the answers, with their number above; "
    "the line is the accuracy of the decided ones.",
    "In the scores green is where the goal is reached, violet a control where it is not. Controls are made of "
    "successes: backwards, under another instruction, their first image alone, noise. A jump shows the first image "
    "until the last.",
    "Points on the diagonal of the calibration are perfectly calibrated; ECE is the mean distance from it, weighted by "
    "answers.",
)


def answer_sections(
    rows: Mapping[str, Mapping[str, Any]], sources: Sequence[Answers], parts: Sequence[Answers] = ()
) -> list[Section]:
    """Returns the sections that every page of judges has: what is wrong, the charts, the figures.

    Args:
        rows: by name of the judge, as `cells` takes them, with `faults`.
        sources: answers of each, for the charts.
        parts: answers of the only judge to each task, if there are several.
    """
    charts = answer_charts(sources, parts)
    sections = [fault_section({name: row["faults"] for name, row in rows.items()})]
    if charts:
        sections.append(Section(heading="How it answers", charts=charts, notes_below=_READING))
    return [*sections, Section(heading="Figures", tables=figure_tables(rows))]


def fault_section(faults: Mapping[str, Sequence[Mapping[str, Any]]]) -> Section:
    """Returns the section on the faults of each judge, which says so if none was found."""
    points = [
        (f"{name}: {fault['name']}" if len(faults) > 1 else str(fault["name"]), str(fault["evidence"]))
        for name, found in faults.items()
        for fault in found
    ]
    none = [name for name, found in faults.items() if not found]
    of = f" of {', '.join(none)}" if len(faults) > 1 else ""
    return Section(heading="What is wrong", points=points, notes=[f"No known fault{of} was found."] if none else [])


def figure_tables(rows: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Returns tables of the figures of judges, a column each; lines and tables without a figure are left out."""
    tables = [cells(row) for row in rows.values()]
    found = []
    for part in tables[0]:
        names = dict.fromkeys(name for table in tables for name in table[part])
        lines = [(name, *(table[part].get(name, "-") for table in tables)) for name in names]
        if lines := [line for line in lines if set(line[1:]) != {"-"}]:
            found.append(Table(heads=(part, *rows), rows=lines))
    return found


def cells(row: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns a row's figures as text, by table and name; `-` if nothing was asked.

    Args:
        row: row of a bench, or of `answers.summarise`; parts of `figures` may be missing.
    """
    pairs, scores, cost = (row["figures"].get(name, {}) for name in ("pairs", "scores", "cost"))
    # [10, 3] right, wrong and other answers by tenths of the gap, the hardest first
    bins = np.array(pairs.get("by_difficulty", np.zeros((10, 3))))
    hard, easy = bins[:3].sum(0), bins[7:].sum(0)
    false = scores.get("false_positives", {})
    compared = {
        PAIR_NAMES["accuracy"]: share_cell(pairs.get("accuracy")),
        "  the hardest, gaps below 0.3": percent(hard[0], hard[0] + hard[1]),
        "  the easiest, from 0.7 on": percent(easy[0], easy[0] + easy[1]),
        PAIR_NAMES["undecided"]: share_cell(pairs.get("undecided")),
        PAIR_NAMES["unread"]: share_cell(pairs.get("unread")),
        PAIR_NAMES["said_left"]: share_cell(pairs.get("said_left")),
        PAIR_NAMES["consistent"]: share_cell(pairs.get("consistent")),
        "chooses between equal images": share_cell(pairs.get("same_image")),
        "same label for another task": share_cell(pairs.get("other_task")),
        **{f"same label: {case}": share_cell(value) for case, value in pairs.get("steady", {}).items()},
        PAIR_NAMES["ece"]: number_cell(pairs.get("ece")),
    }
    scored = {
        SCORE_NAMES["auc"]: number_cell(scores.get("auc")),
        "AUC against hacked episodes": number_cell(scores.get("hacked_auc")),
        "best threshold": number_cell(scores.get("threshold")),
        SCORE_NAMES["ece"]: number_cell(scores.get("ece")),
        "unread scores": share_cell(scores.get("unread")),
        **{f"called success: {case}": share_cell(value) for case, value in false.items()},
        **{f"still a success: {case}": share_cell(value) for case, value in scores.get("kept", {}).items()},
        **{f"same verdict: {case}": share_cell(value) for case, value in scores.get("steady", {}).items()},
        "VOC, order along an episode": number_cell(scores.get("voc")),
        "rank correlation with progress": number_cell(scores.get("progress")),
    }
    p50, p95 = cost.get("latency_p50_s"), cost.get("latency_p95_s")
    bytes_of = {"memory": cost.get("memory_bytes"), "memory of the GPU": cost.get("gpu_bytes")}
    spent = {
        "answers": f"{cost['answers']:,}" if "answers" in cost else "-",
        "answers per second": number_cell(cost.get("answers_per_s"), 3),
        "seconds until an answer, p50 / p95": "-" if p50 is None or p95 is None else f"{p50:.3f} / {p95:.3f}",
        "tokens per answer": number_cell(cost.get("tokens"), 0),
        "USD per 1,000 answers": number_cell(cost.get("usd_per_1000")),
        **{name: "-" if not size else f"{size / 2**30:.1f} GiB" for name, size in bytes_of.items()},
    }
    named = row["figures"].get("published", {})  # rows of older benches have none
    published = {
        "MAE of ratings 1 to 5": number_cell(named.get("mae")),
        "Kendall's tau, mean over tasks": number_cell(named.get("kendall_tau")),
        "preference accuracy by scores": share_cell(named.get("preference")),
        "preference accuracy by comparisons": share_cell(named.get("compared")),
    }
    return {"comparisons": compared, "scores": scored, "by others' definitions": published, "cost": spent}


def percent(hits: float, count: float) -> str:
    """Returns `hits` / `count` in percent; `-` if the count is 0."""
    return f"{100 * hits / count:.1f} %" if count else "-"


def pair_card(
    title: str, sides: Sequence[tuple[str, Frames, str]], chosen: str, p: Sequence[float] | None, text: str, **more: Any
) -> Card:
    """Returns the card of a comparison.

    Args:
        title: title of the card.
        sides: for the left and the right side its name, its image [H, W, 3], and the truth about it.
        chosen: name of the side that the judge chose.
        p: probabilities of left, right and tie, if there are any.
        text: the judge's raw answer.
        more: further fields of the card.
    """
    pictures = []
    for name, image, truth in sides:
        caption, is_chosen = name + (", chosen" if name == chosen else ""), name == chosen
        pictures.append(
            Picture(src=small(image), alt=f"{name} image", caption=caption, note=truth, is_chosen=is_chosen)
        )
    shares: dict[str, float] = {} if p is None else dict(zip(("left", "right", "tie"), p, strict=True))
    return Card(title=title, pictures=pictures, is_pair=True, shares=shares, text=text, **more)


def score_card(title: str, frames: Frames, text: str, **more: Any) -> Card:
    """Returns the card of a score of `frames` [L, H, W, 3]; `more` are further fields."""
    pictures = [Picture(src=small(frame), alt=f"image {number}") for number, frame in enumerate(frames, start=1)]
    return Card(title=title, pictures=pictures, text=text, **more)


def small(image: Frames) -> str:
    """Returns an image [H, W, 3] as the source of one whose longer side has about `CARD_PX` pixels."""
    # every n-th pixel is enough for a card, and faster than resampling
    step = max(1, max(image.shape[:2]) // CARD_PX)
    return inline(to_png(np.ascontiguousarray(image[::step, ::step]), is_small=True))
