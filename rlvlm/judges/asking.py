"""Askers put dialogues to a model, in batches or one by one as they come. numpy only."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

from rlvlm.core.errors import JudgeUnavailable, ModelUnavailable, UnsupportedQuestion, is_out_of_memory
from rlvlm.core.judging import Clip, Query, Stamp
from rlvlm.core.steps import Frames
from rlvlm.judges import prompts
from rlvlm.judges.config import Abilities, JudgeConfig
from rlvlm.judges.dialogues import GRADED, Dialogue, DialogueResult
from rlvlm.vlms.chats import TOP_P, AsyncEngine, Chat, ChatEngine, ChatReply, ChatRequest, TransientError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Given = TypeVar("Given")
T = TypeVar("T")
Question = TypeVar("Question", Query, Clip)
TellResult = Callable[[int, DialogueResult], None]
"""Takes the index of an item and its result, in any thread."""


def ask_what_can_be(
    items: Sequence[Question],
    abilities: Abilities,
    ask: Callable[[Sequence[Question], TellResult], Sequence[DialogueResult]],
    tell: TellResult = lambda *_: None,
) -> list[DialogueResult]:
    """Returns the result of each item, in order; items that such a model cannot be asked have failed.

    Args:
        items: what to ask about.
        abilities: those of the model.
        ask: asks the model, and tells its results as they come, by index.
        tell: takes the index of each item and its result as soon as the model gave it.
    """
    problems = [prompts.problem_of(item, abilities) for item in items]
    # one odd clip among a thousand fails alone: an exception would end the run or break its batch
    places = [place for place, problem in enumerate(problems) if problem is None]
    good = [items[place] for place in places]
    in_order = iter(ask(good, lambda index, result: tell(places[index], result)) if good else ())
    return [
        next(in_order) if problem is None else DialogueResult(text=problem, has_failed=True) for problem in problems
    ]


class AdaptiveBatches:
    """Asks a model in batches, and halves the batch size for good when the model runs out of memory.

    Args:
        size: items per batch at the start, >= 1.
        release_memory: releases cached memory.
    """

    def __init__(self, size: int, release_memory: Callable[[], None]) -> None:
        self._size = size
        self._release_memory = release_memory

    def run(
        self,
        items: Sequence[Item],
        ask: Callable[[Sequence[Item]], Sequence[Given]],
        failed: Callable[[str], Given] | None = None,
        tell: Callable[[int, Given], None] = lambda *_: None,
    ) -> list[Given]:
        """Returns the answer of `ask` for each item, in order.

        Args:
            items: items to ask about, any number.
            ask: asks the model about a batch, and returns its answers in order.
            failed: makes the answer for an item on which the model fails; a batch that fails is halved until that item
                is alone. None lets errors through.
            tell: takes each answer, by index, once its batch is done.

        Raises:
            MemoryError: a single item does not fit into memory, and `failed` is None.
        """
        given: list[Given] = []
        # indexed by answers so far and not in steps of a fixed size: the size may have shrunk on the way
        while len(given) < len(items):
            begin = len(given)
            given += self._ask(items[begin : begin + self._size], ask, failed)
            for index in range(begin, len(given)):
                tell(index, given[index])
        return given

    def _ask(
        self,
        batch: Sequence[Item],
        ask: Callable[[Sequence[Item]], Sequence[Given]],
        failed: Callable[[str], Given] | None,
    ) -> list[Given]:
        try:
            return list(ask(batch))
        except (ValueError, RuntimeError, TypeError, IndexError, MemoryError) as error:
            reason = f"{type(error).__name__}: {error}"
            is_too_large = is_out_of_memory(error)
            if failed is None and not is_too_large:
                raise
        # outside `except`, so that the traceback holds no tensors
        if len(batch) == 1:
            if failed is None:
                raise MemoryError(reason)
            logger.warning("the judge failed on a question: %s", reason)
            return [failed(reason)]
        # halves find the one question that breaks the model in log2(batch) steps; the others keep their answers
        half = (len(batch) + 1) // 2
        if is_too_large:  # later batches start smaller
            logger.warning("out of memory with %d questions at once; going on with %d", len(batch), half)
            self._size = half
            self._release_memory()
        return self._ask(batch[:half], ask, failed) + self._ask(batch[half:], ask, failed)


class BatchAsker:
    """Puts dialogues to an engine in this process, `config.batch_size` at once; see `AdaptiveBatches`.

    An item on which the model fails does not affect the rest of its batch.
    """

    def __init__(self, engine: ChatEngine, config: JudgeConfig) -> None:
        self._engine = engine
        self._config = config
        self._batches = AdaptiveBatches(config.batch_size, engine.release_memory)
        self.stamp = _stamp(engine, config)
        self.at_once = 0  # a model in this process is not thread-safe

    def run(
        self, items: Sequence[Item], dialogue: Callable[[Item], Dialogue], tell: TellResult = lambda *_: None
    ) -> list[DialogueResult]:
        """Returns the result of the dialogue about each item, in order; `tell` takes each as soon as it is there.

        Raises:
            JudgeUnavailable: every item failed.
        """
        converse = partial(self._converse, dialogue)
        outcomes = self._batches.run(items, converse, lambda why: DialogueResult(text=why, has_failed=True), tell)
        return _some_answered(outcomes, self._config)

    def write(self, chats: Sequence[Chat], max_new_tokens: int, temperature: float) -> list[str]:
        """Returns the model's reply to each chat, in order.

        Raises:
            UnsupportedQuestion: the model cannot reply to one of the chats.
        """

        def write(batch: Sequence[Chat]) -> list[str]:
            replies = self._engine.generate(batch, max_new_tokens=max_new_tokens, temperature=temperature)
            return [reply.text for reply in replies]

        def failed(reason: str) -> str:  # a text has no status that could mark a failure
            raise _cannot_reply(reason)

        return self._batches.run(chats, write, failed)

    def shrink(self, frames: Frames) -> Frames:
        """Returns the frames [L, H, W, 3] at the size that the model will see, or unchanged if that is not known."""
        shrink = getattr(self._engine, "shrink", None)
        return frames if shrink is None else shrink(frames)

    def _converse(self, dialogue: Callable[[Item], Dialogue], items: Sequence[Item]) -> list[DialogueResult]:
        """Runs the dialogues about a batch of items turn by turn; each turn is one batch for the model."""
        start = time.perf_counter()
        dialogues = [dialogue(item) for item in items]
        requests = {place: next(each) for place, each in enumerate(dialogues)}
        outcomes: dict[int, DialogueResult] = {}
        # dialogues may end at different turns; those that go on share the next batch
        while requests:
            # all dialogues have the same form and ask alike, so the first request holds for all
            chats, first = [request.chat for request in requests.values()], next(iter(requests.values()))
            if first.wants_log_probs:
                rows = self._engine.choice_log_p(chats, first.choices)
                replies = [ChatReply(choice_log_p=row) for row in rows]
            else:
                most, temperature = self._config.max_new_tokens, self._config.temperature
                replies = self._engine.generate(
                    chats, max_new_tokens=most, temperature=temperature, choices=first.choices
                )
            following: dict[int, ChatRequest] = {}
            for place, reply in zip(requests, replies, strict=True):
                try:
                    following[place] = dialogues[place].send(reply)
                except StopIteration as end:
                    outcomes[place] = end.value
            requests = following
        elapsed = time.perf_counter() - start
        return [replace(outcomes[place], latency_s=elapsed) for place in range(len(items))]


class AsyncAsker:
    """Puts dialogues to an engine that takes them as they come: each goes on as soon as its own reply arrives.

    APIs also report prices and may refuse. A refusal or an empty reply is an answer that cannot be read (invalid); a
    question that the provider blocks or does not answer in time has failed. Neither counts as a tie.
    """

    def __init__(self, engine: AsyncEngine, config: JudgeConfig) -> None:
        self._engine = engine
        self._config = config
        # our own engine queues requests itself; a provider limits concurrent requests
        self._gate = asyncio.Semaphore(config.api.concurrency) if config.is_remote else nullcontext()
        self.stamp = _stamp(engine, config)
        # within a budget block after block, so that one that is refused whole says that the budget is spent
        has_budget = config.is_remote and (config.api.max_requests or config.api.max_cost_usd)
        self.at_once = 0 if has_budget else config.max_at_once

    async def ask(self, dialogue: Dialogue) -> DialogueResult:
        """Returns the result of one dialogue, with its price if known; cancelling it stops the engine's work on it.

        Waits for its turn among `api.concurrency`.

        Raises:
            JudgeUnavailable: the engine cannot answer any more: it is dead, the key is wrong, or the budget is spent.
        """
        async with self._gate:
            return await self._ask(dialogue)

    async def _ask(self, dialogue: Dialogue) -> DialogueResult:
        config, start, usage = self._config, time.perf_counter(), None
        # a provider may keep us waiting for ever; our own engine is watched by its server
        deadline = time.monotonic() + config.api.deadline_s if config.is_remote else math.inf
        try:
            request = next(dialogue)
            while True:
                reply = await self._engine.reply(
                    request, max_new_tokens=config.max_new_tokens, temperature=config.temperature, deadline=deadline
                )
                # a dialogue of two turns costs both; a turn without a price leaves the sum as it is
                usage = usage + reply.usage if usage and reply.usage else usage or reply.usage
                request = dialogue.send(reply)
        except StopIteration as end:
            return replace(end.value, latency_s=time.perf_counter() - start, usage=usage)
        except ModelUnavailable as error:
            unavailable = JudgeUnavailable(str(error), error.fix)
            unavailable.is_final = config.is_remote  # a dead engine of ours is replaced
            raise unavailable from error
        except (ValueError, RuntimeError) as error:
            logger.info("the judge failed on a question: %s", error)
            fix = getattr(error, "fix", "")  # a server's refusal says what can be done
            # an outage was waited for, a refusal comes at once
            elapsed = time.perf_counter() - start if isinstance(error, TransientError) else 0.0
            return DialogueResult(text=str(error) or type(error).__name__, has_failed=True, fix=fix, latency_s=elapsed)

    def run(
        self, items: Sequence[Item], dialogue: Callable[[Item], Dialogue], tell: TellResult = lambda *_: None
    ) -> list[DialogueResult]:
        """Returns what `BatchAsker.run` does. After a fatal error the rest is not sent; answers paid for are kept."""
        fatal: list[JudgeUnavailable] = []

        async def ask(index: int, item: Item) -> DialogueResult:
            async with self._gate:
                # a wrong key or a spent budget fails every question alike, so the rest is not sent
                if not fatal:
                    try:
                        result = await self._ask(dialogue(item))
                        tell(index, result)
                        return result
                    except JudgeUnavailable as error:
                        fatal.append(error)
                return DialogueResult(text=str(fatal[0]), has_failed=True)

        asked = self._engine.run(_gather(ask(index, item) for index, item in enumerate(items)))
        # answers paid for before the fatal error are returned; it is an outage only if there are none
        num_failed = sum(result.has_failed for result in asked)
        if fatal and num_failed == len(asked):
            raise fatal[0]
        if num_failed:
            lost = next(result for result in asked if result.has_failed)
            logger.warning("the judge did not answer %d of %d questions: %s", num_failed, len(asked), lost.text)
        return _some_answered(asked, self._config)

    def write(self, chats: Sequence[Chat], max_new_tokens: int, temperature: float) -> list[str]:
        """Returns what `BatchAsker.write` does. Raises JudgeUnavailable for a missing reply: texts have no status."""

        async def write(chat: Chat) -> str:
            return await self.write_one(chat, max_new_tokens, temperature)

        return self._engine.run(_gather(map(write, chats)))

    async def write_one(self, chat: Chat, max_new_tokens: int, temperature: float) -> str:
        """Returns the model's reply; raises as `write` does."""
        try:
            async with self._gate:
                request = ChatRequest(chat=chat)
                reply = await self._engine.reply(request, max_new_tokens=max_new_tokens, temperature=temperature)
        except ModelUnavailable as error:
            raise JudgeUnavailable(str(error), error.fix) from error
        except TransientError as error:
            raise JudgeUnavailable(f"the judge did not reply: {error}", error.fix or "try again later") from None
        except (ValueError, RuntimeError) as error:
            raise _cannot_reply(str(error) or type(error).__name__, getattr(error, "fix", "")) from None
        return reply.text

    def shrink(self, frames: Frames) -> Frames:
        """Returns the frames unchanged: the engine resizes them beside its own work, a provider as it likes."""
        return frames


Asker = BatchAsker | AsyncAsker


async def _gather(work: Iterable[Awaitable[T]]) -> list[T]:
    """Calls `asyncio.gather` where it must run: in the engine's thread, where the event loop runs."""
    return await asyncio.gather(*work)


def _some_answered(asked: list[DialogueResult], config: JudgeConfig) -> list[DialogueResult]:
    """Returns `asked`; raises JudgeUnavailable if all of them failed."""
    if asked and all(result.has_failed for result in asked):
        fix = "run `rlvlm doctor`; with a big model try --judge.quantization nf4"
        if config.is_remote:
            fix = "check --judge.api.base-url and the provider's status; slow servers need --judge.api.timeout-s"
        fix = next((result.fix for result in asked if result.fix), fix)
        raise JudgeUnavailable(f"the judge failed on every one of {len(asked)} questions: {asked[0].text}", fix)
    return asked


def _cannot_reply(reason: str, fix: str = "") -> UnsupportedQuestion:
    return UnsupportedQuestion(f"the judge cannot reply to a chat: {reason}", fix or "see docs/judges.md")


def _stamp(engine: ChatEngine | AsyncEngine, config: JudgeConfig) -> Stamp:
    """Returns a stamp of everything that changes an answer: weights, prompts, and how the reply is decoded."""
    name, revision, traits = f"{config.backend}:{config.model or config.backend}", engine.revision, ""
    if config.is_remote:  # the server's name; its weights are not known
        server = urlsplit(config.api.base_url).netloc
        name, revision = name + (f"@{server}" if server else ""), config.revision
        if config.score in GRADED:
            traits = " shares=first_tokens"  # stored scores without this mark were often 0 or 1, whatever was likely
    else:
        # the processor resizes images within these bounds, so another bound is another image
        traits = f" min_pixels={config.min_pixels} max_pixels={config.max_pixels} {engine.traits}"
        if config.prompt == "two_stage" and not config.runs_elsewhere:
            traits += " label=choice"  # constrained to the labels; stored answers without this mark were free text
    # greedy answers do not depend on the seed, so runs with other seeds may share them
    sampling = f" top_p={TOP_P:g} seed={config.seed}" if config.temperature > 0 else ""
    return Stamp(
        judge=name,
        revision=revision,
        prompt=f"{prompts.version(config.prompt)} {prompts.version(config.score)}{prompts.wording_mark(config)}",
        decoding=f"temperature={config.temperature:g} max_new_tokens={config.max_new_tokens}{sampling}{traits}",
    )
