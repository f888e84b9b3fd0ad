"""The pages of a run: `judge_panel.html` (a judge's questions and answers) and `episodes.html` (captioned episodes)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from rlvlm.algorithms.base import BaseAlgorithm
from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient
from rlvlm.algorithms.policy_gradient.player import stands_still
from rlvlm.core import metrics
from rlvlm.core.disk import write_whole
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.judging import Query
from rlvlm.core.steps import Frames
from rlvlm.judges.agreement import wilson_interval
from rlvlm.judges.prompts import compare_messages
from rlvlm.runs.answers import final_answers, truth_name
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder import RunFolder
from rlvlm.runs.plots import OUTCOMES, outcome
from rlvlm.runs.summary import score_error, summarise_judge
from rlvlm.runs.tables import CsvTable
from rlvlm.templates import inline, render

MAX_CARDS = 120
FIRST = ("incorrect", "correct", "truth ties")
"""Order of the answers: decisive ones first, and of these the wrong ones."""
MAX_EPISODES, MAX_FRAMES = 24, 24
"""Maximum episodes on a page, and maximum frames of each."""
CHUNK_PX = 128
"""Side of the frames of envs in chunks, which have no size of their own, pixels."""
MAX_TEXT = 2_000
"""Maximum number of characters kept of a thought or an action."""
PAGE_PX = 256
"""Maximum length of the longer side of a frame on the page, pixels."""
SUCCESS, FAILURE = "success", "failure"
COLOURS = {SUCCESS: "#2a9d8f", FAILURE: "#e76f51"}
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


def write_judge_page(folder: RunFolder, config: RunConfig) -> None:
    """Writes `judge_panel.html`, if there were comparisons or scores: examples as shown to the judge, with its answers
    and the truth, below statistics of all answers of the run.
    """
    # the log counts every answer; images are stored for a few
    rows, examples = final_answers(folder.queries.read()), folder.samples.read()
    if not rows and not examples:
        return
    shown = examples[:: -(-len(examples) // MAX_CARDS) or 1]  # every n-th, so that the whole run is covered
    judge = " and ".join(dict.fromkeys(example["judge"] for example in examples)) or "no judge"
    facts = _of_comparisons(rows, shown, config) if rows else _of_scores(folder, shown)
    found = Counter(card["outcome"] for card in facts["cards"])
    facts["title"] += f": {config.title}"
    facts["note"] = f"{len(shown)} of {facts['note']} by {judge}" + ("." if rows else f", prompt {shown[0]['prompt']}.")
    facts["shown_counts"] = {name: found[name] for name in facts["colours"] if found[name]}
    write_whole(folder.panel, render("judge_panel.html.j2", **facts))


def _of_comparisons(
    rows: Sequence[Mapping[str, str]], examples: Sequence[Mapping[str, Any]], config: RunConfig
) -> dict[str, Any]:
    """Returns the page's content on comparisons: `rows` of the query log, and `examples` of `judge_panel.jsonl`."""
    asked = "No text: this teacher compares values of the simulator."
    if config.asks_person:
        asked = f"A person is shown the images of both sides and the goal: {config.judge_goal}"
    if config.reward.asks_judge:  # the first message to the judge, with the places of its images marked
        # the prompt depends on how many images a side has, not on their content
        blank = np.zeros((config.segment_steps, 1, 1, 3), np.uint8)
        goal = blank[:1] if config.goal_file else None
        query = Query(goal=config.judge_goal, left=blank, right=blank, goal_picture=goal)
        messages = compare_messages(config.judge.prompt, query)
        parts = [part for message in messages for part in message["content"]]
        asked = "\n".join(part["text"] if part["type"] == "text" else "[image]" for part in parts)
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


def write_episodes_page(folder: RunFolder, config: RunConfig, algorithm: BaseAlgorithm) -> None:
    """Writes `episodes.html`: the last evaluation's episodes with the policy's replies or actions, if it replies or
    plans; for chunks also `success_by_instruction.csv`.
    """
    if not isinstance(algorithm, PolicyGradient) or not (played := algorithm.last_played):
        return
    cards = [episode_card(episode, algorithm, config) for episode in played[:MAX_EPISODES]]
    rows: list[dict[str, str | int]] = []
    note = f"The first {len(cards)} of {len(played)} greedy episodes of the last evaluation"
    if played[0].replies:
        note += "; the thought is everything that the reply says before its action."
        if (history := algorithm.config.history) > 1:
            note += f" Each prompt shows the image of its turn and, before it, those of the {history - 1} turns before."
        if still := [episode for episode in played if stands_still(episode)]:
            unreadable = sum(episode.replies[-1].action is None for episode in still)
            note += (
                f" In {len(still)} of all {len(played)} the policy was stuck at the end: it saw the same image again "
                f"and gave the same reply again, in {unreadable} one that cannot be read. Sampled play may get out."
            )
    else:
        note += ", from initial states that training never saw. The table counts all of them, with 95 % intervals."
        for instruction in sorted({episode.goals[0] for episode in played}):
            ends = [episode.is_success for episode in played if episode.goals[0] == instruction]
            rates = (sum(ends) / len(ends), *wilson_interval(sum(ends), len(ends)))
            row = {"instruction": instruction, "episodes": len(ends), "successes": sum(ends)}
            rows.append(row | {name: f"{rate:.2f}" for name, rate in zip(("rate", "low", "high"), rates, strict=True)})
        CsvTable(folder.path / "success_by_instruction.csv", list(rows[0]), "").write(rows)
    measures = {
        "success": f"{np.mean([episode.is_success for episode in played]):.0%}",
        "mean return": f"{np.mean([episode.env_return for episode in played]):.3g}",
        "mean length": f"{np.mean([episode.num_steps for episode in played]):.3g}",
    }
    page = episodes_page(cards, config.title, note, {"episodes": len(played)} | measures, rows)
    write_whole(folder.path / "episodes.html", page)


def episode_card(episode: TokenEpisode, algorithm: PolicyGradient, config: RunConfig) -> dict[str, Any]:
    """Returns an episode for people: the policy's images before each reply or chunk, by all cameras, and results."""
    if episode.replies:
        title, frames = config.task, algorithm.draw(episode.snapshots[:-1], 0)
        scale = algorithm.config.algo.reward_scale  # unit of the policy's values
        captions = [
            {
                "thought": reply.thought,
                "action": reply.text[slice(*reply.action_span)] if reply.action_span else reply.text,
                "reward": float(reward),
                "value": float(value) / scale,
            }
            for reply, reward, value in zip(episode.replies, episode.env_rewards, episode.values, strict=True)
        ]
    else:
        title, frames = episode.goals[0], algorithm.draw_all(episode.snapshots[[0, *episode.ends]], CHUNK_PX)
        captions = [
            {"action": f"chunk {number}: {steps} steps", "reward": float(reward)}
            for number, (steps, reward) in enumerate(zip(episode.steps, episode.turn_rewards, strict=True), start=1)
        ]
        captions.append({"action": "the end"})
    return {
        "title": title,
        "outcome": SUCCESS if episode.is_success else FAILURE,
        "episode_return": episode.env_return,
        "steps": episode.num_steps,  # turns, or env steps: frames inside a chunk are not stored
        "seed": episode.seed,
        "num_frames": len(frames),
        "moments": moments_of(frames, captions),
    }


def moments_of(frames: Frames, captions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns evenly spread frames of an episode, each with its number, image and caption.

    Args:
        frames: [T, H, W, 3], T >= 1.
        captions: T of them, describing the policy's answer to the frame: `thought` and `action`, untrusted text;
            `reward`, and the `value` predicted by the policy. Any may be missing.
    """
    moments = []
    for place in np.unique(np.linspace(0, len(frames) - 1, MAX_FRAMES).astype(int)).tolist():
        image, data = Image.fromarray(np.ascontiguousarray(frames[place])), BytesIO()
        is_tiny = image.width < 128  # enlarged without smoothing, and without compression artefacts
        image.thumbnail((PAGE_PX, PAGE_PX * max(1, image.height // image.width)))
        image.save(data, format="webp", lossless=max(image.size) < 128, quality=85)
        caption = {"thought": "", "action": "", "reward": None, "value": None, **captions[place]}
        words = {name: caption[name][:MAX_TEXT] for name in ("thought", "action")}
        picture = {"number": place + 1, "picture": inline(data.getvalue(), "webp"), "is_tiny": is_tiny}
        moments.append(caption | words | picture)
    return moments


def episodes_page(
    cards: Sequence[Mapping[str, Any]],
    heading: str,
    note: str,
    tiles: Mapping[str, Any],
    by_instruction: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Returns the page's HTML: results of the episodes, then a strip of captioned frames of each.

    Args:
        cards: as returned by `episode_card`.
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
        shown_counts={name: sum(card["outcome"] == name for card in cards) for name in COLOURS},
        colours=COLOURS,
        columns=list(by_instruction[0]) if by_instruction else [],
        rows=[list(row.values()) for row in by_instruction],
        cards=cards,
    )
