"""A reward model with heads behind the `Judge` protocol."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.judges import prompts
from rlvlm.judges.config import Abilities, JudgeConfig, ScoreMode
from rlvlm.judges.likeness.encoders import AdaptiveBatches

Item = TypeVar("Item", Query, Clip)


class RewardModel(Protocol):
    """A network that answers in numbers; members are `robometer.Robometer` and `rynnvalue.RynnValue`."""

    revision: str
    """Commit or digest of the weights."""
    traits: str
    """Whatever else changes its numbers at fixed weights, e.g. `dtype=float32`."""
    scores: frozenset[ScoreMode]
    """Forms of `JudgeConfig.score` that it has an answer to."""

    def rate(self, clips: Sequence[Clip]) -> tuple[Tensor, list[str]]:
        """`[N]` in [0, 1], and each in words."""
        ...

    def prefer(self, queries: Sequence[Query]) -> tuple[Tensor, list[str]]:
        """`[N]` above 0 where the left side did better, and each in words."""
        ...

    def share(self, margins: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """`[N]` probabilities of the left side, of what `prefer` gave; None where that tells of none."""
        ...


class HeadJudge:
    """A reward model as a judge. Exactly equal sides are no preference.

    Args:
        config: what is asked for.
        model: answers.

    Raises:
        UnsupportedQuestion: it has no such answer.
    """

    def __init__(self, config: JudgeConfig, model: RewardModel) -> None:
        Abilities(compare=frozenset({"direct"}), score=model.scores, goal_pictures=False).check(config)
        self._model = model
        self._batches = AdaptiveBatches(config.batch_size)
        bounds = f"min_pixels={config.min_pixels} max_pixels={config.max_pixels}"
        self._stamp = Stamp(
            judge=f"{config.backend}:{config.model}",
            revision=model.revision,
            prompt=f"{config.backend}_{prompts.version(config.score)}{prompts.wording_mark(config)}",
            decoding=f"{bounds} {model.traits}",
        )

    @property
    def stamp(self) -> Stamp:
        """Where the answers come from."""
        return self._stamp

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order.

        Raises:
            JudgeUnavailable: the network breaks.
        """
        start = time.perf_counter()
        problems, margins, told = self._ask(queries, self._model.prefer)
        elapsed, shares = time.perf_counter() - start, self._model.share(margins)
        answers = iter(zip(margins.tolist(), told, [None] * len(told) if shares is None else shares, strict=True))
        verdicts = []
        for problem in problems:
            if problem is not None:
                verdicts.append(Verdict(status=Status.FAILED, label=None, stamp=self._stamp, text=problem))
                continue
            margin, text, share = next(answers)
            label = Label.TIE if margin == 0 else Label.LEFT if margin > 0 else Label.RIGHT
            verdicts.append(
                Verdict(
                    status=Status.NO_PREFERENCE if label is Label.TIE else Status.OK,
                    label=label,
                    stamp=self._stamp,
                    probabilities=None if share is None else (float(share), float(1 - share), 0.0),
                    text=text,
                    latency_s=elapsed,
                )
            )
        return verdicts

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order. Raises as `compare` does."""
        start = time.perf_counter()
        problems, values, told = self._ask(clips, self._model.rate)
        elapsed = time.perf_counter() - start
        answers = iter(zip(values.tolist(), told, strict=True))
        scores = []
        for problem in problems:
            if problem is not None:
                scores.append(Score(status=Status.FAILED, value=None, stamp=self._stamp, text=problem))
                continue
            value, text = next(answers)
            scores.append(Score(status=Status.OK, value=value, stamp=self._stamp, text=text, latency_s=elapsed))
        return scores

    def _ask(
        self, items: Sequence[Item], answer: Callable[[Sequence[Item]], tuple[Tensor, list[str]]]
    ) -> tuple[list[str | None], NDArray[np.float64], list[str]]:
        """Why each item cannot be asked (None where it can), and number and words of each of those that can."""
        problems = [self._problem(item) for item in items]
        good = [item for item, problem in zip(items, problems, strict=True) if problem is None]
        told: list[str] = []

        def look(piece: Sequence[Item]) -> Tensor:
            values, words = answer(piece)
            values = values.cpu()  # where a GPU's memory runs out, the piece comes again: before its words are kept
            told.extend(words)
            return values

        return problems, self._batches.run(look, good).numpy() if good else np.zeros(0), told

    def _problem(self, item: Query | Clip) -> str | None:
        if item.goal_picture is not None:
            return "this judge was never shown an image of the goal; leave out goal_picture"
        return prompts.problem_of(item)
