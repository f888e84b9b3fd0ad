"""Networks that answer in numbers, not in words, as judges. `similarity` and `reward_heads` have them."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.judges import prompts
from rlvlm.judges.config import Abilities, JudgeConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item", Query, Clip)


class NumericModel(Protocol):
    """What answers; members are `similarity.clip.Clip`-like models and those with reward heads."""

    revision: str
    """Commit or digest of the weights."""
    abilities: Abilities
    """What it has an answer to."""
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

    Args:
        config: what is asked for.
        model: answers.

    Raises:
        UnsupportedQuestion: it has no such answer.
    """

    def __init__(self, config: JudgeConfig, model: NumericModel) -> None:
        model.abilities.check(config)
        self._model = model
        self._batches = AdaptiveBatches(config.batch_size)
        self._stamp = Stamp(
            judge=f"{config.backend}:{config.model}",
            revision=model.revision,
            prompt=model.prompt,
            decoding=model.decoding,
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
        problems, margins, texts = self._ask(queries, self._model.prefer)
        elapsed, shares = time.perf_counter() - start, self._model.share(margins)
        verdicts, answered = [], 0
        for problem in problems:
            if problem is not None:
                verdicts.append(Verdict(status=Status.FAILED, label=None, stamp=self._stamp, text=problem))
                continue
            margin, share = margins[answered], None if shares is None else float(shares[answered])
            label = Label.TIE if margin == 0 else Label.LEFT if margin > 0 else Label.RIGHT
            verdicts.append(
                Verdict(
                    status=Status.NO_PREFERENCE if label is Label.TIE else Status.OK,
                    label=label,
                    stamp=self._stamp,
                    probabilities=None if share is None else (share, 1 - share, 0.0),
                    text=texts[answered],
                    latency_s=elapsed,
                )
            )
            answered += 1
        return verdicts

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order. Raises as `compare` does."""
        start = time.perf_counter()
        problems, values, texts = self._ask(clips, self._model.rate)
        elapsed = time.perf_counter() - start
        answers = iter(zip(values.tolist(), texts, strict=True))
        scores = []
        for problem in problems:
            if problem is not None:
                scores.append(Score(status=Status.FAILED, value=None, stamp=self._stamp, text=problem))
                continue
            value, text = next(answers)
            scores.append(Score(status=Status.OK, value=value, stamp=self._stamp, text=text, latency_s=elapsed))
        return scores

    def _ask(
        self, items: Sequence[Item], answer: Callable[[Sequence[Item]], tuple[torch.Tensor, list[str]]]
    ) -> tuple[list[str | None], NDArray[np.float64], list[str]]:
        """Why each item cannot be asked (None where it can), and number and words of each of those that can."""
        problems = [self._model.abilities.problem_of(item) or prompts.problem_of(item) for item in items]
        good = [item for item, problem in zip(items, problems, strict=True) if problem is None]
        texts: list[str] = []

        def look(piece: Sequence[Item]) -> torch.Tensor:
            values, words = answer(piece)
            values = values.cpu()  # where a GPU's memory runs out, the piece comes again: before its words are kept
            texts.extend(words)
            return values

        return problems, self._batches.run(look, good).numpy() if good else np.zeros(0), texts


class AdaptiveBatches:
    """Runs a network on pieces of at most `size` items; where memory runs out they become smaller, and stay so.

    Args:
        size: items per piece at first, >= 1.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def run(self, ask: Callable[[Sequence[T]], torch.Tensor], items: Sequence[T]) -> torch.Tensor:
        """What `ask` gives for all items, in order, as float64 on the CPU.

        Raises:
            JudgeUnavailable: the network breaks, or one item alone is too much for the memory.
        """
        answers: list[torch.Tensor] = []
        done = 0
        while done < len(items):
            piece = items[done : done + self._size]
            try:
                with torch.inference_mode():
                    answers.append(ask(piece).double().cpu())
                done += len(piece)
                continue
            except torch.OutOfMemoryError as error:
                reason = f"out of memory: {error}"
            except (RuntimeError, ValueError, IndexError) as error:
                raise JudgeUnavailable(f"the judge's network broke: {error}", "run `rlvlm doctor`") from error
            if self._size == 1:  # outside `except`, so that the traceback holds no tensors
                raise JudgeUnavailable(reason, "choose a smaller model, or --judge.dtype bfloat16")
            self._size = (len(piece) + 1) // 2
            logger.warning("out of memory with %d items at once; going on with %d", len(piece), self._size)
            torch.cuda.empty_cache()
        return torch.cat(answers)
