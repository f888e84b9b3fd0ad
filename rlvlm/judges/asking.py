"""Askers put dialogues to a model: in batches, or as they come. numpy only."""

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
from rlvlm.judges.dialogues import Dialogue, DialogueResult
from rlvlm.vlms.chats import TOP_P, AsyncEngine, Chat, ChatEngine, ChatReply, ChatRequest, TransientError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Given = TypeVar("Given")
T = TypeVar("T")
Question = TypeVar("Question", Query, Clip)


def ask_what_can_be(
    items: Sequence[Question], abilities: Abilities, ask: Callable[[Sequence[Question]], Sequence[DialogueResult]]
) -> list[DialogueResult]:
    """How each item went, in order; those that a model of these abilities cannot be asked about have failed already."""
    problems = [prompts.problem_of(item, abilities) for item in items]
    # an odd clip among a thousand costs its own answer: raised, it would end the run or break its batch
    good = [item for item, problem in zip(items, problems, strict=True) if problem is None]
    in_order = iter(ask(good) if good else ())
    return [
        next(in_order) if problem is None else DialogueResult(text=problem, has_failed=True) for problem in problems
    ]


class AdaptiveBatches:
    """Asks a model in batches, which become smaller where its memory runs out, and stay so.

    Args:
        size: items per batch at first, >= 1.
        release_memory: gives unused memory back.
    """

    def __init__(self, size: int, release_memory: Callable[[], None]) -> None:
        self._size = size
        self._release_memory = release_memory

    def run(
        self,
        items: Sequence[Item],
        ask: Callable[[Sequence[Item]], Sequence[Given]],
        failed: Callable[[str], Given] | None = None,
    ) -> list[Given]:
        """What `ask` gives for each item, in order.

        Args:
            items: any number.
            ask: puts a batch to the model.
            failed: what stands for an item on which the model breaks by itself; a batch that breaks is halved until
                that one is alone. None lets errors through.

        Raises:
            MemoryError: one item alone is too much, and nothing stands for it.
        """
        given: list[Given] = []
        # by what is given so far and not by steps of a fixed size: the size may have shrunk on the way
        while len(given) < len(items):
            given += self._ask(items[len(given) : len(given) + self._size], ask, failed)
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
        # halves find the one question that breaks the model in log2(batch) steps; the others keep their
        # answers
        half = (len(batch) + 1) // 2
        if is_too_large:  # later batches start smaller
            logger.warning("out of memory with %d questions at once; going on with %d", len(batch), half)
            self._size = half
            self._release_memory()
        return self._ask(batch[:half], ask, failed) + self._ask(batch[half:], ask, failed)


class BatchAsker:
    """Puts dialogues to an engine of this process, as many at once as the config says, see `AdaptiveBatches`.

    An item on which the model breaks fails alone and leaves the rest of its batch alone.
    """

    def __init__(self, engine: ChatEngine, config: JudgeConfig) -> None:
        self._engine = engine
        self._config = config
        self._batches = AdaptiveBatches(config.batch_size, engine.release_memory)
        self.stamp = _stamp(engine, config)

    def run(self, items: Sequence[Item], dialogue: Callable[[Item], Dialogue]) -> list[DialogueResult]:
        """How the dialogue about each item went, in order.

        Raises:
            JudgeUnavailable: not one of them was answered.
        """
        converse = partial(self._converse, dialogue)
        outcomes = self._batches.run(items, converse, lambda reason: DialogueResult(text=reason, has_failed=True))
        return _some_answered(outcomes, self._config)

    def write(self, chats: Sequence[Chat], max_new_tokens: int, temperature: float) -> list[str]:
        """The model's reply to each chat, in order.

        Raises:
            UnsupportedQuestion: one of them cannot be replied to.
        """

        def write(batch: Sequence[Chat]) -> list[str]:
            replies = self._engine.generate(batch, max_new_tokens=max_new_tokens, temperature=temperature)
            return [reply.text for reply in replies]

        def failed(reason: str) -> str:  # a text has no status that could say so
            raise _cannot_reply(reason)

        return self._batches.run(chats, write, failed)

    def shrink(self, frames: Frames) -> Frames:
        """The frames [L, H, W, 3] at the size at which the model will see them, where that is known."""
        shrink = getattr(self._engine, "shrink", None)
        return frames if shrink is None else shrink(frames)

    def _converse(self, dialogue: Callable[[Item], Dialogue], items: Sequence[Item]) -> list[DialogueResult]:
        """Leads the dialogues about a batch of items, turn by turn: each turn is one batch for the model."""
        start = time.perf_counter()
        dialogues = [dialogue(item) for item in items]
        requests = {place: next(each) for place, each in enumerate(dialogues)}
        outcomes: dict[int, DialogueResult] = {}
        # dialogues may end at different turns; those that go on share the next batch
        while requests:
            # dialogues of one form ask alike, so the first speaks for all
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
    """Puts dialogues to an engine that takes them as they come: each goes on as soon as its own reply is there.

    What an API adds: answers have a price, and a model may decline. A refusal and an empty reply are answers that
    cannot be read (invalid); a provider that blocks a question or does not answer in time gave none (failed). Neither
    is ever a tie.
    """

    def __init__(self, engine: AsyncEngine, config: JudgeConfig) -> None:
        self._engine = engine
        self._config = config
        # an engine of our own queues by itself; somebody's API has a limit on what is under way
        self._gate = asyncio.Semaphore(config.api.concurrency) if config.is_remote else nullcontext()
        self.stamp = _stamp(engine, config)

    async def ask(self, dialogue: Dialogue) -> DialogueResult:
        """How one dialogue went, with its price where that is known; cancelled, the engine computes no further.

        Raises:
            JudgeUnavailable: the engine will not answer: it is dead, or has a wrong key, or the budget is spent.
        """
        config, start, usage = self._config, time.perf_counter(), None
        # a provider may have us wait for ever; an engine of our own is watched by its server
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
            raise JudgeUnavailable(str(error), error.fix) from error
        except (ValueError, RuntimeError) as error:
            logger.info("the judge failed on a question: %s", error)
            return DialogueResult(text=str(error) or type(error).__name__, has_failed=True)

    def run(self, items: Sequence[Item], dialogue: Callable[[Item], Dialogue]) -> list[DialogueResult]:
        """As of `BatchAsker`. Once no question is answered any more the rest stays unsent; paid answers are kept."""
        fatal: list[JudgeUnavailable] = []

        async def ask(item: Item) -> DialogueResult:
            async with self._gate:
                # a wrong key or a spent budget meets every question alike: the rest is not sent
                if not fatal:
                    try:
                        return await self.ask(dialogue(item))
                    except JudgeUnavailable as error:
                        fatal.append(error)
                return DialogueResult(text=str(fatal[0]), has_failed=True)

        asked = self._engine.run(_gather(map(ask, items)))
        # answers that were paid for before the end are given out; only where there are none is it an outage
        num_failed = sum(result.has_failed for result in asked)
        if fatal and num_failed == len(asked):
            raise fatal[0]
        if num_failed:
            logger.warning("the judge did not answer %d of %d questions", num_failed, len(asked))
        return _some_answered(asked, self._config)

    def write(self, chats: Sequence[Chat], max_new_tokens: int, temperature: float) -> list[str]:
        """As of `BatchAsker`; JudgeUnavailable where one does not come: texts have no status."""

        async def write(chat: Chat) -> str:
            async with self._gate:
                return await self.write_one(chat, max_new_tokens, temperature)

        return self._engine.run(_gather(map(write, chats)))

    async def write_one(self, chat: Chat, max_new_tokens: int, temperature: float) -> str:
        """The model's reply; raises as `write` does."""
        try:
            request = ChatRequest(chat=chat)
            reply = await self._engine.reply(request, max_new_tokens=max_new_tokens, temperature=temperature)
        except ModelUnavailable as error:
            raise JudgeUnavailable(str(error), error.fix) from error
        except TransientError as error:
            raise JudgeUnavailable(f"the judge did not reply: {error}", "try again later") from None
        except (ValueError, RuntimeError) as error:
            raise _cannot_reply(str(error) or type(error).__name__) from None
        return reply.text

    def shrink(self, frames: Frames) -> Frames:
        """The frames as they are: the engine resizes them beside its own work, or a provider as it likes."""
        return frames


Asker = BatchAsker | AsyncAsker


async def _gather(work: Iterable[Awaitable[T]]) -> list[T]:
    """`asyncio.gather`, which must be called where the event loop runs: in the engine's thread."""
    return await asyncio.gather(*work)


def _some_answered(asked: list[DialogueResult], config: JudgeConfig) -> list[DialogueResult]:
    """The same, once it is known that not all of them failed."""
    if asked and all(result.has_failed for result in asked):
        fix = "run `rlvlm doctor`; with a big model try --judge.quantization nf4"
        if config.is_remote:
            fix = "check --judge.api.base-url and the provider's status; slow servers need --judge.api.timeout-s"
        raise JudgeUnavailable(f"the judge failed on every one of {len(asked)} questions: {asked[0].text}", fix)
    return asked


def _cannot_reply(reason: str) -> UnsupportedQuestion:
    return UnsupportedQuestion(f"the judge cannot reply to a chat: {reason}", "see docs/judges.md")


def _stamp(engine: ChatEngine | AsyncEngine, config: JudgeConfig) -> Stamp:
    """Everything that changes an answer: weights, prompts, and how the reply is decoded."""
    name, revision, traits = f"{config.backend}:{config.model or config.backend}", engine.revision, ""
    if config.is_remote:  # where it answers; what the server's weights are is not known
        server = urlsplit(config.api.base_url).netloc
        name, revision = name + (f"@{server}" if server else ""), config.revision
    else:
        # the processor resizes images within these bounds, so another bound is another image
        traits = f" min_pixels={config.min_pixels} max_pixels={config.max_pixels} {engine.traits}"
        if config.prompt == "two_stage" and not config.runs_elsewhere:
            traits += " label=choice"  # held to the labels; answers from before that were free text
    # greedy answers do not depend on the seed: two runs of other seeds may share them
    sampling = f" top_p={TOP_P:g} seed={config.seed}" if config.temperature > 0 else ""
    return Stamp(
        judge=name,
        revision=revision,
        prompt=f"{prompts.version(config.prompt)} {prompts.version(config.score)}{prompts.wording_mark(config)}",
        decoding=f"temperature={config.temperature:g} max_new_tokens={config.max_new_tokens}{sampling}{traits}",
    )
