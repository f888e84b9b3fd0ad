"""Log entries of a run's questions and answers: rows of its query and score logs, examples with images."""

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlvlm.algorithms.evaluation import Draw
from rlvlm.core.judging import Label
from rlvlm.core.memory import release_free_memory
from rlvlm.core.metrics import ENV_STEPS
from rlvlm.core.steps import FloatArray, spread
from rlvlm.judge_bench.hacked import MAX_KEPT, MAX_PER_UPDATE, Distinct, HackedEpisode, parse_episode
from rlvlm.labels.records import Truth
from rlvlm.labels.store import LabelStore
from rlvlm.preferences.records import QueryRecord
from rlvlm.rewards.scorers import Paint
from rlvlm.rewards.scoring_items import ScoredItem, ScoringItem
from rlvlm.runs.files.folder import RunFolder
from rlvlm.vlms.stills import to_png

T = TypeVar("T")
NUM_EXAMPLES = 4
"""Number of examples of each session or update, evenly spread over it."""
MAX_FRAMES = 8
"""Maximum number of frames of an episode on the page."""
PAIR_PX, SCORED_PX = 200, 160
"""Side of stored images of pairs and of scored items, pixels, if the env has no size of its own."""
NEAR = 0.1
"""Maximum distance from the true progress at which a score counts as near to it."""
_CODES = {Label.LEFT: 0, Label.RIGHT: 1}


class Recorder:
    """Writes rows of the query and score logs, examples for the judge's page, and the truth beside kept answers.

    Args:
        folder: folder of the run.
        labels: opens the store of the judge's answers.
        draw: draws the images of the examples.
        goal: the judge's goal, for scores of progress; other scored items have their own.
        paint: draws the hand's path on them, if the judge sees it.
    """

    def __init__(
        self, folder: RunFolder, labels: Callable[[], LabelStore], draw: Draw, goal: str, paint: Paint | None = None
    ) -> None:
        self._folder = folder
        self._open_labels, self._labels = labels, None
        self._draw, self._paint = draw, paint
        self._goal = goal
        self._fooled: Distinct | None = None

    def keep(self, records: Iterable[QueryRecord | ScoredItem]) -> None:
        """Writes the records returned by the algorithm's `drain_records`."""
        drained = list(records)
        queries = [record for record in drained if isinstance(record, QueryRecord)]
        scored = [record for record in drained if not isinstance(record, QueryRecord)]
        if scored:
            self._folder.scores.append(score_row(record, index) for index, record in enumerate(scored))
            self._folder.samples.append(scored_examples(scored, self._draw, self._goal, self._paint))
            self._keep_fooled(scored)
        if queries:
            # the store is opened once there is something to write: teachers of numbers have none
            if truths := list(truths_of(queries)):
                self._labels = self._labels or self._open_labels()
                self._labels.add_truths(truths)
            self._folder.queries.append(map(query_row, queries))
            # examples are chosen per session, so it does not matter how many records are drained together
            for _, session in groupby(queries, key=lambda record: record.session):
                self._folder.samples.append(compared_examples(list(session), self._draw, self._paint))
            release_free_memory()

    def _keep_fooled(self, records: Sequence[ScoredItem]) -> None:
        """Stores episodes that only the judge calls a success, for `rlvlm judge-bench harvest`."""
        if self._fooled is None:
            self._fooled = Distinct(MAX_KEPT)  # a resumed run knows what it stored before
            self._fooled.episodes += [parse_episode(row) for row in self._folder.fooled.read()]
        rows = []
        is_overrated = _overrated(records)
        # best scores first: the policy learns from those
        for record in sorted(records, key=lambda record: -(record.score.value or 0.0)):
            item, value, threshold = record.item, record.score.value, record.success_threshold
            if value is None or not (is_overrated(value, item.progress) if threshold is None else value >= threshold):
                continue
            # a lost success is neither right nor wrong; without progress its end is unknown
            if item.is_success or item.success_lost or math.isnan(item.progress):
                continue
            episode = HackedEpisode(
                goal=item.goal or self._goal,
                snapshots=spread(item.snapshots, MAX_FRAMES),
                action=item.action,
                progress=min(max(item.progress, 0.0), 1.0),
                score=value,
                judge=record.score.stamp.judge,
            )
            if len(rows) == MAX_PER_UPDATE:
                break
            row = episode.row()
            with suppress(ValueError):  # a goal with special characters, which no suite accepts
                # compared as it will be read: a resumed run must recognise the same ones
                if self._fooled.add(parse_episode(row)):
                    rows.append({ENV_STEPS: record.env_step} | row)
        if rows:
            self._folder.fooled.append(rows)


def _overrated(records: Sequence[ScoredItem]) -> Callable[[float, float], bool]:
    """Returns a test whether a score and the true progress show that a judge of progress, which claims no success, was
    fooled: the score is among the best quarter of `records` and the progress among the worst.
    """
    known = [(record.score.value, record.item.progress) for record in records if record.score.value is not None]
    if not known:
        return lambda score, progress: False
    # by ranks: one judge's scores use the whole scale, another's are between 0.3 and 0.4
    scores, progresses = np.array(known).T
    best, worst = np.quantile(scores, 0.75), np.quantile(progresses, 0.25)
    # if all are equal none is better than another
    differ = best > np.median(scores) and worst < np.median(progresses)
    return lambda score, progress: bool(differ and score >= best and progress <= worst)


def query_row(record: QueryRecord) -> dict[str, Any]:
    """Returns a row of `vlm_query_log.csv`."""
    verdict = record.verdict
    p_left, p_right, p_tie = verdict.probabilities or (None, None, None)
    return {
        "ground_truth_score_1": record.progress and record.progress[0],
        "ground_truth_score_2": record.progress and record.progress[1],
        "vlm_predicted_label": -1 if verdict.label is None else _CODES.get(verdict.label, -1),
        "timestamp": _time(record.timestamp),
        "train_iter": record.env_step,
        "status": str(verdict.status),
        "p_left": p_left,
        "p_right": p_right,
        "p_tie": p_tie,
        "session": record.session,
        "env_step": record.env_step,
        "index": record.index,
        "correct": record.correct,
        "return_1": record.returns[0],
        "return_2": record.returns[1],
        "latency_s": verdict.latency_s,
        "text": verdict.text,
        "question": verdict.question,
        "answered_by": verdict.stamp.judge,
        "used_step": record.used_step,
    }


def score_row(record: ScoredItem, index: int) -> dict[str, Any]:
    """Returns a row of `vlm_score_log.csv`; for turns and episodes the session is their group. `index` is the position
    in one update, for records that have none of their own.
    """
    score = record.score
    return {
        "ground_truth_score": None if math.isnan(record.truth) else record.truth,
        "vlm_score": score.value,
        "timestamp": _time(record.timestamp),
        "status": str(score.status),
        "session": record.group,
        "env_step": record.env_step,
        "index": index if record.index is None else record.index,
        "return": record.env_return,
        "latency_s": score.latency_s,
        "text": score.text,
        "question": score.question,
        "used_step": record.used_step,
    }


def truths_of(records: Iterable[QueryRecord]) -> Iterator[Truth]:
    """Yields the simulator's truth about the queries whose answers are kept in a store.

    A judge only gets images and a goal. The loop puts the truth beside its answer in a `QueryRecord`, for metrics; from
    there it goes into the store as a line of its own, under the question that the answer names.
    """
    for record in records:
        if record.verdict.question:
            yield Truth(question=record.verdict.question, progress=record.progress, returns=record.returns)


def compared_examples(records: Sequence[QueryRecord], draw: Draw, paint: Paint | None = None) -> list[dict[str, Any]]:
    """Returns the judge page's entries for a few of a session's queries, chosen by their order alone."""
    rows = []
    for record in _some(records):
        verdict = record.verdict
        # If segments are longer than a step, only their last image is shown.
        ends = draw(np.stack([side.snapshots[-1] for side in (record.pair.left, record.pair.right)]), PAIR_PX)
        left, right = painted(ends[0], record.pair.left.path, paint), painted(ends[1], record.pair.right.path, paint)
        shares = None if verdict.probabilities is None else [round(p, 4) for p in verdict.probabilities]
        rows.append(
            {
                ENV_STEPS: record.env_step,
                "session": record.session,
                "index": record.index,
                "left": encode_png(left),
                "right": encode_png(right),
                # the truth beside the answer: one of the two
                "progress": record.progress and [round(progress, 4) for progress in record.progress],
                "returns": [round(number, 4) for number in record.returns],
                "status": str(verdict.status),
                "label": None if verdict.label is None else str(verdict.label),
                "probabilities": shares,
                "text": verdict.text,
                "correct": record.correct,
                "judge": verdict.stamp.judge,
                "prompt": verdict.stamp.prompt,
                "used_step": record.used_step,
            }
        )
    return rows


def painted(image: NDArray[np.uint8], path: FloatArray, paint: Paint | None) -> NDArray[np.uint8]:
    """Returns `image` [H, W, 3] as shown to the judge: with the hand's path through the moments `path` [P, S], if P >
    0.
    """
    return paint(image, path) if paint and len(path) else image


def scored_examples(
    records: Sequence[ScoredItem], draw: Draw, goal: str, paint: Paint | None = None
) -> list[dict[str, Any]]:
    """Returns such entries for scores: of turns and episodes, or of the progress of images and segments."""
    rows = []
    for record in _some(records):
        score = record.score
        item = record.item
        if record.success_threshold is None:
            size_px, ending = PAIR_PX, ""
            outcome = str(score.status) if score.value is None else nearness(score.value, item.progress)
        else:
            size_px = SCORED_PX
            ending = (
                "a success that was undone" if item.success_lost else "a success" if item.is_success else "no success"
            )
            outcome = (
                str(score.status) if score.value is None else outcome_of(score.value, item, record.success_threshold)
            )
        *shown, last = draw(spread(item.snapshots, MAX_FRAMES), size_px)
        about = {"goal": item.goal or goal, "action": item.action, "ending": ending}
        row = {
            ENV_STEPS: record.env_step,
            "frames": [encode_png(frame) for frame in (*shown, painted(last, item.path, paint))],
            "truth": None if math.isnan(record.truth) else round(record.truth, 4),
            "progress": None if math.isnan(item.progress) else round(item.progress, 4),
            "return": round(record.env_return, 4),
            "outcome": outcome,
            "score": score.value,
            "text": score.text,
            "judge": score.stamp.judge,
            "prompt": score.stamp.prompt,
            "used_step": record.used_step,
        }
        rows.append(row | about)
    return rows


def nearness(value: float, progress: float) -> str:
    """Returns the outcome of a score of progress, as a key of `pages.SCORE_COLOURS`."""
    if math.isnan(progress):
        return "scored, progress unknown"
    if abs(value - progress) <= NEAR:
        return "near the truth"
    return "above the truth" if value > progress else "below the truth"


def outcome_of(value: float, item: ScoringItem, success_threshold: float) -> str:
    """Returns the outcome of a score that claims success from `success_threshold` on, a key of `SCORE_COLOURS`."""
    if item.success_lost:
        return "success, undone at the end"
    if value >= success_threshold:
        return "true positive" if item.is_success else "false positive"
    return "false negative" if item.is_success else "true negative"


def encode_png(image: NDArray[np.uint8]) -> str:
    """Returns an image [H, W, 3] as a base64 PNG."""
    return base64.b64encode(to_png(image, is_small=True)).decode()


def _some(records: Sequence[T]) -> Iterator[T]:
    """Yields `NUM_EXAMPLES` of the records, evenly spread over them."""
    # by order alone, so that a resumed run keeps the same examples
    indices = np.linspace(0, len(records) - 1, NUM_EXAMPLES).astype(int).tolist() if records else ()
    yield from (records[index] for index in sorted(set(indices)))


def _time(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds")
