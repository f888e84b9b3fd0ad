"""Scorers of turns and episodes: a judge that sees images, and controls that do not.

Two of these use the truth: the biased one, whose purpose is to be caught, and a simulated judge of progress.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import JudgeUnavailable, UsageError, first_line
from rlvlm.core.foreign import read_json
from rlvlm.core.judging import Clip, Score, Stamp, Status, Usage
from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.judges.health import JudgeHealth
from rlvlm.judges.judge import Judge, questions_at_once
from rlvlm.judges.side_by_side import ASKED_AT_ONCE, Work, side_by_side
from rlvlm.rewards.config import TurnRewardConfig
from rlvlm.rewards.scoring_items import ScoringItem

logger = logging.getLogger(__name__)

_MIN_SCORES = 20
"""Number of latest answers among which at least one must be given."""
_SCORE_ROWS = 11
"""Rows of a table of measured scores: ten bins of progress without success, and success."""
_COLUMNS = ("status", "value", "text", "latency_s", "question", "num_frames")
"""Fields of a score that a checkpoint stores unchanged."""


Paint = Callable[[NDArray[np.uint8], FloatArray], NDArray[np.uint8]]
"""Draws the hand's path through moments [P, S] on an image [H, W, 3], and returns the result."""


class Scorer(Protocol):
    """Gives scores in [0, 1]; a missing score has no value, and is never replaced by the truth."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Returns one score per item, in order."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Returns everything that an exact continuation needs."""
        ...

    def set_state(self, state: dict[str, Any]) -> None: ...


class ScoreMemory:
    """Lets a judge score new items, and remembers its scores.

    A failed score is asked for again; an unreadable one counts as an answer. A judge that fails on all questions, or
    whose answers are mostly unreadable, ends the run. The env's reward never replaces a score.

    Several threads may call `score`; what another call asks about is not asked again.

    Args:
        judge: a local or served judge.
        fewest: number of latest answers among which at least one must be given, >= 1. A call may be about a single
            turn, whose failure alone means little.
        remembers: whether answers are kept, for envs in which the same items recur.
    """

    def __init__(self, judge: Judge, *, fewest: int = 1, remembers: bool = True) -> None:
        self._judge = judge
        self._fewest = fewest
        self._remembers = remembers
        self._known: dict[bytes, Score] = {}
        self._under_way: dict[bytes, Future[dict[bytes, Score]]] = {}
        """Scores that another call will have, by key."""
        self._health = JudgeHealth()
        self._latest: list[Score] = []
        self._lock = Lock()
        self.fresh: dict[bytes, Score] = {}
        """Scores of the last call, by key."""

    def score(self, keys: Sequence[bytes], draw_clips: Callable[[list[int]], Sequence[Clip]]) -> list[Score]:
        """Returns the scores of items by their keys, in order; each key is asked about once.

        Args:
            keys: [N] keys, equal if the judge would be shown the same.
            draw_clips: makes the clips of the items at some indices, at most `ASKED_AT_ONCE` of them; called in the
                caller's thread.

        Raises:
            JudgeUnavailable: the judge does not answer or cannot be understood.
        """
        own: Future[dict[bytes, Score]] = Future()
        with self._lock:
            known = {key: self._known[key] for key in keys if key in self._known}
            others = {self._under_way[key] for key in keys if key in self._under_way}
            # the last of equal items represents all: they show the same
            taken = known.keys() | self._under_way.keys()
            indices = {key: index for index, key in enumerate(keys) if key not in taken}
            self._under_way |= dict.fromkeys(indices, own)
        try:
            fresh = self._asked(keys, [*indices.values()], draw_clips)
        except BaseException as error:
            own.set_exception(error)
            raise
        else:
            own.set_result(fresh)
        finally:
            with self._lock:
                for key in indices:
                    del self._under_way[key]
        self.fresh = fresh
        for other in others:
            known |= other.result()
        return [fresh.get(key) or known[key] for key in keys]

    def _asked(
        self, keys: Sequence[bytes], indices: list[int], draw_clips: Callable[[list[int]], Sequence[Clip]]
    ) -> dict[bytes, Score]:
        """Returns the judge's scores of the items at `indices`, by key."""

        def work() -> Iterator[Work[tuple[list[int], list[Score]]]]:
            for begin in range(0, len(indices), ASKED_AT_ONCE):
                asked = indices[begin : begin + ASKED_AT_ONCE]
                clips = draw_clips(asked)
                yield Work(partial(self._ask, asked, clips), sum(clip.frames.nbytes for clip in clips))

        fresh: dict[bytes, Score] = {}
        for asked, scores in side_by_side(self._judge, work()):
            assert len(scores) == len(asked), f"a judge must give one score per clip, got {len(scores)} of {len(asked)}"
            answers = dict(zip([keys[index] for index in asked], scores, strict=True))
            fresh |= answers
            with self._lock:
                self._health.note(scores)
                # over several calls: a single failed turn says little about the judge
                self._latest = [*self._latest, *scores][-max(self._fewest, len(scores)) :]
                if len(self._latest) >= self._fewest:
                    self._health.check(self._latest)
                # a policy meets the same turns again and again, a VLA's videos never repeat
                if self._remembers:
                    self._known |= {key: score for key, score in answers.items() if score.status is not Status.FAILED}
        return fresh

    def _ask(self, indices: list[int], clips: Sequence[Clip]) -> tuple[list[int], list[Score]]:
        return indices, self._judge.score(clips)

    def get_state(self) -> dict[str, Any]:
        """Returns the remembered scores, one column per field: there may be a score for every step of a run.

        It is part of a checkpoint because on some processors and on all GPUs a judge that is asked again in another
        batch may differ in the last bits, so that a continuation without it would not be exact.
        """
        scores = list(self._known.values())
        # by index: thousands of answers share a few stamps
        stamps = list(dict.fromkeys(score.stamp for score in scores))
        # all keys are digests of one length; without keys the reshape still needs a number
        key_size = len(next(iter(self._known), b"-"))
        return {
            "keys": np.frombuffer(b"".join(self._known), np.uint8).reshape(-1, key_size),
            "stamps": list(map(asdict, stamps)),
            "stamp": [stamps.index(score.stamp) for score in scores],
            "usage": [score.usage and asdict(score.usage) for score in scores],
            **{name: [getattr(score, name) for score in scores] for name in _COLUMNS},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        stamps = [Stamp(**stamp) for stamp in state["stamps"]]
        rows = zip(state["keys"], state["stamp"], state["usage"], *(state[name] for name in _COLUMNS), strict=True)
        self._known = {}
        for key, stamp, usage, status, *values in rows:
            said = dict(zip(_COLUMNS[1:], values, strict=True))
            score = Score(status=Status(status), stamp=stamps[stamp], usage=usage and Usage(**usage), **said)
            self._known[key.tobytes()] = score


class JudgeScorer(Stateful):
    """Asks a judge, once about equal items.

    Args:
        judge: a local or served judge.
        draw: draws images [N, H, W, 3] of snapshots [N, S].
        remembers: as in `ScoreMemory`.
        paint: draws the hand's path through moments [P, S] on an image [H, W, 3]; needed for items with a path.
    """

    STATE = ("_memory",)

    def __init__(
        self, judge: Judge, draw: Callable[[FloatArray], Frames], *, remembers: bool, paint: Paint | None = None
    ) -> None:
        self._memory = ScoreMemory(judge, fewest=_MIN_SCORES, remembers=remembers)
        self._draw, self._paint = draw, paint
        # one thread for all that ask: a renderer may belong to one
        self._drawing = ThreadPoolExecutor(1, thread_name_prefix="clips")
        self.at_once = questions_at_once(judge)
        """See `judge.questions_at_once`."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        def draw_clips(indices: list[int]) -> list[Clip]:
            # one call of the renderer for all moments of all items, then split again
            asked = [items[index] for index in indices]
            frames = self._draw(np.concatenate([item.snapshots for item in asked]))
            parts = np.split(frames, np.cumsum([len(item.snapshots) for item in asked])[:-1])
            for item, part in zip(asked, parts, strict=True):
                if len(item.path):
                    assert self._paint is not None, "whoever gives items a path can draw it"
                    part[-1] = self._paint(part[-1], item.path)
            together = zip(asked, parts, strict=True)
            return [Clip(goal=item.goal, frames=part, action=item.action) for item, part in together]

        def drawn(indices: list[int]) -> list[Clip]:
            return self._drawing.submit(draw_clips, indices).result()

        return self._memory.score([item.key for item in items], drawn)


class FallbackScorer(Stateful):
    """Asks a second scorer about items without a score, or about all if the first raises JudgeUnavailable.

    Args:
        first: scorer that is asked first.
        fallback: scorer that is asked for missing scores.
    """

    STATE = ("_first", "last=_fallback")

    def __init__(self, first: Scorer, fallback: Scorer) -> None:
        self._first = first
        self._fallback = fallback
        self.at_once = min(questions_at_once(first), questions_at_once(fallback))
        """See `judge.questions_at_once`."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Returns one score per item, in order; its stamp names its scorer.

        Raises:
            JudgeUnavailable: the fallback does not answer either.
        """
        # the first scorer decides when it gives up: it raises; if the second raises too, the run ends
        try:
            scores = self._first.score(items)
        except JudgeUnavailable as error:
            logger.warning("the judge does not answer (%s): the fallback judge is asked", first_line(error))
            return self._fallback.score(items)
        # failed and unreadable answers alike: neither is a score
        missing = [index for index, score in enumerate(scores) if score.value is None]
        if missing:
            again = self._fallback.score([items[index] for index in missing])
            for index, score in zip(missing, again, strict=True):
                scores[index] = score
        return scores


class SimulatedScorer(Stateful):
    """A scorer without images: a function computes an item's score.

    Args:
        value: returns an item's score in [0, 1], given a new generator for each call.
        seed: seed of the generators.
        judge: name in the stamp.
        settings: other settings in the stamp.
    """

    STATE = ("num_asked",)

    def __init__(
        self, value: Callable[[ScoringItem, np.random.Generator], float], seed: int, judge: str, settings: str = ""
    ) -> None:
        self._value = value
        self._seed = seed
        self._stamp = Stamp(judge=judge, revision="", prompt="none", decoding=f"{settings}seed={seed}")
        self.num_asked = 0

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        scores = []
        for number, item in enumerate(items, self.num_asked):
            # seeded by the number of earlier scores: a resumed run continues with the same draws
            value = self._value(item, np.random.default_rng((self._seed, number)))
            scores.append(Score(status=Status.OK, value=value, stamp=self._stamp))
        self.num_asked += len(items)
        return scores


def random_scorer(seed: int) -> SimulatedScorer:
    """Returns a scorer with random scores in [0, 1), drawn anew each time: the negative control."""
    return SimulatedScorer(lambda _, rng: float(rng.random()), seed, "random")


def biased_scorer(false_positives: float, seed: int, false_negatives: float = 0.0) -> SimulatedScorer:
    """Returns a scorer of the truth, 1 or 0, that calls a share of failures, in [0, 1], successes, and a share of
    successes failures.

    It is the control that the monitor must catch. `seed` decides which episodes these are.
    """

    def value(item: ScoringItem, _: np.random.Generator) -> float:
        # by item and not at random: the same failure fools the judge every time, as it would a real one
        digest = hashlib.sha256(seed.to_bytes(8, "big", signed=True) + item.key).digest()
        chance = int.from_bytes(digest[:8], "big") / 2**64
        return float(chance >= false_negatives if item.is_success else chance < false_positives)

    said = f"false_positives={false_positives:g} false_negatives={false_negatives:g} "
    return SimulatedScorer(value, seed, "biased", said)


def progress_scorer(noise: float, seed: int) -> SimulatedScorer:
    """Returns a scorer of the simulator's progress with normal noise of standard deviation `noise`, clipped to [0, 1].

    The noise is drawn anew each time: a judge of adjustable quality.
    """
    return SimulatedScorer(
        lambda item, rng: float(np.clip(item.progress + noise * rng.normal(), 0.0, 1.0)),
        seed, "progress", f"noise={noise:g} ",
    )  # fmt: skip


def measured_scorer(scores: list[list[float]], seed: int, name: str) -> SimulatedScorer:
    """Returns a scorer that draws from the scores that a judge gave to episodes of similar progress.

    Args:
        scores: [11] lists from `read_scores`; an empty one takes the scores of the nearest, so that without measured
            successes these score like failures of the highest progress.
        seed: seed of the draws.
        name: name of the measured judge.
    """
    # a judge measured on few episodes has empty bins: they use the nearest one's scores
    known = [index for index, row in enumerate(scores) if row]
    filled = [scores[min(known, key=lambda other: abs(other - index))] for index in range(_SCORE_ROWS)]

    def value(item: ScoringItem, rng: np.random.Generator) -> float:
        # the last row is for successes alone; a failure at progress 1 belongs to the bin below it
        row = _SCORE_ROWS - 1 if item.is_success else min(int(item.progress * (_SCORE_ROWS - 1)), _SCORE_ROWS - 2)
        return float(rng.choice(filled[row]))

    return SimulatedScorer(value, seed, f"measured {name}")


def read_scores(path: Path, task: str) -> list[list[float]]:
    """Reads [11] lists of a judge's scores of episodes, by true progress in ten bins, and of successes last.

    Args:
        path: path of a bench.json of `rlvlm judge-bench`.
        task: task of the scores; those of all tasks are used if it has none.

    Raises:
        UsageError: the file has no scores of episodes.
    """
    try:
        # a bench of several tasks has a table for each task with one, and one for all together
        tables = read_json(path.expanduser())["teacher"]
        table = tables[task] if "scores" in tables.get(task, {}) else tables["all"]
        scores = [[float(score) for score in row] for row in table["scores"]]
        if len(scores) != _SCORE_ROWS or not any(scores) or not all(0 <= score <= 1 for row in scores for score in row):
            raise ValueError(f"{len(scores)} rows")
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"reward.measured {path} has no scores of episodes ({type(error).__name__}: {error})",
            "rlvlm judge-bench writes them for a judge that scores",
        ) from error
    return scores


def make_scorer(  # noqa: PLR0913 - all of them parts of a run
    reward: TurnRewardConfig,
    task: str,
    seed: int,
    draw: Callable[[FloatArray], Frames],
    *,
    paint: Paint | None = None,
    make_judge: Callable[[], Judge] | None = None,
    make_fallback_judge: Callable[[], Judge] | None = None,
    remembers: bool,
) -> Scorer:
    """Returns the scorer that `reward.teacher` names.

    Args:
        reward: names the scorer, with the settings of a control.
        task: task of the measured scores.
        seed: seed of a control.
        draw: see `JudgeScorer`.
        paint: see `JudgeScorer`.
        make_judge: makes the judge in this process; None if none is asked.
        make_fallback_judge: makes a judge for answers missing from the first; None without one.
        remembers: see `JudgeScorer`.

    Raises:
        UsageError: there are no measured scores.
    """
    if reward.teacher == "random":
        return random_scorer(seed)
    if reward.teacher == "biased":
        return biased_scorer(reward.false_positives, seed, reward.false_negatives)
    if reward.teacher == "progress":
        return progress_scorer(reward.noise, seed)
    if reward.teacher == "measured":
        return measured_scorer(read_scores(Path(reward.measured), task), seed, reward.measured)
    assert make_judge is not None, "the config has checked that there is a judge"
    first = JudgeScorer(make_judge(), draw, remembers=remembers, paint=paint)
    if make_fallback_judge is None:
        return first
    return FallbackScorer(first, JudgeScorer(make_fallback_judge(), draw, remembers=remembers, paint=paint))
