"""The pages of a run: `judge_panel.html` (what a judge saw and said) and `episodes.html` (captioned episodes)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from rlvlm.core import metrics
from rlvlm.core.disk import write_whole
from rlvlm.core.judging import Query
from rlvlm.core.steps import Frames
from rlvlm.judges.prompts import compare_messages
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder import RunFolder
from rlvlm.runs.plots import OUTCOMES, outcome
from rlvlm.runs.summary import score_error, summarise_judge
from rlvlm.templates import inline, render

MAX_CARDS = 120
FIRST = ("incorrect", "correct", "truth ties")
"""What is shown first: answers that say something, and of these the wrong ones; the others follow."""


MAX_EPISODES = 60
"""Shown on a page."""
MAX_FRAMES = 24
"""Shown of an episode on a page, evenly spread over it, the first and the last among them."""
MAX_TEXT = 2_000
"""Characters kept of a thought or an action."""
PAGE_PX = 256
"""Longer side of a frame on the page, at most."""
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
    "invalid": "#8d6e97",
    "failed": "#454b54",
}
"""What can become of a score, and its colour: of one that claims a success, or of one that measures progress."""

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
    """`judge_panel.html`, where anything was compared or scored: examples as the judge saw them, with what it said and
    what is true, below figures of all answers of the run.
    """
    rows, examples = folder.queries.read(), folder.samples.read()
    if not rows and not examples:
        return
    shown = examples[:: -(-len(examples) // MAX_CARDS) or 1]
    judge = examples[0]["judge"] if examples else "no judge"
    facts = _of_comparisons(rows, shown, config) if rows else _of_scores(folder, shown)
    found = Counter(card["outcome"] for card in facts["cards"])
    facts["title"] += f": {config.title}"
    facts["note"] = f"{len(shown)} of {facts['note']} by {judge}" + ("." if rows else f", prompt {shown[0]['prompt']}.")
    facts["shown_counts"] = {name: found[name] for name in facts["colours"] if found[name]}
    write_whole(folder.panel, render("judge_panel.html.j2", **facts))


def _of_comparisons(
    rows: Sequence[Mapping[str, str]], examples: Sequence[Mapping[str, Any]], config: RunConfig
) -> dict[str, Any]:
    """What the page says of comparisons: `rows` of the query log, and `examples` of `judge_panel.jsonl`."""
    asked = "Nothing in words: this teacher compares numbers of the simulator."
    if config.asks_judge and config.feedback:  # the first message to the judge, with the images' places marked
        blank = np.zeros((config.feedback.segment_steps, 1, 1, 3), np.uint8)
        messages = compare_messages(config.judge.prompt, Query(goal=config.judge_goal, left=blank, right=blank))
        parts = [part for message in messages for part in message["content"]]
        asked = "\n".join(part["text"] if part["type"] == "text" else "[picture]" for part in parts)
    counts, total = Counter(map(outcome, rows)), len(rows)
    decided = counts["correct"] + counts["incorrect"]
    cards = [{**row, "outcome": outcome(row)} for row in examples]
    cards.sort(key=lambda card: FIRST.index(card["outcome"]) if card["outcome"] in FIRST else len(FIRST))
    tiles = {
        "queries": f"{total:,}",
        "no preference": f"{100 * counts['no preference'] / total:.1f} %",
        "right of the decided": f"{100 * counts['correct'] / decided:.1f} %" if decided else "none",
        "unreadable": counts["invalid"],
        "no answer": counts["failed"],
    }
    return {
        "title": "What the judge saw",
        "note": f"{total:,} queries, evenly sampled over the run. Answered",
        "cards": cards,
        "tiles": tiles,
        "shares": {name: 100 * counts[name] / total for name in OUTCOMES if counts[name]},
        "colours": OUTCOMES,
        "asked": asked,
        "alarm_step": None,
        "plot": "",
    }


def _of_scores(folder: RunFolder, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the page says of scores, and how these agree with the truth."""
    scores, figures = folder.scores.read(), summarise_judge(folder)
    plot = folder.plots / "judge_over_training.png"
    tiles = {name: f"{figures[metric]:.2f}" for name, metric in _TILES.items() if metric in figures}
    if not tiles and (error := score_error(scores)) is not None:  # held against progress, not against success
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
        "plot": inline(plot) if plot.exists() else "",
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Caption:
    """What stands below a frame: what the policy did there and what came of it. Empty texts and None are left out."""

    thought: str = ""
    """Untrusted text of a model."""
    action: str = ""
    """Likewise, or the action in words."""
    reward: float | None = None
    value: float | None = None
    """What the policy expected from here on, in reward units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownEpisode:
    """One episode, by T of its frames, for people to look at."""

    title: str
    """Of the task or the instruction; untrusted too."""
    frames: Frames
    """[T, H, W, 3], T >= 1."""
    captions: Sequence[Caption]
    """T captions, each of the frame that the policy saw when it acted."""
    is_success: bool
    episode_return: float
    steps: int
    """Turns, or env steps: no frame is kept of those inside a chunk."""
    seed: int

    def __post_init__(self) -> None:
        if len(self.frames) != len(self.captions) or not len(self.frames):
            raise ValueError(
                f"an episode needs one caption per frame and at least one frame, got {len(self.captions)} captions "
                f"for {len(self.frames)} frames"
            )

    @property
    def outcome(self) -> str:
        """`SUCCESS` or `FAILURE`."""
        return SUCCESS if self.is_success else FAILURE


def episodes_page(
    episodes: Sequence[ShownEpisode], heading: str, note: str = "", by_instruction: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The page's HTML: how the episodes ended, then a strip of captioned frames of each.

    Args:
        episodes: in the order of the page; beyond `MAX_EPISODES` they are thinned out evenly.
        heading: e.g. the task and the step of the checkpoint.
        note: one sentence below it.
        by_instruction: rows of a table that stands above the episodes, each of the same columns.
    """
    shown = episodes[:: -(-len(episodes) // MAX_EPISODES) or 1]
    counts = {name: sum(episode.outcome == name for episode in shown) for name in COLOURS}
    tiles = {"episodes": len(episodes)}
    if episodes:
        tiles |= {
            "success": f"{np.mean([episode.is_success for episode in episodes]):.0%}",
            "mean return": f"{np.mean([episode.episode_return for episode in episodes]):.3g}",
            "mean length": f"{np.mean([episode.steps for episode in episodes]):.3g}",
        }
    return render(
        "episodes.html.j2",
        title=heading,
        note=note,
        tiles=tiles,
        shown_counts=counts,
        colours=COLOURS,
        columns=list(by_instruction[0]) if by_instruction else [],
        rows=[list(row.values()) for row in by_instruction],
        num_hidden=len(episodes) - len(shown),
        episodes=[{"about": episode, "moments": _moments(episode)} for episode in shown],
    )


def _moments(episode: ShownEpisode) -> list[dict[str, Any]]:
    """The frames of an episode that are shown, each with its number, its image and its caption."""
    places = sorted(set(np.linspace(0, len(episode.frames) - 1, MAX_FRAMES).astype(int).tolist()))
    moments = []
    for place in places:
        image, data = Image.fromarray(np.ascontiguousarray(episode.frames[place])), BytesIO()
        image.thumbnail((PAGE_PX, PAGE_PX * max(1, image.height // image.width)))
        image.save(data, format="webp", lossless=max(image.size) < 128, quality=85)
        caption = episode.captions[place]
        moments.append(
            {
                "number": place + 1,
                "picture": inline(data.getvalue(), "webp"),
                "thought": caption.thought[:MAX_TEXT],
                "action": caption.action[:MAX_TEXT],
                "reward": caption.reward,
                "value": caption.value,
            }
        )
    return moments
