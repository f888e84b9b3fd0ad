"""Networks that answer in numbers, not in words, as judges. `similarity` and `reward_heads` have them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Verdict
from rlvlm.judges.asking import AdaptiveBatches, ask_what_can_be
from rlvlm.judges.config import Abilities, JudgeConfig
from rlvlm.judges.dialogues import DialogueResult

Item = TypeVar("Item", Query, Clip)


class NumericModel(Protocol):
    """What answers; members are `similarity.clip.Clip`-like models and those with reward heads."""

    revision: str
    """Commit or digest of the weights."""
    abilities: Abilities
    """The questions that it answers."""
    max_frames: int
    """Frames of a longer clip that it is shown."""
    prompt: str
    """Stands in the stamp for what is asked."""
    decoding: str
    """Stands there for whatever else changes its numbers at fixed weights, e.g. `dtype=float32`."""

    def rate(self, clips: Sequence[Clip]) -> tuple[torch.Tensor, list[str]]:
        """`[N]` in [0, 1], and each in words."""
        ...

    def prefer(self, queries: Sequence[Query]) -> tuple[torch.Tensor, list[str]]:
        """`[N]` above 0 where the left side did better, 0 where neither did, and each in words."""
        ...

    def share(self, margins: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """`[N]` probabilities of the left side, of what `prefer` gave; None where there are none."""
        ...


class NumericJudge:
    """A model that answers in numbers as a judge.

    Raises:
        UnsupportedQuestion: it has no answer to what `config` asks for.
    """

    def __init__(self, config: JudgeConfig, model: NumericModel) -> None:
        model.abilities.check(config)
        self._model = model
        self._batches = AdaptiveBatches(config.batch_size, torch.cuda.empty_cache)
        self.stamp = Stamp(
            judge=f"{config.backend}:{config.model}",
            revision=model.revision,
            prompt=model.prompt,
            decoding=model.decoding,
        )

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order.

        Raises:
            JudgeUnavailable: the network breaks.
        """

        def prefer(batch: Sequence[Query]) -> list[DialogueResult]:
            # float64 before anything is compared: in bfloat16 two sides that differ would be equal
            margins, texts = self._model.prefer(batch)
            numbers = margins.double().cpu().numpy()
            shares = self._model.share(numbers)
            odds = [None] * len(texts) if shares is None else [(share, 1 - share, 0.0) for share in shares.tolist()]
            # such a model cannot say that it sees no difference; only equal numbers are a tie
            return [
                DialogueResult(value=Label.of(margin, 0.0), text=text, probabilities=p)
                for margin, text, p in zip(numbers.tolist(), texts, odds, strict=True)
            ]

        return [outcome.verdict(self.stamp) for outcome in self._ask(queries, prefer)]

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order. Raises as `compare` does."""

        def rate(batch: Sequence[Clip]) -> list[DialogueResult]:
            values, texts = self._model.rate(batch)
            rated = zip(values.double().cpu().tolist(), texts, strict=True)
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
            with torch.inference_mode():
                outcomes = ask_what_can_be(items, self._model.abilities, lambda good: self._batches.run(good, answer))
        except MemoryError as error:  # one item alone was too much
            fix = "choose a smaller model, or --judge.dtype bfloat16"
            raise JudgeUnavailable(f"out of memory: {error}", fix) from error
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise JudgeUnavailable(f"the judge's network broke: {error}", "run `rlvlm doctor`") from error
        elapsed = time.perf_counter() - start  # of all: they went through the network together
        return [outcome if outcome.has_failed else replace(outcome, latency_s=elapsed) for outcome in outcomes]
