"""Chats with images, the replies of models, and the interface of engines. numpy only.

A chat is a list of turns in the Qwen format: `{"role": str, "content": [{"type": "text" | "image", ...}]}`.
"""

import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.judging import Usage

Message = dict[str, Any]
"""One turn of a chat."""
Chat = list[Message]
Pixels = NDArray[np.uint8]
"""[H, W, 3] image."""
T = TypeVar("T")

TOP_P = 0.9
"""Nucleus of sampling (top-p) at temperatures above 0."""
RAW = "raw"
"""Role of the only turn of a chat that is put to the model without its chat template."""
_BETWEEN = "between"
_ROLES = ("system", "user", "assistant")
_THINK, _THOUGHT_OVER = "<think>", "\n</think>\n\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A question to a model."""

    chat: Chat
    choices: tuple[str, ...] = ()
    """The only texts allowed as the reply, for engines that can enforce it."""
    wants_log_probs: bool = False
    """Whether the probabilities of the choices are wanted instead of a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """A model's reply, or the probability of each choice."""

    text: str = ""
    is_whole: bool = True
    """Whether the reply ended by itself; False if the token limit cut it."""
    is_refusal: bool = False
    """Whether the model refused to answer."""
    choice_log_p: NDArray[np.float64] | None = None
    """[C] log-probability of each of `ChatRequest.choices`, from engines that know it; then there is no text."""
    first_tokens: tuple[tuple[str, float], ...] | None = None
    """Most likely first tokens of the answer, each with its probability, from servers that return them."""
    is_sampled: bool = False
    """Whether the text was sampled at a temperature above 0, and so need not be the most likely one."""
    usage: Usage | None = None

    @property
    def readable(self) -> str:
        """The text without its last line if that was cut: a cut `10` would read as 1."""
        return self.text if self.is_whole else self.text.rpartition("\n")[0]


class TransientError(RuntimeError):
    """A try failed, but the next one may succeed.

    Args:
        reason: untrusted text of a server, or our own.
        retry_after_s: pause that the server asks for, seconds; None if it does not say.
        fix: what the user can do if every try fails so.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None, fix: str = "") -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.fix = fix


class Refused(ValueError):  # noqa: N818 - named for what was done
    """The question will not be answered, however often it is asked; `fix` is what the user can do, if known."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.fix = fix


class ChatEngine(Protocol):
    """A library that runs a model on batches of chats; implemented by `engines.transformers`."""

    @property
    def revision(self) -> str:
        """Commit or digest of the weights; empty if unknown."""
        ...

    @property
    def traits(self) -> str:
        """Further facts that change its answers at fixed weights, e.g. `dtype=float32 quantization=none`."""
        ...

    def generate(
        self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float, choices: Sequence[str] = ()
    ) -> list[ChatReply]:
        """Returns one reply per chat, greedy at temperature 0; restricted to `choices` if there are any."""
        ...

    def choice_log_p(self, chats: Sequence[Chat], choices: Sequence[str]) -> NDArray[np.float64]:
        """Returns [B, C] log-probability that the reply to each chat begins with each choice's whole text."""
        ...

    def release_memory(self) -> None:
        """Returns unused memory, after it ran out."""
        ...


class AsyncEngine(Protocol):
    """A model that takes chats as they come; implemented by `engines.vllm` and `engines.remote`."""

    @property
    def revision(self) -> str:
        """Commit or digest of the weights; empty if unknown."""
        ...

    @property
    def traits(self) -> str:
        """Further facts that change its answers at fixed weights."""
        ...

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` and returns its result; for callers without an event loop."""
        ...

    async def reply(
        self, request: ChatRequest, *, max_new_tokens: int, temperature: float, deadline: float = math.inf
    ) -> ChatReply:
        """Returns the reply, greedy at temperature 0; if cancelled, its computation stops.

        Args:
            request: the question.
            max_new_tokens: maximum length of the reply.
            temperature: 0 or above.
            deadline: `time.monotonic` at which the reply must be there, for engines that wait for a server.

        Raises:
            ValueError: this chat cannot be answered, however often it is asked.
            RuntimeError: it failed on this chat only.
            ModelUnavailable: it will not answer any chat.
        """
        ...


def text_part(text: str) -> dict[str, Any]:
    """Returns a text part of a turn."""
    return {"type": "text", "text": text}


def image_parts(frames: Sequence[Pixels] | NDArray[np.uint8]) -> list[dict[str, Any]]:
    """Returns image parts of a turn, one per frame [H, W, 3]."""
    return [{"type": "image", "image": frame} for frame in frames]


def images_of(chat: Chat) -> list[Pixels]:
    """Returns every image of the chat, in the processor's order."""
    return [part["image"] for turn in chat for part in turn["content"] if part["type"] == "image"]


def tame(text: str) -> str:
    """Returns the text without marks that have a meaning in a chat template."""
    # every family's special tokens begin and end like this; with a space between they are plain text
    return text.replace("<|", "< ").replace("|>", " >")


def checked_chat(chat: Any) -> Chat:
    """Validates a chat from outside and removes marks from its texts that could end a turn.

    Args:
        chat: turns `{"role", "content"}`; a content is a text or a list of parts, of type text or image.

    Raises:
        ValueError: a turn breaks a rule; the message says which.
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
    # rebuilt rather than passed on: a template may interpret further keys of a part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return text_part(tame(part["text"]))
    image = part.get("image") if kind == "image" else None
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3:
        if image.shape[-1] == 3 and image.size > 0:
            return {"type": "image", "image": image}
    raise ValueError(f"a part of turn {number} is neither a text nor an image [H, W, 3] of uint8")


def rendered(chat: Chat, template: Callable[[Chat], str]) -> str:
    """Returns the text of a chat, at whose end the model goes on: by its template, or of a `RAW` turn as it stands.

    Args:
        chat: turns, or one `RAW` turn.
        template: renders turns, and opens the model's.

    Raises:
        ValueError: the template does not say how an image is marked.
    """
    if chat[0]["role"] != RAW:
        return template(chat)
    # what the template writes for an image between two texts
    around = template([{"role": "user", "content": [text_part(_BETWEEN), {"type": "image"}, text_part(_BETWEEN)]}])
    mark = around.partition(_BETWEEN)[2].rpartition(_BETWEEN)[0].strip()
    if not mark:
        raise ValueError("this model's chat template puts images elsewhere, so it cannot be asked without the template")
    return "".join(part["text"] if part["type"] == "text" else mark for part in chat[0]["content"])


def without_thought(chat: str) -> str:
    """Returns a rendered chat with its thought closed, if the template opens one, so that the answer comes next."""
    return chat + _THOUGHT_OVER if chat.rstrip().endswith(_THINK) else chat


def whole_answer(chat: str, answer: str) -> str:
    """Returns the reply to the rendered `chat`, with the mark of a thought that the template had already opened."""
    return _THINK + answer if chat.rstrip().endswith(_THINK) else answer
