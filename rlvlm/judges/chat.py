"""A chat VLM as a judge: questions in, verdicts out, in batches. Which library runs the network is `chat_model`'s.

`backends.transformers`, `backends.pocket` and `backends.vllm` make these judges. numpy only.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rlvlm.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.judges import prompts
from rlvlm.judges.abilities import ANYTHING, Abilities
from rlvlm.judges.chat_model import TOP_P, ChatModel, Reply
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.prompts import Chat
from rlvlm.judges.verdicts import parse_label, parse_rating, parse_score, parse_video_score, status_of
from rlvlm.types.judging import Clip, Label, Query, Score, Stamp, Status, Verdict

logger = logging.getLogger(__name__)

MIN_CHOICE_MASS = 1e-3
"""Where all choices together are less likely than this, the model was not answering the question: invalid."""
_LABELS = (Label.LEFT, Label.RIGHT, Label.TIE)

Item = TypeVar("Item", Query, Clip)
Answer = TypeVar("Answer", Verdict, Score)
Asked = TypeVar("Asked")
Given = TypeVar("Given")


class ChatJudge:
    """A chat VLM behind the `Judge` and `Generator` protocols.

    An item that cannot be asked, or on which the model breaks, becomes a failed answer and leaves the rest of its
    batch alone; where memory runs out the batch is halved and asked again.
    """

    def __init__(self, config: JudgeConfig, model: ChatModel, abilities: Abilities = ANYTHING) -> None:
        """Holds the model and settles how it is asked.

        Raises:
            UnsupportedQuestion: the model cannot be asked as `config` says.
        """
        abilities.check(config)
        self._config = config
        self._model = model
        self._abilities = abilities
        self._batch_size = config.batch_size
        self._stamp = Stamp(
            judge=f"{config.backend}:{config.model or config.backend}",
            revision=model.revision,
            prompt=f"{prompts.version(config.prompt)} {prompts.version(config.score)}",
            decoding=_decoding(config, model.traits),
        )

    @property
    def stamp(self) -> Stamp:
        """Where the answers come from."""
        return self._stamp

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order; `latency_s` is the time its batch took.

        Raises:
            JudgeUnavailable: the model broke on every one of them.
        """
        ask = {"direct": self._label_directly, "single_stage": self._label_in_one, "two_stage": self._label_in_two}
        return self._answer_all(queries, ask[self._config.prompt], self._failed_verdict)

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order; `latency_s` likewise.

        Raises:
            JudgeUnavailable: the model broke on every one of them.
        """
        ask = {
            "progress": self._score_progress,
            "rating": self._score_rating,
            "success": self._score_success,
            "video": self._score_video,
        }
        return self._answer_all(clips, ask[self._config.score], self._failed_score)

    def generate(self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float) -> list[str]:
        """The model's reply to each chat, in order.

        Raises:
            UnsupportedQuestion: a chat is not in the format of `prompts`, or the model cannot read it.
            JudgeUnavailable: the model broke on every one of them.
        """
        try:
            checked = [prompts.checked_chat(chat) for chat in chats]
        except ValueError as error:
            raise UnsupportedQuestion(f"the judge cannot read a chat: {error}", "see docs/judges.md") from error

        def write(batch: Sequence[Chat]) -> list[str]:
            replies = self._model.generate(batch, max_new_tokens=max_new_tokens, temperature=temperature)
            return [reply.text for reply in replies]

        def failed(reason: str) -> str:
            raise UnsupportedQuestion(f"the judge cannot reply to a chat: {reason}", "see docs/judges.md")

        replies: list[str] = []
        while len(replies) < len(checked):
            replies += self._ask(checked[len(replies) : len(replies) + self._batch_size], write, failed)
        return replies

    def shrink(self, query: Query) -> Query:
        """The query with its pictures at the size at which the model will see them; the answer is the same.

        For whoever has time before the model has: resizing takes a quarter of a small model's answer. A query that
        cannot be asked comes back as it is.
        """
        shrink_frames = getattr(self._model, "shrink", None)
        if shrink_frames is None or self._problem(query) is not None:
            return query
        try:
            return replace(query, left=shrink_frames(query.left), right=shrink_frames(query.right))
        except ValueError:  # no shape that the processor takes; asking will say so
            return query

    def _answer_all(
        self, items: Sequence[Item], ask: Callable[[Sequence[Item]], list[Answer]], failed: Callable[[str], Answer]
    ) -> list[Answer]:
        """Asks what can be asked, in batches; every item gets an answer, failed ones too."""
        problems = [self._problem(item) for item in items]
        good = [item for item, problem in zip(items, problems, strict=True) if problem is None]
        answers: list[Answer] = []
        while len(answers) < len(good):
            answers += self._ask(good[len(answers) : len(answers) + self._batch_size], ask, failed)
        if answers and all(answer.status is Status.FAILED for answer in answers):
            raise JudgeUnavailable(
                f"the judge failed on every one of {len(answers)} questions: {answers[0].text}",
                "run `rlvlm doctor`; with a big model try --judge.quantization nf4",
            )
        in_order = iter(answers)
        return [next(in_order) if problem is None else failed(problem) for problem in problems]

    def _ask(
        self, batch: Sequence[Asked], ask: Callable[[Sequence[Asked]], list[Given]], failed: Callable[[str], Given]
    ) -> list[Given]:
        """Answers to one batch; one that breaks is halved until the item to blame is alone."""
        try:
            return ask(batch)
        except (ValueError, RuntimeError, TypeError, IndexError, MemoryError) as error:
            reason, is_too_large = f"{type(error).__name__}: {error}", _is_out_of_memory(error)
        if len(batch) == 1:
            logger.warning("the judge failed on a question: %s", reason)
            return [failed(reason)]
        half = (len(batch) + 1) // 2
        if is_too_large:  # later batches start smaller; outside `except`, so that the traceback holds no tensors
            logger.warning("out of memory with %d questions at once; going on with %d", len(batch), half)
            self._batch_size = half
            self._model.release_memory()
        return self._ask(batch[:half], ask, failed) + self._ask(batch[half:], ask, failed)

    def _problem(self, item: Query | Clip) -> str | None:
        """Why an item cannot be asked; None where it can."""
        if item.goal_picture is not None and not self._abilities.goal_pictures:
            return "this judge was never shown a picture of the goal in its training; leave out goal_picture"
        return prompts.problem_of(item)

    def _label_directly(self, queries: Sequence[Query]) -> list[Verdict]:
        """Verdicts from the probabilities of the label texts, without generating; temperature has no part in them."""
        start = time.perf_counter()
        chats = [prompts.compare_messages("direct", query) for query in queries]
        log_p = self._model.choice_log_p(chats, prompts.LABEL_TEXTS)  # [B, 3]
        elapsed = time.perf_counter() - start
        verdicts = []
        for row in log_p:
            left, right, tie = _normalised(row)
            choice = int(row.argmax())
            label = _LABELS[choice] if np.exp(row).sum() >= MIN_CHOICE_MASS else None
            verdicts.append(
                Verdict(
                    status=status_of(label),
                    label=label,
                    stamp=self._stamp,
                    probabilities=(left, right, tie),
                    text=prompts.LABEL_TEXTS[choice],
                    latency_s=elapsed,
                )
            )
        return verdicts

    def _label_in_one(self, queries: Sequence[Query]) -> list[Verdict]:
        """Verdicts from one answer that holds the analysis and the label."""
        start = time.perf_counter()
        replies = self._write([prompts.compare_messages("single_stage", query) for query in queries])
        elapsed = time.perf_counter() - start
        return [_verdict(self._stamp, reply.readable, reply.text, elapsed) for reply in replies]

    def _label_in_two(self, queries: Sequence[Query]) -> list[Verdict]:
        """Verdicts from a report on the pictures and a second, text-only question about the report."""
        start = time.perf_counter()
        reports = self._write([prompts.compare_messages("two_stage", query) for query in queries])
        chats = [
            prompts.label_messages(query.goal, report.text.rpartition("</think>")[2])
            for query, report in zip(queries, reports, strict=True)
        ]
        answers = self._write(chats, prompts.LABEL_TEXTS)
        elapsed = time.perf_counter() - start
        return [
            _verdict(self._stamp, answer.readable, f"{report.text}\n\n{answer.text}", elapsed)
            for report, answer in zip(reports, answers, strict=True)
        ]

    def _score_progress(self, clips: Sequence[Clip]) -> list[Score]:
        return self._score_text(clips, prompts.score_messages, parse_score)

    def _score_rating(self, clips: Sequence[Clip]) -> list[Score]:
        return self._score_text(clips, prompts.rating_messages, parse_rating)

    def _score_video(self, clips: Sequence[Clip]) -> list[Score]:
        return self._score_text(clips, prompts.video_messages, parse_video_score)

    def _score_text(
        self, clips: Sequence[Clip], messages: Callable[[Clip], Chat], parse: Callable[[str], float | None]
    ) -> list[Score]:
        """Scores out of what the model writes."""
        start = time.perf_counter()
        replies = self._write([messages(clip) for clip in clips])
        elapsed = time.perf_counter() - start
        values = [parse(reply.readable) for reply in replies]
        return [_score(self._stamp, value, reply.text, elapsed) for value, reply in zip(values, replies, strict=True)]

    def _score_success(self, clips: Sequence[Clip]) -> list[Score]:
        """The share of yes among yes and no, without generating."""
        start = time.perf_counter()
        choices = (*prompts.ANSWERS_YES, *prompts.ANSWERS_NO)
        log_p = self._model.choice_log_p([prompts.success_messages(clip) for clip in clips], choices)  # [B, 6]
        elapsed = time.perf_counter() - start
        scores = []
        for row in log_p:
            p_yes = min(1.0, float(sum(_normalised(row)[: len(prompts.ANSWERS_YES)])))  # sums of shares round up
            is_answer = np.exp(row).sum() >= MIN_CHOICE_MASS
            scores.append(_score(self._stamp, p_yes if is_answer else None, choices[int(row.argmax())], elapsed))
        return scores

    def _write(self, chats: Sequence[Chat], choices: Sequence[str] = ()) -> list[Reply]:
        return self._model.generate(
            chats, max_new_tokens=self._config.max_new_tokens, temperature=self._config.temperature, choices=choices
        )

    def _failed_verdict(self, reason: str) -> Verdict:
        return Verdict(status=Status.FAILED, label=None, stamp=self._stamp, text=reason)

    def _failed_score(self, reason: str) -> Score:
        return Score(status=Status.FAILED, value=None, stamp=self._stamp, text=reason)


def _normalised(log_p: NDArray[np.float64]) -> list[float]:
    """Probabilities [C] that sum to 1, of log-probabilities [C]; equal where none has any."""
    top = log_p.max()
    shares = np.exp(log_p - top) if np.isfinite(top) else np.ones_like(log_p)
    return (shares / shares.sum()).tolist()


def _verdict(stamp: Stamp, readable: str, text: str, latency_s: float) -> Verdict:
    label = parse_label(readable)
    return Verdict(status=status_of(label), label=label, stamp=stamp, text=text, latency_s=latency_s)


def _score(stamp: Stamp, value: float | None, text: str, latency_s: float) -> Score:
    status = Status.INVALID if value is None else Status.OK
    return Score(status=status, value=value, stamp=stamp, text=text, latency_s=latency_s)


def _decoding(config: JudgeConfig, traits: str) -> str:
    """Everything that changes an answer at fixed weights and prompt."""
    text = f"temperature={config.temperature:g} max_new_tokens={config.max_new_tokens}"
    seed = f" top_p={TOP_P:g} seed={config.seed}" if config.temperature > 0 else ""
    return f"{text}{seed} min_pixels={config.min_pixels} max_pixels={config.max_pixels} {traits}"


def _is_out_of_memory(error: Exception) -> bool:
    words = ("out of memory", "allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
