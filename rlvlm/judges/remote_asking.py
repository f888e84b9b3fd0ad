"""Puts dialogues to a model behind somebody's API. Made by `build` for the backends openai and gemini.

What an API adds: questions are under way side by side and fail one by one, answers have a price, and a model may
decline. A refusal and an empty reply are answers that cannot be read (invalid); a provider that blocks a question or
does not answer in time gave none (failed). Neither is ever a tie.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rlvlm.core.errors import JudgeUnavailable, ModelUnavailable, UnsupportedQuestion
from rlvlm.core.steps import Frames
from rlvlm.judges.asking import DialogueOutcome, stamp_of
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.dialogues import Dialogue
from rlvlm.vlms.chats import Chat
from rlvlm.vlms.engines.remote import ApiRequest, Refused, RemoteEngine, TransientError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


class RemoteAsker:
    """Puts dialogues to a model behind somebody's API, many side by side.

    Args:
        engine: who is asked, with patience and a budget.
        config: how it is asked.
        server: where it answers, part of the stamp; empty for the provider's own.
    """

    def __init__(self, engine: RemoteEngine, config: JudgeConfig, server: str = "") -> None:
        self._engine = engine
        self._config = config
        name = f"{config.backend}:{config.model}" + (f"@{server}" if server else "")
        self.stamp = stamp_of(config, name, config.revision)

    def run(self, items: Sequence[Item], dialogue: Callable[[Item], Dialogue]) -> list[DialogueOutcome]:
        """See `asking.Asker`; with its price, where that is known.

        Once the API is known to answer nobody (wrong key, no such model, budget spent) the rest stays unsent.
        """
        fatal: list[ModelUnavailable] = []

        async def ask(item: Item) -> DialogueOutcome:
            async with self._engine.gate:
                if fatal:
                    return DialogueOutcome(failure=str(fatal[0]))
                try:
                    return await self._converse(dialogue(item))
                except ModelUnavailable as error:
                    fatal.append(error)
                    return DialogueOutcome(failure=str(error))
                except (TransientError, Refused) as error:
                    return DialogueOutcome(failure=str(error))

        async def ask_all() -> list[DialogueOutcome]:
            return await asyncio.gather(*map(ask, items))

        asked = self._engine.run(ask_all())
        num_failed = sum(one.parsed is None for one in asked)
        if asked and num_failed == len(asked):
            if fatal:
                raise JudgeUnavailable(str(fatal[0]), fatal[0].fix)
            raise JudgeUnavailable(
                f"the judge's API failed on every one of {len(asked)} questions: {asked[0].failure}",
                "check --judge.api.base-url and the provider's status; slow servers need --judge.api.timeout-s",
            )
        if num_failed:
            logger.warning("%d of %d questions were not answered by the judge's API", num_failed, len(asked))
        return asked

    def write(self, chats: Sequence[Chat], max_new_tokens: int, temperature: float) -> list[str]:
        """See `asking.Asker`; texts have no status, so there is none without all."""
        try:
            replies = self._engine.generate(chats, max_new_tokens=max_new_tokens, temperature=temperature)
            return [reply.text for reply in replies]
        except Refused as error:
            raise UnsupportedQuestion(f"the judge's API refused a chat: {error}", "see docs/judges.md") from None
        except TransientError as error:
            raise JudgeUnavailable(f"the judge's API did not reply: {error}", "try again later") from None
        except ModelUnavailable as error:
            raise JudgeUnavailable(str(error), error.fix) from None

    def shrink(self, frames: Frames) -> Frames:
        """The frames as they are: what a provider makes of them is not known."""
        return frames

    async def _converse(self, dialogue: Dialogue) -> DialogueOutcome:
        """Leads one dialogue; all of it, pauses included, must be over by the deadline."""
        config, start, usage = self._config, time.perf_counter(), None
        deadline = time.monotonic() + config.api.deadline_s
        ask = next(dialogue)
        while True:
            request = ApiRequest(
                chat=ask.chat,
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
                seed=config.seed,
                wants_log_probs=ask.wants_log_probs,
            )
            reply = await self._engine.ask(request, deadline)
            usage = usage + reply.usage if usage and reply.usage else usage or reply.usage
            try:
                ask = dialogue.send(reply)
            except StopIteration as end:
                return DialogueOutcome(parsed=end.value, latency_s=time.perf_counter() - start, usage=usage)
