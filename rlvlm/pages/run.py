"""The pages of a run: `judge_panel.html` (a judge's questions and answers) and `episodes.html` (captioned episodes)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.disk import write_whole
from rlvlm.core.foreign import read_json
from rlvlm.core.judging import Query
from rlvlm.judges.prompts import compare_messages
from rlvlm.pages.charts import OUTCOMES
from rlvlm.pages.run_charts import outcome, write_plots
from rlvlm.runs.answers import final_answers, truth_name
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder import RunFolder
from rlvlm.runs.summary import score_error, summarise_judge
from rlvlm.templates import inline, render

MAX_CARDS = 120
MAX_BYTES = 2**28
"""Maximum size of `episodes.json`, bytes."""
FIRST = ("incorrect", "correct", "truth ties")
"""Order of the answers: decisive ones first, and of these the wrong ones."""
ENDINGS = {"success": "#2a9d8f", "failure": "#e76f51"}
SCORE_COLOURS = {
    "true positive": "#2a9d8f",
    "true negative": "#a8c5da",
    "false positive": "#e76f51",
    "false negative": "#e9a23b",
    "success, undone at the end": "#b8b08d",
    "near the truth": "#2a9d8f",
    "above the truth": "#e76f51",
    "below the truth": "#e9a23b",
    "scored, progress unknown": "#a8c5da",
    "invalid": "#8d6e97",
    "failed": "#454b54",
}
"""Outcomes of a score with their colours: of a score that claims success, or one that measures progress."""

_TILES = {
    "scored": metrics.JUDGE_SCORE,
    "true success": metrics.JUDGE_TRUE_SUCCESS,
    "false positives": metrics.JUDGE_FALSE_POSITIVES,
    "false negatives": metrics.JUDGE_FALSE_NEGATIVES,
    "area under the curve": metrics.JUDGE_AUC,
    "calibration error": metrics.JUDGE_CALIBRATION,
    "shown backwards": metrics.JUDGE_BACKWARDS_SCORE,
    "with another goal": metrics.JUDGE_OTHER_GOAL_SCORE,
}


def write_run_pages(folder: RunFolder) -> None:
    """Draws a run from its folder: `plots/`, `judge_panel.html` and `episodes.html`, each if there is anything to show.

    The run loop calls this at the end of a run, with the summary and the tables complete.
    """
    config = folder.config()
    write_plots(folder, config.title)
    if page := judge_page(folder, config.title, "" if not folder.queries.path.exists() else asked_text(config)):
        write_whole(folder.panel, page)
    if folder.played.exists():
        found = read_json(folder.played, MAX_BYTES)
        by_instruction = folder.by_instruction.read()
        page = episodes_page(found["episodes"], config.title, found["note"], found["measures"], by_instruction)
        write_whole(folder.path / "episodes.html", page)


def judge_page(folder: RunFolder, title: str, asked: str = "") -> str:
    """Returns the HTML of `judge_panel.html`: examples as shown to the judge, with its answers and the truth, below
    statistics of all answers; empty if there were neither comparisons nor scores.

    Args:
        folder: holds the logs `queries`, `scores`, `samples` and `metrics`; no other file of a run is needed.
        title: name of the run.
        asked: the question as text, for comparisons; see `asked_text`.
    """
    # the log counts every answer; images are stored for a few
    rows, examples = final_answers(folder.queries.read()), folder.samples.read()
    if not rows and not examples:
        return ""
    shown = examples[:: -(-len(examples) // MAX_CARDS) or 1]  # every n-th, so that the whole run is covered
    judge = " and ".join(dict.fromkeys(example["judge"] for example in examples)) or "no judge"
    facts = _of_comparisons(rows, shown, asked) if rows else _of_scores(folder, shown)
    found = Counter(card["outcome"] for card in facts["cards"])
    facts["title"] += f": {title}"
    facts["note"] = f"{len(shown)} of {facts['note']} by {judge}" + ("." if rows else f", prompt {shown[0]['prompt']}.")
    facts["shown_counts"] = {name: found[name] for name in facts["colours"] if found[name]}
    return render("judge_panel.html.j2", **facts)


def asked_text(config: RunConfig) -> str:
    """Returns the question of a run's comparisons as text: the first message to its judge, with the places of its
    images marked.
    """
    if config.asks_person:
        return f"A person is shown the images of both sides and the goal: {config.judge_goal}"
    if not config.reward.asks_judge:
        return "No text: this teacher compares values of the simulator."
    # the prompt depends on how many images a side has, not on their content
    blank = np.zeros((config.segment_steps, 1, 1, 3), np.uint8)
    query = Query(goal=config.judge_goal, left=blank, right=blank, goal_picture=blank[:1] if config.goal_file else None)
    parts = [part for message in compare_messages(config.judge.prompt, query) for part in message["content"]]
    return "\n".join(part["text"] if part["type"] == "text" else "[image]" for part in parts)


def _of_comparisons(
    rows: Sequence[Mapping[str, str]], examples: Sequence[Mapping[str, Any]], asked: str
) -> dict[str, Any]:
    """Returns the page's content on comparisons: `rows` of the query log, and `examples` of `judge_panel.jsonl`."""
    counts, total = Counter(map(outcome, rows)), len(rows)
    decided = counts["correct"] + counts["incorrect"]
    cards = [{**row, "outcome": outcome(row)} for row in examples]
    cards.sort(key=lambda card: FIRST.index(card["outcome"]) if card["outcome"] in FIRST else len(FIRST))
    tiles = {
        "queries": f"{total:,}",
        "no preference": f"{100 * counts['no preference'] / total:.1f} %",
        f"accuracy, of {decided:,} decided pairs whose {truth_name(rows)} differs": (
            f"{100 * counts['correct'] / decided:.1f} %" if decided else "none"
        ),
        "unreadable": counts["invalid"],
        "no answer": counts["failed"],
    }
    by = Counter(row.get("answered_by") for row in rows)
    if len(by) > 1:  # a judge and a person, or several people
        tiles |= {f"answered by {name}": f"{count:,}" for name, count in by.items()}
    return {
        "title": "What the judge saw",
        "note": f"{total:,} queries, evenly sampled over the run. Answered",
        "cards": cards,
        "tiles": tiles,
        "shares": {name: 100 * counts[name] / total for name in OUTCOMES if counts[name]},
        "colours": OUTCOMES,
        "asked": asked,
        "alarm_step": None,
        "fooled_by": 0,
        "plot": "",
    }


def _of_scores(folder: RunFolder, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the page's content on scores, and their agreement with the truth."""
    scores, figures = folder.scores.read(), summarise_judge(folder)
    plot = folder.plots / "judge_over_training.png"
    tiles = {name: f"{figures[metric]:.2f}" for name, metric in _TILES.items() if metric in figures}
    # a judge of progress has no false positives; its figure is the mean error
    if not tiles and (error := score_error(scores)) is not None:  # compared with progress, not with success
        tiles["mean error"] = f"{error:.2f}"
    return {
        "title": "What the judge scored",
        "note": f"{len(scores):,} scores, evenly sampled over the run. Scored",
        "cards": examples,
        "tiles": tiles,
        "shares": {},
        "colours": SCORE_COLOURS,
        "asked": "",
        "alarm_step": figures.get("alarm_step"),
        "alarm_reason": figures.get("alarm_reason"),
        "fooled_by": figures.get("fooled_by"),
        "plot": inline(plot) if plot.exists() else "",
    }


def episodes_page(
    cards: Sequence[Mapping[str, Any]],
    heading: str,
    note: str,
    tiles: Mapping[str, Any],
    by_instruction: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Returns the page's HTML: results of the episodes, then a strip of captioned frames of each.

    Args:
        cards: as returned by `runs.played.episode_card`.
        heading: heading of the page.
        note: one sentence below it.
        tiles: figures of all episodes, including those not shown.
        by_instruction: rows, with the same columns, of a table above the episodes.
    """
    return render(
        "episodes.html.j2",
        title=heading,
        note=note,
        tiles=tiles,
        shown_counts={name: sum(card["outcome"] == name for card in cards) for name in ENDINGS},
        colours=ENDINGS,
        columns=list(by_instruction[0]) if by_instruction else [],
        rows=[list(row.values()) for row in by_instruction],
        cards=cards,
    )
