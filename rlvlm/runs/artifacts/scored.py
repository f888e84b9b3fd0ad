"""Turns, episodes and images that were scored: rows of the score log, and the judge's page with what it was shown."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.disk import write_whole
from rlvlm.core.judging import Score
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.preferences.records import ScoreRecord
from rlvlm.rewards.scoring_items import ScoredItem, ScoringItem, spread
from rlvlm.runs.artifacts.samples import encode_png
from rlvlm.runs.artifacts.summary import score_error, summarise_judge
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.run_folder import RunFolder
from rlvlm.runs.pipeline import Draw
from rlvlm.templates import inline, render

Record = TypeVar("Record")
PER_CALL = 4
"""Examples kept of each update, evenly spread over it."""
MAX_CARDS = 120
MAX_FRAMES = 8
"""Frames of an episode on the page."""
PAGE_PX = 160
"""Side of the images kept, where the env has no size of its own."""
COLOURS = {
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
NEAR = 0.1
"""Largest distance from the true progress of a score that is near to it."""
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


class ScoreRecorder:
    """Writes down what was scored.

    Args:
        folder: of the run.
        draw: makes the images of the examples.
    """

    def __init__(self, folder: RunFolder, draw: Draw) -> None:
        self._folder = folder
        self._draw = draw

    def keep(self, records: Iterable[ScoredItem]) -> None:
        """Writes down what the algorithm's `drain_records` gave."""
        records = list(records)
        if records:
            self._folder.scores.append(scored_row(record, index) for index, record in enumerate(records))
            self._folder.samples.append(example_rows(records, lambda snapshots: self._draw(snapshots, PAGE_PX)))


def scored_row(record: ScoredItem, index: int) -> dict[str, Any]:
    """A row of `vlm_score_log.csv`; a session is a group of episodes."""
    score = record.score
    return {
        "ground_truth_score": record.truth,
        "vlm_score": score.value,
        "timestamp": datetime.fromtimestamp(record.timestamp, UTC).isoformat(timespec="milliseconds"),
        "status": str(score.status),
        "session": record.group,
        "env_step": record.env_step,
        "index": index,
        "return": record.env_return,
        "latency_s": score.latency_s,
        "text": score.text,
        "question": score.question,
    }


def example_rows(records: Sequence[ScoredItem], draw: Callable[[FloatArray], Frames]) -> list[dict[str, Any]]:
    """What the judge's page needs of a few of the records; which are taken depends on their order alone."""
    rows = []
    for record in _some(records):
        item, score = record.item, record.score
        rows.append(
            {
                metrics.ENV_STEPS: record.env_step,
                "frames": [encode_png(frame) for frame in draw(spread(item.snapshots, MAX_FRAMES))],
                "goal": item.goal,
                "action": item.action,
                "truth": round(record.truth, 4),
                "ending": _ending(item),
                "progress": round(item.progress, 4),
                "outcome": outcome_of(score.value, str(score.status), item, record.claim),
                **_said(score),
            }
        )
    return rows


def _ending(item: ScoringItem) -> str:
    """Whether what was shown is a success, by the env's own test."""
    if item.is_undone:
        return "a success that was undone"
    return "a success" if item.is_success else "no success"


def progress_rows(
    records: Sequence[ScoreRecord], draw: Callable[[FloatArray], Frames], goal: str
) -> list[dict[str, Any]]:
    """The same of scores that measure progress: of single images, or of segments in which there are more.

    Args:
        records: of one session, or of the episodes that have just ended.
        draw: makes the images.
        goal: what the judge was told.
    """
    return [
        {
            metrics.ENV_STEPS: record.env_step,
            "frames": [encode_png(frame) for frame in draw(spread(record.segment.snapshots, MAX_FRAMES))],
            "goal": goal,
            "action": "",
            "truth": round(record.progress, 4),
            "ending": "",
            "progress": round(record.progress, 4),
            "outcome": nearness(record.score.value, str(record.score.status), record.progress),
            **_said(record.score),
        }
        for record in _some(records)
    ]


def nearness(value: float | None, status: str, progress: float) -> str:
    """What became of a score of progress, as a key of `COLOURS`."""
    if value is None:
        return status
    if abs(value - progress) <= NEAR:
        return "near the truth"
    return "above the truth" if value > progress else "below the truth"


def _some(records: Sequence[Record]) -> Iterator[Record]:
    """`PER_CALL` of the records, evenly spread over them."""
    places = np.linspace(0, len(records) - 1, PER_CALL).astype(int).tolist() if records else ()
    yield from (records[place] for place in sorted(set(places)))


def _said(score: Score) -> dict[str, Any]:
    return {"score": score.value, "text": score.text, "judge": score.stamp.judge, "prompt": score.stamp.prompt}


def outcome_of(value: float | None, status: str, item: ScoringItem, claim: float) -> str:
    """What became of a score, as a key of `COLOURS`."""
    if value is None:
        return status
    if item.is_undone:
        return "success, undone at the end"
    if value >= claim:
        return "true positive" if item.is_success else "false positive"
    return "false negative" if item.is_success else "true negative"


def write_score_page(folder: RunFolder, config: RunConfig) -> None:
    """`judge_panel.html`: examples as they were shown, what was said of them, and how it agrees with the truth."""
    examples, scores = folder.samples.read(), folder.scores.read()
    if not examples:
        return
    stride = -(-len(examples) // MAX_CARDS)
    cards = examples[::stride]
    figures = summarise_judge(folder)
    plot = folder.plots / "judge_over_training.png"
    tiles = {name: f"{figures[metric]:.2f}" for name, metric in _TILES.items() if metric in figures}
    if not tiles and (error := score_error(scores)) is not None:  # held against progress, not against success
        tiles["mean error"] = f"{error:.2f}"
    found = Counter(card["outcome"] for card in cards)
    page = render(
        "score_panel.html.j2",
        title=f"What the judge scored: {config.title}",
        judge=examples[0]["judge"],
        prompt=examples[0]["prompt"],
        cards=cards,
        total=len(scores),
        shown_counts={name: found[name] for name in COLOURS if found[name]},
        tiles=tiles,
        alarm_step=figures.get("alarm_step"),
        plot=inline(plot.read_bytes(), "png") if plot.exists() else "",
        colours=COLOURS,
    )
    write_whole(folder.panel, page)
