"""Questions and answers with the truth beside them: one record per answer, and the run's counts.

Filled by the loop, or by the log of a judge that rewards directly; written to disk by runs/.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlvlm.core import metrics
from rlvlm.core.judging import Label, Score, Status, Verdict
from rlvlm.core.state import Stateful
from rlvlm.core.steps import Pair, Segment, Trajectory
from rlvlm.envs.images import FrameStore
from rlvlm.judges.agreement import label_outcome
from rlvlm.judges.health import JudgeHealth
from rlvlm.rewards.judged import JudgedReward
from rlvlm.rewards.scoring_items import ScoredItem, ScoringItem

_METRIC = {
    Status.OK: metrics.QUERIES_OK,
    Status.NO_PREFERENCE: metrics.QUERIES_NO_PREFERENCE,
    Status.INVALID: metrics.QUERIES_INVALID,
    Status.FAILED: metrics.QUERIES_FAILED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryRecord:
    """One query of the run; its segments hold the truth."""

    env_step: int
    """Env steps done when the query was asked."""
    session: int
    """Index of the session, from 0."""
    index: int
    """Index within the session, from 0."""
    timestamp: float
    """Unix time of the answer, seconds."""
    pair: Pair
    verdict: Verdict
    has_progress: bool = True
    """Whether the env measures progress."""
    used_step: int | None = None
    """Env steps done when the answer was first trained on; None if it was not, since a person was asked after it."""

    @property
    def progress(self) -> tuple[float, float] | None:
        """Mean true progress of left and right, in [0, 1]; None if the env measures none."""
        if not self.has_progress:
            return None
        return float(self.pair.left.progress.mean()), float(self.pair.right.progress.mean())

    @property
    def returns(self) -> tuple[float, float]:
        """Sum of the env's true rewards over left and right."""
        return float(self.pair.left.env_rewards.sum()), float(self.pair.right.env_rewards.sum())

    @property
    def correct(self) -> bool | None:
        """Whether the label names the side with more true progress, or with the larger true return if the env measures
        no progress; None if nothing was decided or the truth is a tie.
        """
        left, right = self.progress or self.returns
        outcome = label_outcome(str(self.verdict.label or ""), right - left)
        return {"right": True, "wrong": False}.get(outcome)


Record = QueryRecord | ScoredItem


def record_answers(
    questions: Sequence[Pair | Segment],
    answers: Sequence[Any],
    *,
    env_step: int,
    session: int,
    timestamp: float,
    indices: Sequence[int] | None = None,
    has_progress: bool = True,
) -> list[Any]:
    """Returns the records of one session in order: of pairs with verdicts, or of segments with scores.

    `indices` are those of the questions within the session, by default from 0. Without `has_progress` a scored
    segment's progress is NaN.
    """
    records: list[Any] = []
    numbers = range(len(questions)) if indices is None else indices
    for index, question, answer in zip(numbers, questions, answers, strict=True):
        about = {"env_step": env_step, "timestamp": timestamp, "index": index}
        if isinstance(question, Pair):
            about |= {"session": session, "has_progress": has_progress}
            records.append(QueryRecord(**about, pair=question, verdict=answer))
            continue
        progress = float(question.progress[-1]) if has_progress else math.nan  # at its end, as the oracle scores it
        item = ScoringItem(
            goal="", snapshots=question.snapshots, path=question.path, is_success=None, progress=progress
        )
        env_return = float(question.env_rewards.sum())
        records.append(
            ScoredItem(**about, item=item, score=answer, truth=progress, group=session, env_return=env_return)
        )
    return records


class FeedbackCounts(Stateful):
    """Counts over the whole run, by status of the answers."""

    STATE = ("_counts", "recent=_health")

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._health = JudgeHealth()

    @property
    def num_asked(self) -> int:
        """Number of queries asked so far, answered or not."""
        return self._counts[metrics.QUERIES]

    def count(self, records: Sequence[Record], num_look_alike: int, *, by_person: bool = False) -> None:
        """Counts the records of answers to train on, and checks that the teacher answers and can be understood.

        Args:
            records: records of one session.
            num_look_alike: number of pairs that were drawn for it and not asked about.
            by_person: whether a person gave all of these answers.

        Raises:
            JudgeUnavailable: every answer of this session is missing, or most of the latest cannot be read.
        """
        answers = [record.verdict if isinstance(record, QueryRecord) else record.score for record in records]
        correct = [record.correct for record in records if isinstance(record, QueryRecord)]
        self._counts[metrics.QUERIES] += len(records)
        if by_person:
            self._counts["by_person"] += len(records)
            self._counts["person_ms"] += sum(round(1_000 * answer.latency_s) for answer in answers)
        self._counts[metrics.QUERIES_LOOK_ALIKE] += num_look_alike
        self._counts.update(_METRIC[answer.status] for answer in answers)
        self._counts["correct"] += correct.count(True)
        self._counts["wrong"] += correct.count(False)
        self._counts["left"] += sum(isinstance(answer, Verdict) and answer.label is Label.LEFT for answer in answers)
        self._counts["right"] += sum(isinstance(answer, Verdict) and answer.label is Label.RIGHT for answer in answers)
        if not by_person:  # a person who skips many pairs is not an unreadable model
            self._health.note(answers)
            self._health.check(answers)

    def metrics(self) -> dict[str, float]:
        """Returns the counts so far, and shares with the bench's definitions.

        Shares: accuracy over all decided labels with a truth, decided labels that say left, and comparisons without a
        preference; each is absent if its count is 0.
        """
        names = (metrics.QUERIES, metrics.QUERIES_LOOK_ALIKE, *_METRIC.values())
        counts = {name: float(self._counts[name]) for name in names}
        checked = self._counts["correct"] + self._counts["wrong"]
        if self._counts["by_person"]:
            counts[metrics.PERSON_ANSWERS] = float(self._counts["by_person"])
            counts[metrics.PERSON_MINUTES] = self._counts["person_ms"] / 60_000
        if checked:  # if nothing moves, the truth of most pairs is a tie, and a share of three says little
            counts[metrics.LABELS_CHECKED] = float(checked)
        decided = self._counts["left"] + self._counts["right"]
        # as hits and counts; a share of nothing is left out and not 0
        shares = {metrics.LABEL_ACCURACY: (self._counts["correct"], checked)}
        if decided:  # a score is never undecided
            undecided = self._counts[metrics.QUERIES_NO_PREFERENCE]
            shares |= {
                metrics.LABELS_LEFT: (self._counts["left"], decided),
                metrics.LABELS_UNDECIDED: (undecided, self._counts[metrics.QUERIES]),
            }
        return counts | {name: hits / count for name, (hits, count) in shares.items() if count}


class ScoreLog:
    """Records of `judged` rewards, each held back until an episode with its image ends, since only then is its true
    progress known.

    None of this is part of a checkpoint: a resumed run judges its images again, from the label store, and so records
    them again.

    Args:
        source: source of the judged scores.
        frames: gives the keys of images.
        has_progress: whether the env measures progress.
    """

    def __init__(self, source: JudgedReward, frames: FrameStore, has_progress: bool = True) -> None:
        self._source = source
        self._has_progress = has_progress
        self._frames = frames
        self._waiting: dict[bytes, tuple[Score, float]] = {}
        self._episodes: list[Trajectory] = []

    def add(self, episode: Trajectory) -> None:
        self._episodes.append(episode)

    def drain(self, env_steps: int) -> list[ScoredItem]:
        """Returns the records of answers whose image was shown in an episode since the last call."""
        self._waiting |= self._source.drain_answers()
        records: list[ScoredItem] = []
        for episode in self._episodes:
            for step, key in enumerate(self._frames.keys(episode.snapshots)):
                # each answer once: the image may be shown by many later episodes
                if key in self._waiting:
                    score, timestamp = self._waiting.pop(key)
                    records += record_answers(
                        [episode.segment(step, 1)], [score], env_step=env_steps, session=0, timestamp=timestamp,
                        indices=[len(records)], has_progress=self._has_progress,
                    )  # fmt: skip
        self._episodes.clear()
        return records
