"""Who puts dialogues to a model, and the two for models on this machine: in batches, and as they come. numpy only."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from rlvlm.core.errors import JudgeUnavailable, ModelUnavailable, UnsupportedQuestion
from rlvlm.core.judging import Stamp, Usage
from rlvlm.core.steps import Frames
from rlvlm.judges import prompts
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.dialogues import ChoiceLogProbs, Dialogue, ModelRequest, ParsedReply
from rlvlm.vlms.chats import TOP_P, Chat, ContinuousEngine, Engine, Reply

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Given = TypeVar("Given")


@dataclass(frozen=True, kw_only=True, slots=True)
class DialogueOutcome:
    """How one question went."""

    parsed: ParsedReply | None = None
    """None where no answer came."""
    failure: str = ""
    """Why it did not."""
    latency_s: float = 0.0
    """Until it was there; in a batch, until all of the batch were."""
    usage: Usage | None = None


class Asker(Protocol):
    """A model that dialogues can be put to."""

    @property
    def stamp(self) -> Stamp:
        """Where the answers come from."""
        ...

    def run(self, items: Sequence[Item], dialogue: Callable[[Item], Dialogue]) -> list[DialogueOutcome]:
        """How the dialogue about each item went, in order.

        Raises:
            JudgeUnavailable: not one of them was answered.
        """
        ...

    def write(self, chats: Sequence[Chat], max_new_tokens: int, temperature: float) -> list[str]:
        """The model's reply to each chat, in order.

        Raises:
            UnsupportedQuestion: one of them cannot be replied to.
            JudgeUnavailable: the model does not reply at all.
        """
        ...

    def shrink(self, frames: Frames) -> Frames:
        """The frames [L, H, W, 3] at the size at which the model will see them, where that is known."""
        ...


class BatchAsker:
    """Puts dialogues to an engine of this process, as many at once as the config says.

    An item on which the model breaks fails alone and leaves the rest of its batch alone; where memory runs out the
    batch is halved and asked again.
    """

    def __init__(self, engine: Engine, config: JudgeConfig) -> None:
        self._engine = engine
        self._config = config
        self._batch_size = config.batch_size
        self.stamp = _local_stamp(engine, config)

    def run(self, items: Sequence[Item], dialogue: Callable[[Item], Dialogue]) -> list[DialogueOutcome]:
        """See `Asker`."""
        converse = partial(self._converse, dialogue)
        return _some_answered(self._in_batches(items, converse, lambda reason: DialogueOutcome(failure=reason)))

    def write(self, chats: Sequence[Chat], max_new_tokens: int, temperature: float) -> list[str]:
        """See `Asker`."""

        def write(batch: Sequence[Chat]) -> list[str]:
            replies = self._engine.generate(batch, max_new_tokens=max_new_tokens, temperature=temperature)
            return [reply.text for reply in replies]

        def failed(reason: str) -> str:
            raise _cannot_reply(reason)

        return self._in_batches(chats, write, failed)

    def shrink(self, frames: Frames) -> Frames:
        """See `Asker`."""
        shrink = getattr(self._engine, "shrink", None)
        return frames if shrink is None else shrink(frames)

    def _converse(self, dialogue: Callable[[Item], Dialogue], items: Sequence[Item]) -> list[DialogueOutcome]:
        """Leads the dialogues about a batch of items, turn by turn: each turn is one batch for the model."""
        start = time.perf_counter()
        dialogues = [dialogue(item) for item in items]
        requests = {place: next(each) for place, each in enumerate(dialogues)}
        parsed: dict[int, ParsedReply] = {}
        while requests:
            following: dict[int, ModelRequest] = {}
            for place, reply in zip(requests, self._replies(list(requests.values())), strict=True):
                try:
                    following[place] = dialogues[place].send(reply)
                except StopIteration as end:
                    parsed[place] = end.value
            requests = following
        elapsed = time.perf_counter() - start
        return [DialogueOutcome(parsed=parsed[place], latency_s=elapsed) for place in range(len(items))]

    def _replies(self, requests: Sequence[ModelRequest]) -> Sequence[Reply | ChoiceLogProbs]:
        """The replies to one turn of a batch; dialogues of one form ask alike, so the first speaks for all."""
        chats, choices = [request.chat for request in requests], requests[0].choices
        if requests[0].wants_log_probs:
            return [ChoiceLogProbs(log_p=row) for row in self._engine.choice_log_p(chats, choices)]
        config = self._config
        return self._engine.generate(
            chats, max_new_tokens=config.max_new_tokens, temperature=config.temperature, choices=choices
        )

    def _in_batches(
        self, items: Sequence[Item], ask: Callable[[Sequence[Item]], list[Given]], failed: Callable[[str], Given]
    ) -> list[Given]:
        given: list[Given] = []
        while len(given) < len(items):
            given += self._ask(items[len(given) : len(given) + self._batch_size], ask, failed)
        return given

    def _ask(
        self, batch: Sequence[Item], ask: Callable[[Sequence[Item]], list[Given]], failed: Callable[[str], Given]
    ) -> list[Given]:
        """What one batch gives; one that breaks is halved until the item to blame is alone."""
        try:
            return ask(batch)
        except (ValueError, RuntimeError, TypeError, IndexError, MemoryError) as error:
            reason = f"{type(error).__name__}: {error}"
            words = ("out of memory", "allocate memory", "not enough memory")
            is_too_large = isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
        if len(batch) == 1:
            logger.warning("the judge failed on a question: %s", reason)
            return [failed(reason)]
        half = (len(batch) + 1) // 2
        if is_too_large:  # later batches start smaller; outside `except`, so that the traceback holds no tensors
            logger.warning("out of memory with %d questions at once; going on with %d", len(batch), half)
            self._batch_size = half
            self._engine.release_memory()
        return self._ask(batch[:half], ask, failed) + self._ask(batch[half:], ask, failed)


class ContinuousAsker:
    """Puts dialogues to an engine that takes them as they come: each goes on as soon as its own reply is there.

    Args:
        engine: batches by itself.
        config: how it is asked.
    """

    def __init__(self, engine: ContinuousEngine, config: JudgeConfig) -> None:
        self._engine = engine
        self._config = config
        self.stamp = _local_stamp(engine, config)

    async def ask(self, dialogue: Dialogue) -> DialogueOutcome:
        """How one dialogue went; cancelled, the engine computes no further.

        Raises:
            JudgeUnavailable: the engine is dead.
        """
        config, start = self._config, time.perf_counter()
        try:
            ask = next(dialogue)
            while True:
                reply: Reply | ChoiceLogProbs
                if ask.wants_log_probs:
                    reply = ChoiceLogProbs(log_p=await self._engine.choice_log_p(ask.chat, ask.choices))
                else:
                    reply = await self._engine.reply(
                        ask.chat,
                        max_new_tokens=config.max_new_tokens,
                        temperature=config.temperature,
                        choices=ask.choices,
                    )
                ask = dialogue.send(reply)
        except StopIteration as end:
            return DialogueOutcome(parsed=end.value, latency_s=time.perf_counter() - start)
        except ModelUnavailable as error:
            raise JudgeUnavailable(str(error), error.fix) from error
        except (ValueError, RuntimeError) as error:
            logger.warning("the judge failed on a question: %s", error)
            return DialogueOutcome(failure=f"{type(error).__name__}: {error}")

    def run(self, items: Sequence[Item], dialogue: Callable[[Item], Dialogue]) -> list[DialogueOutcome]:
        """See `Asker`."""

        async def ask_all() -> list[DialogueOutcome]:
            return await asyncio.gather(*(self.ask(dialogue(item)) for item in items))

        return _some_answered(self._engine.run(ask_all()))

    def write(self, chats: Sequence[Chat], max_new_tokens: int, temperature: float) -> list[str]:
        """See `Asker`."""

        async def write_all() -> list[str]:
            return await asyncio.gather(*(self.write_one(chat, max_new_tokens, temperature) for chat in chats))

        return self._engine.run(write_all())

    async def write_one(self, chat: Chat, max_new_tokens: int, temperature: float) -> str:
        """The model's reply; raises as `write` does."""
        try:
            reply = await self._engine.reply(chat, max_new_tokens=max_new_tokens, temperature=temperature)
        except ModelUnavailable as error:
            raise JudgeUnavailable(str(error), error.fix) from error
        except (ValueError, RuntimeError) as error:
            raise _cannot_reply(f"{type(error).__name__}: {error}") from error
        return reply.text

    def shrink(self, frames: Frames) -> Frames:
        """The frames as they are: the engine resizes them beside its own work."""
        return frames


def _some_answered(asked: list[DialogueOutcome]) -> list[DialogueOutcome]:
    """The same, once it is known that not all of them failed."""
    if asked and all(one.parsed is None for one in asked):
        raise JudgeUnavailable(
            f"the judge failed on every one of {len(asked)} questions: {asked[0].failure}",
            "run `rlvlm doctor`; with a big model try --judge.quantization nf4",
        )
    return asked


def _cannot_reply(reason: str) -> UnsupportedQuestion:
    return UnsupportedQuestion(f"the judge cannot reply to a chat: {reason}", "see docs/judges.md")


def _local_stamp(engine: Engine | ContinuousEngine, config: JudgeConfig) -> Stamp:
    """Of a model on this machine."""
    bounds = f"min_pixels={config.min_pixels} max_pixels={config.max_pixels}"
    name = f"{config.backend}:{config.model or config.backend}"
    return stamp_of(config, name, engine.revision, f" {bounds} {engine.traits}")


def stamp_of(config: JudgeConfig, judge: str, revision: str, traits: str = "") -> Stamp:
    """Everything that changes an answer: weights, prompts, and how the reply is decoded."""
    sampling = f" top_p={TOP_P:g} seed={config.seed}" if config.temperature > 0 else ""
    return Stamp(
        judge=judge,
        revision=revision,
        prompt=f"{prompts.version(config.prompt)} {prompts.version(config.score)}{prompts.wording_mark(config)}",
        decoding=f"temperature={config.temperature:g} max_new_tokens={config.max_new_tokens}{sampling}{traits}",
    )
