"""A chat VLM behind somebody's API as a judge. `openai` and `gemini` make these judges; numpy only.

It differs from `chat.ChatJudge` in what an API adds: questions are under way side by side and fail one by one, answers
have a price, and a model may decline. A refusal and an empty reply are answers that cannot be read (invalid); a
provider that blocks a question or does not answer in time gave none (failed). Neither is ever a tie.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rlvlm.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.judges import prompts
from rlvlm.judges.backends.odds import label_odds, yes_odds
from rlvlm.judges.backends.remote import Ask, Passing, Refused, RemoteModel, Reply
from rlvlm.judges.chat_model import TOP_P
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.prompts import Chat
from rlvlm.judges.verdicts import parse_label, parse_rating, parse_score, parse_video_score, status_of
from rlvlm.types.judging import Clip, Label, Query, Score, Stamp, Status, Usage, Verdict

logger = logging.getLogger(__name__)

EMPTY = "(an empty reply)"
CUT = "(cut off by judge.max_new_tokens before the reply began; models that think first need thousands)"
REFUSAL = "(refused) "
_LABELS = (Label.LEFT, Label.RIGHT, Label.TIE)

Item = TypeVar("Item", Query, Clip)
Answer = TypeVar("Answer", Verdict, Score)


class RemoteJudge:
    """A remote chat model behind the `Judge` and `Generator` protocols.

    Args:
        config: how it is asked.
        model: who is asked, with patience and a budget.
        server: where it answers, part of the stamp; empty for the provider's own.
    """

    def __init__(self, config: JudgeConfig, model: RemoteModel, server: str = "") -> None:
        self._config = config
        self._model = model
        self._gate = asyncio.Semaphore(config.api.concurrency)
        sampling = f" top_p={TOP_P:g} seed={config.seed}" if config.temperature > 0 else ""
        self._stamp = Stamp(
            judge=f"{config.backend}:{config.model}" + (f"@{server}" if server else ""),
            revision=config.revision,
            prompt=f"{prompts.version(config.prompt)} {prompts.version(config.score)}",
            decoding=f"temperature={config.temperature:g} max_new_tokens={config.max_new_tokens}{sampling}",
        )

    @property
    def stamp(self) -> Stamp:
        """Where the answers come from."""
        return self._stamp

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order, with its price where that is known.

        Raises:
            JudgeUnavailable: nothing was answered: key, model, account or budget are wrong, or every request failed.
        """
        ask = {"direct": self._label_directly, "single_stage": self._label_in_one, "two_stage": self._label_in_two}
        return self._model.run(self._answer_all(queries, ask[self._config.prompt], self._failed_verdict))

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order, with its price where that is known. Raises as `compare` does."""
        ask = {
            "progress": self._score_progress,
            "rating": self._score_rating,
            "success": self._score_success,
            "video": self._score_video,
        }
        return self._model.run(self._answer_all(clips, ask[self._config.score], self._failed_score))

    def generate(self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float) -> list[str]:
        """The model's reply to each chat, in order.

        Raises:
            UnsupportedQuestion: a chat is not in the format of `prompts`, or the server will not answer it.
            JudgeUnavailable: a reply did not come; texts have no status, so there is none without all.
        """
        try:
            checked = [prompts.checked_chat(chat) for chat in chats]
        except ValueError as error:
            raise UnsupportedQuestion(f"the judge cannot read a chat: {error}", "see docs/judges.md") from error

        async def write(chat: Chat) -> str:
            async with self._gate:
                asked = Ask(chat=chat, max_new_tokens=max_new_tokens, temperature=temperature, seed=self._config.seed)
                return (await self._model.ask(asked, self._deadline())).text

        async def write_all() -> list[str]:
            return await asyncio.gather(*map(write, checked))

        try:
            return self._model.run(write_all())
        except Refused as error:
            raise UnsupportedQuestion(f"the judge's API refused a chat: {error}", "see docs/judges.md") from None
        except Passing as error:
            raise JudgeUnavailable(f"the judge's API did not reply: {error}", "try again later") from None

    async def _answer_all(
        self, items: Sequence[Item], ask: Callable[[Item, float], Awaitable[Answer]], failed: Callable[[str], Answer]
    ) -> list[Answer]:
        """An answer to each item. Once the API is known to answer nobody, what was not sent yet stays unsent."""
        fatal: list[JudgeUnavailable] = []

        async def answer(item: Item) -> Answer:
            if problem := prompts.problem_of(item):
                return failed(problem)
            async with self._gate:
                if fatal:
                    return failed(str(fatal[0]))
                try:
                    return await ask(item, self._deadline())
                except JudgeUnavailable as error:
                    fatal.append(error)
                    return failed(str(error))
                except (Passing, Refused) as error:
                    return failed(str(error))

        answers = list(await asyncio.gather(*map(answer, items)))
        put = [answer for answer, item in zip(answers, items, strict=True) if prompts.problem_of(item) is None]
        if put and all(answer.status is Status.FAILED for answer in put):
            raise (
                fatal[0]
                if fatal
                else JudgeUnavailable(
                    f"the judge's API failed on every one of {len(put)} questions: {put[0].text}",
                    "check --judge.api.base-url and the provider's status; slow servers need --judge.api.timeout-s",
                )
            )
        if num_failed := sum(answer.status is Status.FAILED for answer in put):
            logger.warning("%d of %d questions were not answered by the judge's API", num_failed, len(put))
        return answers

    async def _label_directly(self, query: Query, deadline: float) -> Verdict:
        """From the first token's probabilities where the server gives them, else from the text."""
        start = time.perf_counter()
        reply = await self._ask(prompts.compare_messages("direct", query), deadline, wants_odds=True)
        odds = label_odds(reply.first_tokens) if reply.first_tokens and not reply.is_refusal else None
        if odds is None:
            return self._verdict(reply, _text_of(reply), reply.usage, start)
        label = _LABELS[max(range(3), key=odds.__getitem__)]
        return Verdict(
            status=status_of(label),
            label=label,
            stamp=self._stamp,
            probabilities=odds,
            text=reply.text,
            latency_s=time.perf_counter() - start,
            usage=reply.usage,
        )

    async def _label_in_one(self, query: Query, deadline: float) -> Verdict:
        start = time.perf_counter()
        reply = await self._ask(prompts.compare_messages("single_stage", query), deadline)
        return self._verdict(reply, _text_of(reply), reply.usage, start)

    async def _label_in_two(self, query: Query, deadline: float) -> Verdict:
        """A report on the pictures, and a second, text-only question about the report."""
        start = time.perf_counter()
        report = await self._ask(prompts.compare_messages("two_stage", query), deadline)
        if report.is_refusal or not report.text.strip():  # nothing to ask about
            return self._verdict(report, _text_of(report), report.usage, start)
        chat = prompts.label_messages(query.goal, report.text.rpartition("</think>")[2])
        answer = await self._ask(chat, deadline)
        return self._verdict(answer, f"{report.text}\n\n{_text_of(answer)}", _sum(report.usage, answer.usage), start)

    async def _score_progress(self, clip: Clip, deadline: float) -> Score:
        return await self._score_text(prompts.score_messages(clip), parse_score, deadline)

    async def _score_rating(self, clip: Clip, deadline: float) -> Score:
        return await self._score_text(prompts.rating_messages(clip), parse_rating, deadline)

    async def _score_video(self, clip: Clip, deadline: float) -> Score:
        return await self._score_text(prompts.video_messages(clip), parse_video_score, deadline)

    async def _score_text(self, chat: Chat, parse: Callable[[str], float | None], deadline: float) -> Score:
        start = time.perf_counter()
        reply = await self._ask(chat, deadline)
        return self._score(reply, None if reply.is_refusal else parse(reply.readable), start)

    async def _score_success(self, clip: Clip, deadline: float) -> Score:
        """The share of yes among yes and no; without probabilities a plain yes is 1 and a plain no is 0."""
        start = time.perf_counter()
        reply = await self._ask(prompts.success_messages(clip), deadline, wants_odds=True)
        value = None
        if not reply.is_refusal:
            value = yes_odds(reply.first_tokens) if reply.first_tokens else None
            value = {"yes": 1.0, "no": 0.0}.get(reply.readable.strip(" \n.!*").lower()) if value is None else value
        return self._score(reply, value, start)

    async def _ask(self, chat: Chat, deadline: float, *, wants_odds: bool = False) -> Reply:
        config = self._config
        return await self._model.ask(
            Ask(
                chat=chat,
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
                seed=config.seed,
                wants_odds=wants_odds,
            ),
            deadline,
        )

    def _deadline(self) -> float:
        return time.monotonic() + self._config.api.deadline_s

    def _verdict(self, reply: Reply, text: str, usage: Usage | None, start: float) -> Verdict:
        label = None if reply.is_refusal else parse_label(reply.readable)
        return Verdict(
            status=status_of(label),
            label=label,
            stamp=self._stamp,
            text=text,
            latency_s=time.perf_counter() - start,
            usage=usage,
        )

    def _score(self, reply: Reply, value: float | None, start: float) -> Score:
        return Score(
            status=Status.INVALID if value is None else Status.OK,
            value=value,
            stamp=self._stamp,
            text=_text_of(reply),
            latency_s=time.perf_counter() - start,
            usage=reply.usage,
        )

    def _failed_verdict(self, reason: str) -> Verdict:
        return Verdict(status=Status.FAILED, label=None, stamp=self._stamp, text=reason)

    def _failed_score(self, reason: str) -> Score:
        return Score(status=Status.FAILED, value=None, stamp=self._stamp, text=reason)


def _text_of(reply: Reply) -> str:
    """What is kept of a reply; where there is nothing, why."""
    if reply.is_refusal:
        return REFUSAL + reply.text
    return reply.text or (EMPTY if reply.is_whole else CUT)


def _sum(one: Usage | None, other: Usage | None) -> Usage | None:
    if one is None or other is None:
        return one or other
    costs = [usage.cost_usd for usage in (one, other) if usage.cost_usd is not None]
    return Usage(
        tokens_in=one.tokens_in + other.tokens_in,
        tokens_out=one.tokens_out + other.tokens_out,
        cost_usd=sum(costs) if costs else None,
    )
