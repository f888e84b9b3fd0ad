"""Who scores what happened: a judge that looks, and controls that do not. The truth is asked by two of them: the biased
one, whose purpose is to be caught, and a simulated judge of progress.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import numpy as np

from rlvlm.core.errors import JudgeUnavailable, first_line
from rlvlm.core.judging import Clip, Score, Stamp, Status, Usage
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.judges.health import JudgeHealth
from rlvlm.judges.judge import Judge
from rlvlm.rewards.config import ScoreTeacher
from rlvlm.rewards.scoring_items import ScoringItem

logger = logging.getLogger(__name__)

_FEWEST = 20
"""Latest answers of which one at least must have come."""
_ASKED_AT_ONCE = 64
"""Showings that are drawn and held at once."""
_NO_STAMP = Stamp(judge="", revision="", prompt="", decoding="")


class Scorer(Protocol):
    """Scores in [0, 1]; a score that nobody gave has no value, and is never replaced by the truth."""

    num_asked: int
    """Showings so far; what a control's chance hangs on."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """One score for each, in order."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Everything that an exact continuation needs."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        ...


class _SimulatedScorer:
    """What the scorers that ask no judge share: their chance hangs on how often they were asked."""

    num_asked = 0

    def get_state(self) -> dict[str, Any]:
        """See `Scorer`."""
        return {"num_asked": self.num_asked}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `Scorer`."""
        self.num_asked = int(state["num_asked"])


class JudgeScorer:
    """Asks a judge, about things that are alike once.

    A judge that answers nothing of what it is asked, or mostly what cannot be read, ends the run.

    Args:
        judge: local or served.
        draw: makes images [N, H, W, 3] of snapshots [N, S].
        remembers: whether answers are kept in memory: for envs in which the same is met again.
    """

    def __init__(self, judge: Judge, draw: Callable[[FloatArray], Frames], *, remembers: bool) -> None:
        self._judge = judge
        self._draw = draw
        self.num_asked = 0
        self._remembers = remembers
        self._known: dict[bytes, Score] = {}
        self._health = JudgeHealth()
        self._latest: deque[Score] = deque(maxlen=_FEWEST)

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """See `Scorer`.

        Raises:
            JudgeUnavailable: the judge does not answer or cannot be understood.
        """
        self.num_asked += len(items)
        keys = [item.key for item in items]
        places = list({key: place for place, key in enumerate(keys) if key not in self._known}.values())
        fresh: dict[bytes, Score] = {}
        for begin in range(0, len(places), _ASKED_AT_ONCE):
            asked = places[begin : begin + _ASKED_AT_ONCE]
            scores = self._ask([items[place] for place in asked])
            fresh |= dict(zip([keys[place] for place in asked], scores, strict=True))
        given = [fresh.get(key) or self._known[key] for key in keys]
        if self._remembers:
            self._known |= {key: score for key, score in fresh.items() if score.status is not Status.FAILED}
        return given

    def get_state(self) -> dict[str, Any]:
        """See `Scorer`.

        Remembered answers are part of it. A judge asked again in another batch may answer with other last bits, on some
        processors and on all GPUs, so a continuation that forgot them would not be exact.
        """
        stamps = list(dict.fromkeys(score.stamp for score in self._known.values()))  # thousands of answers share a few
        return {
            "num_asked": self.num_asked,
            "keys": np.frombuffer(b"".join(self._known), np.uint8).reshape(-1, hashlib.sha256().digest_size),
            "scores": [
                asdict(replace(score, stamp=_NO_STAMP)) | {"stamp": stamps.index(score.stamp)}
                for score in self._known.values()
            ],
            "stamps": [asdict(stamp) for stamp in stamps],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """See `Scorer`."""
        self.num_asked = int(state["num_asked"])
        stamps = [Stamp(**stamp) for stamp in state["stamps"]]
        self._known = {
            key.tobytes(): Score(
                **score
                | {
                    "stamp": stamps[score["stamp"]],
                    "status": Status(score["status"]),
                    "usage": score["usage"] and Usage(**score["usage"]),
                }
            )
            for key, score in zip(state["keys"], state["scores"], strict=True)
        }

    def _ask(self, items: Sequence[ScoringItem]) -> list[Score]:
        frames = self._draw(np.concatenate([item.snapshots for item in items]))
        parts = np.split(frames, np.cumsum([len(item.snapshots) for item in items])[:-1])
        clips = [Clip(goal=item.goal, frames=part, action=item.action) for item, part in zip(items, parts, strict=True)]
        scores = self._judge.score(clips)
        assert len(scores) == len(clips), f"a judge owes one score per clip, got {len(scores)} of {len(clips)}"
        self._health.note(scores)
        self._latest.extend(scores)
        if len(self._latest) == _FEWEST:  # a call may be about a single turn, whose failure alone means little
            self._health.check(list(self._latest))
        return scores


class LastResortScorer:
    """Asks a second scorer about what the first has no score for, or about everything where the first does not answer.

    Args:
        first: usually asked.
        last: asked where that one gives nothing.
    """

    def __init__(self, first: Scorer, last: Scorer) -> None:
        self._first = first
        self._last = last
        self.num_asked = 0

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """See `Scorer`; a score says by its stamp who gave it.

        Raises:
            JudgeUnavailable: neither of them answers.
        """
        self.num_asked += len(items)
        try:
            scores = self._first.score(items)
        except JudgeUnavailable as error:
            logger.warning("the judge does not answer (%s): the fallback judge is asked", first_line(error))
            return self._last.score(items)
        missing = [place for place, score in enumerate(scores) if score.value is None]
        if missing:
            again = self._last.score([items[place] for place in missing])
            for place, score in zip(missing, again, strict=True):
                scores[place] = score
        return scores

    def get_state(self) -> dict[str, Any]:
        """See `Scorer`."""
        return {"num_asked": self.num_asked, "first": self._first.get_state(), "last": self._last.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `Scorer`."""
        self.num_asked = int(state["num_asked"])
        self._first.set_state(state["first"])
        self._last.set_state(state["last"])


class RandomScorer(_SimulatedScorer):
    """Random scores, drawn anew each time: the negative control.

    Args:
        seed: of the scores.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._stamp = Stamp(judge="random", revision="", prompt="none", decoding=f"seed={seed}")

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Even numbers in [0, 1)."""
        throws = range(self.num_asked, self.num_asked + len(items))
        self.num_asked += len(items)
        values = [float(np.random.default_rng((self._seed, throw)).random()) for throw in throws]
        return [Score(status=Status.OK, value=value, stamp=self._stamp) for value in values]


class BiasedScorer(_SimulatedScorer):
    """The truth, but for a share of failures that it takes for successes: the control that a monitor must catch.

    Args:
        false_positives: that share, in [0, 1].
        seed: of which failures these are.
    """

    def __init__(self, false_positives: float, seed: int) -> None:
        self._false_positives = false_positives
        self._seed = seed
        decoding = f"false_positives={false_positives:g} seed={seed}"
        self._stamp = Stamp(judge="biased", revision="", prompt="none", decoding=decoding)

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """1 or 0."""
        self.num_asked += len(items)
        claims = [item.is_success or chance_of(item, self._seed) < self._false_positives for item in items]
        return [Score(status=Status.OK, value=float(claim), stamp=self._stamp) for claim in claims]


class ProgressScorer(_SimulatedScorer):
    """The simulator's progress with noise that is drawn anew each time: a judge as good as one wants.

    Args:
        noise: standard deviation; scores are cut to [0, 1].
        seed: of the noise.
    """

    def __init__(self, noise: float, seed: int) -> None:
        self._noise = noise
        self._seed = seed
        self._stamp = Stamp(judge="progress", revision="", prompt="none", decoding=f"noise={noise:g} seed={seed}")

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Progress at the last moment, 1 for a success, with noise."""
        throws = range(self.num_asked, self.num_asked + len(items))
        self.num_asked += len(items)
        errors = [self._noise * np.random.default_rng((self._seed, throw)).normal() for throw in throws]
        return [
            Score(status=Status.OK, value=float(np.clip(item.progress + error, 0.0, 1.0)), stamp=self._stamp)
            for item, error in zip(items, errors, strict=True)
        ]


def make_scorer(
    teacher: ScoreTeacher,
    make_judge: Callable[[], Judge] | None,
    draw: Callable[[FloatArray], Frames],
    seed: int,
    *,
    remembers: bool,
    flaw: float = 0.0,
    make_fallback_judge: Callable[[], Judge] | None = None,
) -> Scorer:
    """The scorer that `teacher` names.

    Args:
        teacher: judge, or a control.
        make_judge: makes the judge in this process; None where nobody looks.
        draw: see `JudgeScorer`.
        seed: of a control.
        remembers: see `JudgeScorer`.
        flaw: of a simulated teacher: the false positives of the biased one, the noise of progress.
        make_fallback_judge: makes a judge that is asked where the first has no answer; None where nobody is.
    """
    if teacher == "random":
        return RandomScorer(seed)
    if teacher == "biased":
        return BiasedScorer(flaw, seed)
    if teacher == "progress":
        return ProgressScorer(flaw, seed)
    assert make_judge is not None, "the config has checked that there is a judge"
    first = JudgeScorer(make_judge(), draw, remembers=remembers)
    if make_fallback_judge is None:
        return first
    return LastResortScorer(first, JudgeScorer(make_fallback_judge(), draw, remembers=remembers))


def chance_of(item: ScoringItem, seed: int) -> float:
    """A number in [0, 1) that depends on the item and the seed alone."""
    digest = hashlib.sha256(seed.to_bytes(8, "big", signed=True) + item.key).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
