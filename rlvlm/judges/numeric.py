"""Judges made of networks that answer in numbers, not in words, e.g. those of `similarity`."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Verdict
from rlvlm.judges.asking import AdaptiveBatches, ask_what_can_be
from rlvlm.judges.config import Abilities, JudgeConfig
from rlvlm.judges.dialogues import DialogueResult

Item = TypeVar("Item", Query, Clip)


class NumericModel(Protocol):
    """Network that answers in numbers, e.g. `similarity.SimilarityModel`."""

    revision: str
    """Commit or digest of the weights."""
    abilities: Abilities
    """Questions that the network answers."""
    max_frames: int
    """Maximum number of frames shown to the network; longer clips are thinned."""
    prompt: str
    """Form of the question, for the stamp."""
    decoding: str
    """Everything else that changes its numbers at fixed weights, e.g. `dtype=float32`, for the stamp."""

    def rate(self, clips: Sequence[Clip]) -> tuple[NDArray[np.float64], list[str]]:
        """Returns [N] scores in [0, 1], and a text for each."""
        ...

    def prefer(self, queries: Sequence[Query]) -> tuple[NDArray[np.float64], list[str]]:
        """Returns [N] margins, above 0 if the left side did better and 0 if neither did, and a text for each."""
        ...

    def share(self, margins: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Returns [N] probabilities of the left side for the margins of `prefer`; None if the model has none."""
        ...


class NumericJudge:
    """Judge around a network that answers in numbers.

    Raises:
        UnsupportedQuestion: the network cannot answer the form of question in `config`.
    """

    def __init__(self, config: JudgeConfig, model: NumericModel) -> None:
        model.abilities.check(config)
        self._model = model
        self._batches = AdaptiveBatches(config.batch_size, _release_gpu_memory)
        self.stamp = Stamp(
            judge=f"{config.backend}:{config.model}",
            revision=model.revision,
            prompt=model.prompt,
            decoding=model.decoding,
        )

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """Returns one verdict per query, in order.

        Raises:
            JudgeUnavailable: the network fails.
        """

        def prefer(batch: Sequence[Query]) -> list[DialogueResult]:
            margins, texts = self._model.prefer(batch)
            shares = self._model.share(margins)
            odds = [None] * len(texts) if shares is None else [(share, 1 - share, 0.0) for share in shares.tolist()]
            # such a model cannot report a tie; only equal numbers are one
            return [
                DialogueResult(value=Label.of(margin, 0.0), text=text, probabilities=p)
                for margin, text, p in zip(margins.tolist(), texts, odds, strict=True)
            ]

        return [outcome.verdict(self.stamp) for outcome in self._ask(queries, prefer)]

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        def rate(batch: Sequence[Clip]) -> list[DialogueResult]:
            values, texts = self._model.rate(batch)
            rated = zip(values.tolist(), texts, strict=True)
            return [DialogueResult(value=value, text=text) for value, text in rated]

        # a clip that failed was not shown, so it counts no frames
        most = self._model.max_frames
        return [
            outcome.score(self.stamp, 0 if outcome.has_failed else min(len(clip.frames), most))
            for clip, outcome in zip(clips, self._ask(clips, rate), strict=True)
        ]

    def _ask(
        self, items: Sequence[Item], answer: Callable[[Sequence[Item]], list[DialogueResult]]
    ) -> list[DialogueResult]:
        start = time.perf_counter()
        try:
            outcomes = ask_what_can_be(items, self._model.abilities, lambda good, _: self._batches.run(good, answer))
        except MemoryError as error:  # a single item did not fit
            fix = "choose a smaller model, or --judge.dtype bfloat16"
            raise JudgeUnavailable(f"out of memory: {error}", fix) from error
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise JudgeUnavailable(f"the judge's network broke: {error}", "run `rlvlm doctor`") from error
        elapsed = time.perf_counter() - start  # of the whole batch, which went through the network together
        return [outcome if outcome.has_failed else replace(outcome, latency_s=elapsed) for outcome in outcomes]


def _release_gpu_memory() -> None:
    torch = sys.modules.get("torch")  # a plain function of images never imported it
    if torch is not None:
        torch.cuda.empty_cache()
