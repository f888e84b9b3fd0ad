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
from rlvlm.pages.page import Card, Picture, Section, Table, page
from rlvlm.pages.run_charts import outcome, write_plots
from rlvlm.preferences.config import FeedbackConfig
from rlvlm.runs.files.answers import final_answers, truth_name
from rlvlm.runs.files.folder import RunFolder
from rlvlm.runs.files.summary import score_error, summarise_judge
from rlvlm.runs.settings.config import RunConfig
from rlvlm.templates import inline

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
    "calibration error of the learned value": metrics.VALUE_CALIBRATION,
    "spread of the learned value": metrics.VALUE_SPREAD,
    "shown backwards": metrics.JUDGE_BACKWARDS_SCORE,
    "with another goal": metrics.JUDGE_OTHER_GOAL_SCORE,
    "the robot's movement alone": metrics.JUDGE_ROBOT_ALONE_SCORE,
    "the first moment alone": metrics.JUDGE_START_SCORE,
}
_PNG = "data:image/png;base64,"


def write_run_pages(folder: RunFolder) -> None:
    """Draws a run from its folder: `plots/`, `judge_panel.html` and `episodes.html`, each if there is anything to show.

    The run loop calls this at the end of a run, with the summary and the tables complete.
    """
    config = folder.config()
    write_plots(folder, config.title)
    if html := judge_page(folder, config.title, asked_text(config) if folder.queries.path.exists() else ""):
        write_whole(folder.panel, html)
    if folder.played.exists():
        found = read_json(folder.played, MAX_BYTES)
        html = episodes_page(found, config.title, folder.by_instruction.read())
        write_whole(folder.path / "episodes.html", html)


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
    cards = [_card(example) for example in shown]
    if rows:
        cards.sort(key=lambda card: FIRST.index(card.outcome) if card.outcome in FIRST else len(FIRST))
        note = f"{len(shown)} of {len(rows):,} queries, evenly sampled over the run. Answered by {judge}."
        return page(f"What the judge saw: {title}", [_of_comparisons(rows, note, asked), _examples(cards, OUTCOMES)])
    scores = folder.scores.read()
    note = f"{len(shown)} of {len(scores):,} scores, evenly sampled over the run. Scored by {judge}, prompt "
    sections = [*_of_scores(folder, scores, f"{note}{shown[0]['prompt']}."), _examples(cards, SCORE_COLOURS)]
    return page(f"What the judge scored: {title}", sections)


def asked_text(config: RunConfig) -> str:
    """Returns the question of a run's comparisons as text: the first message to its judge, with the places of its
    images marked.
    """
    if config.kind.asks_person(config):
        return f"A person is shown the images of both sides and the goal: {config.judge_goal}"
    if not config.reward.asks_judge:
        return "No text: this teacher compares values of the simulator."
    # the prompt depends on how many images a side has, not on their content
    feedback = config.section(FeedbackConfig)
    blank = np.zeros((feedback.segment_steps if feedback else 1, 1, 1, 3), np.uint8)
    query = Query(goal=config.judge_goal, left=blank, right=blank, goal_picture=blank[:1] if config.goal_file else None)
    parts = [part for message in compare_messages(config.judge.prompt, query) for part in message["content"]]
    return "\n".join(part["text"] if part["type"] == "text" else "[image]" for part in parts)


def _of_comparisons(rows: Sequence[Mapping[str, str]], note: str, asked: str) -> Section:
    """Returns the figures of the query log's `rows`."""
    counts, total = Counter(map(outcome, rows)), len(rows)
    decided = counts["correct"] + counts["incorrect"]
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
    shares = {name: counts[name] / total for name in OUTCOMES if counts[name]}
    folded = ("What the judge is asked", asked) if asked else ("", "")
    return Section(notes=[note], tiles=tiles, shares=shares, colours=OUTCOMES, folded=folded)


def _of_scores(folder: RunFolder, scores: Sequence[dict[str, str]], note: str) -> list[Section]:
    """Returns the alarm, and the agreement of the scores with the truth."""
    figures = summarise_judge(folder)
    plot = folder.plots / "judge_over_training.png"
    tiles = {name: f"{figures[metric]:.2f}" for name, metric in _TILES.items() if metric in figures}
    # a judge of progress has no false positives; its figure is the mean error
    if not tiles and (error := score_error(scores)) is not None:  # compared with progress, not with success
        tiles["mean error"] = f"{error:.2f}"
    alerts, notes = [], [note]
    if (step := figures.get("alarm_step")) is not None:
        alerts.append(
            f"Alarm from step {step:,} on: {figures.get('alarm_reason')}. What the judge pays for is then no evidence "
            "of success."
        )
    if fooled := figures.get("fooled_by"):
        notes.append(
            f"{fooled:,} that it took for successes are in fooled.jsonl; rlvlm judge-bench harvest draws them and "
            "makes a suite of them."
        )
    charts = {"the judge against the truth over training": inline(plot)} if plot.exists() else {}
    return [Section(alerts=alerts, notes=notes, tiles=tiles), Section(charts=charts)]


def _examples(cards: Sequence[Card], colours: Mapping[str, str]) -> Section:
    empty = [] if cards else ["No query was asked of which images were kept."]
    return Section(notes=empty, cards=cards, colours=colours)


def _card(row: Mapping[str, Any]) -> Card:
    """Returns the card of an example of `judge_panel.jsonl`, whose images are base64 PNGs."""
    step = f"step {row['env_steps']:,}"
    if "left" not in row:  # a score
        said = "no score" if row["score"] is None else f"{row['score']:.2f}"
        truth = f"true return {row['return']:.4g}" if row["progress"] is None else f"progress {row['progress']:.2f}"
        truth = ", ".join(filter(None, (row["ending"], truth)))
        right = "" if row["truth"] == row["progress"] else f", right were {row['truth']:.2f}"
        pictures = [
            Picture(src=f"{_PNG}{frame}", alt=f"moment {number}") for number, frame in enumerate(row["frames"], start=1)
        ]
        facts = [row["goal"] + (f"; action: {row['action']}" if row["action"] else "")]
        facts.append(f"judge: {said}, truth: {truth}{right}")
        return Card(
            title=step, outcome=row["outcome"], badge=row["outcome"], facts=facts, pictures=pictures, text=row["text"]
        )
    left, right = values = row["progress"] or row["returns"]
    truths = [f"true progress {100 * v:.1f} %" if row["progress"] else f"true return {v:.4g}" for v in values]
    better = "tie" if left == right else "left" if left > right else "right"
    pictures = [
        Picture(src=f"{_PNG}{row[side]}", alt=f"{side} image", caption="chosen" if row["label"] == side else side,
                note=truth, is_chosen=row["label"] == side)
        for side, truth in zip(("left", "right"), truths, strict=True)
    ]  # fmt: skip
    return Card(
        title=f"{step}, query {row['index'] + 1} of its session",
        outcome=outcome(row),
        badge=outcome(row),
        pictures=pictures,
        is_pair=True,
        shares=dict(zip(("left", "right", "tie"), row["probabilities"] or (), strict=False)),
        facts=[f"{row['judge']}: {row['label'] or 'none'}, truth: {better}"],
        text=row["text"],
    )


def episodes_page(played: Mapping[str, Any], title: str, by_instruction: Sequence[Mapping[str, Any]] = ()) -> str:
    """Returns the HTML of `episodes.html`: results of the episodes, then a strip of captioned frames of each.

    Args:
        played: content of `episodes.json`, see `runs.files.played.write_played`.
        title: heading of the page.
        by_instruction: rows, with the same columns, of a table above the episodes.
    """
    cards = []
    for episode in played["episodes"]:
        pictures = [
            Picture(
                src=moment["picture"],
                alt=f"step {moment['number']}",
                caption=f"{moment['number']}",
                code=moment["action"],
                measures=_measures(moment),
                words=moment["thought"],
                is_tiny=moment["is_tiny"],
            )
            for moment in episode["moments"]
        ]
        shown = f" ({len(pictures)} of {episode['num_frames']} images shown)"
        facts = f"return {episode['episode_return']:.3g}, {episode['steps']} step{'s' * (episode['steps'] != 1)}"
        facts += shown if len(pictures) < episode["num_frames"] else ""
        cards.append(
            Card(
                title=episode["title"],
                outcome=episode["outcome"],
                badge=episode["outcome"],
                facts=[f"{facts}, seed {episode['seed']}"],
                pictures=pictures,
            )
        )
    tables = (
        [Table(heads=list(by_instruction[0]), rows=[list(row.values()) for row in by_instruction])]
        if by_instruction
        else []
    )
    notes = [played["note"] if cards else "No episode was played."]
    lead = Section(notes=notes, tiles=played["measures"], tables=tables)
    return page(title, [lead, Section(cards=cards, colours=ENDINGS, is_wide=True)])


def _measures(moment: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    found = []
    if (reward := moment["reward"]) is not None:
        found.append(("reward", f"{reward:+.2f}", "gain" if reward > 0 else "loss" if reward < 0 else ""))
    if (value := moment["value"]) is not None:
        found.append(("value", f"{value:.2f}", ""))
    return found
