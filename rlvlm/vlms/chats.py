"""Chats with images, what a model replies, and what an engine offers to its callers. numpy only.

A chat is a list of turns in the Qwen format: `{"role": str, "content": [{"type": "text" | "image", ...}]}`.
"""

import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.judging import Usage

Message = dict[str, Any]
"""One turn."""
Chat = list[Message]
Pixels = NDArray[np.uint8]
"""[H, W, 3]."""
T = TypeVar("T")

TOP_P = 0.9
"""Nucleus of sampling (top-p), where the temperature is above 0."""
_ROLES = ("system", "user", "assistant")
_THINK, _THOUGHT_OVER = "<think>", "\n</think>\n\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A question to a model."""

    chat: Chat
    choices: tuple[str, ...] = ()
    """The only texts that the reply may be, for engines that can hold it to them."""
    wants_log_probs: bool = False
    """Whether the probabilities of the choices are wanted in the place of a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """A model's reply, or the probability of each choice."""

    text: str = ""
    is_whole: bool = True
    """Whether it came to its end; false where the token limit tore it."""
    is_refusal: bool = False
    """Whether the model said that it would not answer."""
    choice_log_p: NDArray[np.float64] | None = None
    """[C] log-probability of each of `ChatRequest.choices`, from engines that know it; then there is no text."""
    first_tokens: tuple[tuple[str, float], ...] | None = None
    """The likeliest first tokens of the answer, each with its probability, from servers that give them."""
    is_sampled: bool = False
    """Whether the text was drawn at a temperature above 0, and so need not be the likeliest."""
    usage: Usage | None = None

    @property
    def readable(self) -> str:
        """The text without its last line where that is torn: a cut `10` would read as 1."""
        return self.text if self.is_whole else self.text.rpartition("\n")[0]


class TransientError(RuntimeError):
    """A try failed and the next one may not.

    Args:
        reason: untrusted words of a server, or ours.
        retry_after_s: how long the server wants to be left alone; None when it does not say.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Refused(ValueError):  # noqa: N818 - named for what was done
    """This question will not be answered, however often it is asked."""


class ChatEngine(Protocol):
    """A library that runs a model on batches of chats; the member is `engines.transformers`."""

    @property
    def revision(self) -> str:
        """Commit or digest of the weights; empty when unknown."""
        ...

    @property
    def traits(self) -> str:
        """Whatever else changes its answers at fixed weights, e.g. `dtype=float32 quantization=none`."""
        ...

    def generate(
        self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float, choices: Sequence[str] = ()
    ) -> list[ChatReply]:
        """One reply per chat, greedy at temperature 0; of `choices` alone, where there are some."""
        ...

    def choice_log_p(self, chats: Sequence[Chat], choices: Sequence[str]) -> NDArray[np.float64]:
        """[B, C] log-probability that the reply to each chat begins with each choice's whole text."""
        ...

    def release_memory(self) -> None:
        """Gives unused memory back, after it ran out."""
        ...


class AsyncEngine(Protocol):
    """A model that takes chats as they come; members are `engines.vllm` and `engines.remote`."""

    @property
    def revision(self) -> str:
        """Commit or digest of the weights; empty when unknown."""
        ...

    @property
    def traits(self) -> str:
        """Whatever else changes its answers at fixed weights."""
        ...

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of `work`; for callers without an event loop."""
        ...

    async def reply(
        self, request: ChatRequest, *, max_new_tokens: int, temperature: float, deadline: float = math.inf
    ) -> ChatReply:
        """The reply, greedy at temperature 0; cancelled, it is computed no further.

        Args:
            request: the question.
            max_new_tokens: longest reply.
            temperature: 0 or above.
            deadline: `time.monotonic` by which it must be there, for engines that have to wait for a server.

        Raises:
            ValueError: this chat cannot be answered, however often it is asked.
            RuntimeError: it failed on this chat alone.
            ModelUnavailable: it will not answer any.
        """
        ...


def text_part(text: str) -> dict[str, Any]:
    """A part of a turn that is words."""
    return {"type": "text", "text": text}


def image_parts(frames: Sequence[Pixels] | NDArray[np.uint8]) -> list[dict[str, Any]]:
    """Parts of a turn that are images, one per frame [H, W, 3]."""
    return [{"type": "image", "image": frame} for frame in frames]


def images_of(chat: Chat) -> list[Pixels]:
    """Every image of the chat, in the order in which the processor will meet them."""
    return [part["image"] for turn in chat for part in turn["content"] if part["type"] == "image"]


def tame(text: str) -> str:
    """The text without marks that a chat template gives a meaning."""
    # every family's special tokens begin and end so; with a space between they are plain text
    return text.replace("<|", "< ").replace("|>", " >")


def checked_chat(chat: Any) -> Chat:
    """A chat from outside, once it is in the format of this file; texts freed of marks that could end a turn.

    Args:
        chat: turns `{"role", "content"}`; a content is a text or a list of parts, of type text or image.

    Raises:
        ValueError: says which turn breaks which rule.
    """
    if not isinstance(chat, list) or not chat:
        raise ValueError("a chat is a list of at least one turn")
    checked: Chat = []
    for number, turn in enumerate(chat, start=1):
        if not isinstance(turn, dict) or turn.get("role") not in _ROLES or set(turn) != {"role", "content"}:
            raise ValueError(f"turn {number} needs a role, one of {', '.join(_ROLES)}, and a content, and nothing else")
        content = turn["content"]
        parts = [text_part(content)] if isinstance(content, str) else content
        if not isinstance(parts, list) or not parts:
            raise ValueError(f"the content of turn {number} is a text or a list of parts, got {type(content).__name__}")
        checked.append({"role": turn["role"], "content": [_checked_part(part, number) for part in parts]})
    return checked


def _checked_part(part: Any, number: int) -> dict[str, Any]:
    # made anew and not passed on: a template may give a meaning to whatever else a part holds
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return text_part(tame(part["text"]))
    image = part.get("image") if kind == "image" else None
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3:
        if image.shape[-1] == 3 and image.size > 0:
            return {"type": "image", "image": image}
    raise ValueError(f"a part of turn {number} is neither a text nor an image [H, W, 3] of uint8")


def without_thought(chat: str) -> str:
    """A rendered chat, closed where its template lets the answer begin inside a thought: the answer comes next."""
    return chat + _THOUGHT_OVER if chat.rstrip().endswith(_THINK) else chat


def whole_answer(chat: str, answer: str) -> str:
    """The reply behind the rendered `chat`, with the mark of a thought that the template had already opened."""
    return _THINK + answer if chat.rstrip().endswith(_THINK) else answer
