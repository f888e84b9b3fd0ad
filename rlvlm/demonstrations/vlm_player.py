"""A chat VLM as player of demonstrations: `rlvlm collect TASK --player.model NAME`. Defers heavy imports."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from rlvlm.core.errors import MachineError
from rlvlm.judges.config import check_temperature
from rlvlm.vlms.config import ApiConfig, VLMConfig

if TYPE_CHECKING:  # `rlvlm collect --help` should not wait for numpy and torch
    from rlvlm.core.episodes import Turn
    from rlvlm.demonstrations.collect import PlayerReply
    from rlvlm.envs.env import TurnEnv
    from rlvlm.vlms.chats import Chat, ChatReply


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayerApiConfig(ApiConfig):
    """Settings of a player behind an HTTP API."""

    section: ClassVar[str] = "player.api"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayerConfig(VLMConfig):
    """Settings of a chat VLM that plays in place of the task's script; without a model the script plays."""

    section: ClassVar[str] = "player"

    backend: Literal["transformers", "openai", "gemini"] = "transformers"
    """transformers: loaded here; openai, gemini: over HTTP, any OpenAI-compatible server by player.api.base_url."""
    temperature: float = 0.0
    """Sampling temperature, from 0.01 to 2; 0 is greedy."""
    max_reply_tokens: int = 256
    """Length at which replies are cut, in tokens, >= 1."""
    api: PlayerApiConfig = field(default_factory=PlayerApiConfig)

    def __post_init__(self) -> None:
        VLMConfig.__post_init__(self)
        check_temperature(self.temperature)
        if self.max_reply_tokens < 1:
            raise ValueError(f"player.max_reply_tokens must be >= 1, got {self.max_reply_tokens}")


class VLMPlayer:
    """Asks a chat VLM for the reply to each turn: the image, then the env's prompt.

    Its text is untrusted and stored unchanged. An unreadable reply uses up a turn, as it would for a policy.

    Args:
        config: settings with the model's name.

    Raises:
        ModelUnavailable: it cannot be loaded, or its key is missing.
    """

    def __init__(self, config: PlayerConfig) -> None:
        self.name = "vlm-" + re.sub(r"[^\w.-]+", "-", Path(config.model).name)
        if config.temperature:
            self.name += f"-temperature-{config.temperature:g}"
        self._config = config
        self._write = _local(config) if config.backend == "transformers" else _remote(config)

    def begin(self, seed: int) -> None:
        """Does nothing: each turn is a chat of its own, whatever the seed."""

    def reply(self, env: "TurnEnv", turn: "Turn") -> "PlayerReply":
        """Returns the model's reply.

        Raises:
            ModelUnavailable: it does not answer any more.
            MachineError: it did not answer this turn within the retries, or returned nothing.
        """
        from rlvlm.demonstrations.collect import PlayerReply
        from rlvlm.vlms.chats import image_parts, text_part

        # no earlier turns: a policy learns from replies to one image and one prompt, because it sees no more
        content = [*image_parts(env.draw(turn.snapshot[None])), text_part(turn.prompt)]
        reply = self._write([{"role": "user", "content": content}])
        if not reply.text.strip():  # useless to learn from, and seldom what the model meant
            what, config = f"{self._config.model} wrote nothing at a turn", self._config
            if reply.is_whole:
                raise MachineError(what, "the episodes so far are kept; the same command goes on")
            raise MachineError(
                f"{what}: its reply was cut before it began, after {config.max_reply_tokens} tokens",
                "raise --player.max-reply-tokens; models that think first need thousands",
            )
        return PlayerReply(reply.text)


def _local(config: PlayerConfig) -> "Callable[[Chat], ChatReply]":
    from rlvlm.vlms.engines.transformers import TransformersEngine
    from rlvlm.vlms.loading import load_vlm

    engine = TransformersEngine(load_vlm(config), config)

    def write(chat: "Chat") -> "ChatReply":
        most, temperature = config.max_reply_tokens, config.temperature
        return engine.generate([chat], max_new_tokens=most, temperature=temperature)[0]

    return write


def _remote(config: PlayerConfig) -> "Callable[[Chat], ChatReply]":
    from rlvlm.vlms.chats import ChatRequest, Refused, TransientError
    from rlvlm.vlms.engines.remote import RemoteEngine

    assert config.backend != "transformers"
    engine = RemoteEngine(config.model, config.api, config.backend, config.seed)

    def write(chat: "Chat") -> "ChatReply":
        asked = engine.reply(
            ChatRequest(chat=chat), max_new_tokens=config.max_reply_tokens, temperature=config.temperature
        )
        try:
            return engine.run(asked)
        except (TransientError, Refused) as error:  # an outage is not a reply: nothing is stored for this turn
            what = f"{config.model} did not answer a turn: {error}"
            raise MachineError(what, "the episodes so far are kept; the same command goes on") from error

    return write
