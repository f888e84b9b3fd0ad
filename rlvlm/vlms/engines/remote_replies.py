"""Parsing of chat completions, all of it untrusted: replies, first tokens, errors and pauses."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from email.utils import mktime_tz, parsedate_tz
from http import HTTPStatus
from typing import Any

from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.judging import Usage
from rlvlm.vlms.chats import ChatReply, Refused, TransientError

_PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
# finish reasons of a complete reply, in OpenAI's API and its copies; any other reason is an error or a refusal
_WHOLE = ("stop", "stop_sequence", "eos", "eos_token", "end_turn")
_CUT = ("length", "max_tokens", "model_length")
_BLOCKED = ("content_filter", "safety", "recitation", "blocklist", "prohibited_content", "spii", "sensitive")
_END_TOKEN = re.compile(rb"\s*|<[^\s<>]{1,40}>")
"""Pattern of tokens after the content that are not part of it: `<|im_end|>`, `</s>`."""


def failure_of(
    status: int, reason: str, *, retry_after_s: float | None = None, code: str = "", section: str = "judge.api"
) -> Exception:
    """Returns the exception for an HTTP error status.

    Args:
        status: HTTP status of the answer.
        reason: the server's message, untrusted.
        retry_after_s: pause that it asks for, seconds.
        code: its machine-readable error code, if any.
        section: prefix of this API's settings on the command line.
    """
    answer = f"HTTP {status}: {reason}"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return ModelUnavailable(
            f"the API does not accept the key ({answer})", f"check --{section}.key-file or --{section}.key-env"
        )
    if status == HTTPStatus.NOT_FOUND:
        return ModelUnavailable(
            f"the API has no such model or address ({answer})", f"check the model's name and --{section}.base-url"
        )
    if status == HTTPStatus.PAYMENT_REQUIRED or code == "insufficient_quota":
        return ModelUnavailable(
            f"the account of the API has nothing left ({answer})", "top it up, then go on with `rlvlm resume`"
        )
    if status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return TransientError(answer, retry_after_s)
    return Refused(answer)


def retry_after_s(headers: Any) -> float | None:
    """Returns the seconds in a `Retry-After` header, a number or a date; None if it is absent or unreadable.

    Args:
        headers: headers of the answer, any mapping with lower-case look-up.
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name) or ""
        try:
            seconds = float(value) * unit
        except ValueError:
            try:
                date = parsedate_tz(value)
                seconds = mktime_tz(date) - time.time() if date else -1.0
            except (ValueError, OverflowError):  # an impossible date
                seconds = -1.0
        if 0 <= seconds < float("inf"):
            return seconds
    return None


def retry_delay_s(details: Any) -> float | None:
    """Returns the seconds in the `RetryInfo` of an error's details, as Google's servers send it; None without one."""
    try:
        for detail in details:
            if str(detail.get("@type", "")).endswith("RetryInfo"):
                delay_s = float(str(detail["retryDelay"]).removesuffix("s"))
                return max(0.0, delay_s) if math.isfinite(delay_s) else None
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    return None


def read_reply(completion: Any, choice: Any) -> ChatReply:
    """Reads the reply in a completion's choice, untrusted: one with missing parts is a failed try.

    Raises:
        TransientError: it contains no reply.
        Refused: the provider blocked the question or the answer.
    """
    message = getattr(choice, "message", None)
    if message is None:
        raise TransientError("the answer is not what this API promises: it holds no choices")
    refusal, content = getattr(message, "refusal", None), getattr(message, "content", None)
    ending = str(getattr(choice, "finish_reason", None) or "").lower()
    if ending.startswith(_BLOCKED):
        raise Refused(f"blocked by the provider: {ending[:40]}")
    if isinstance(content, list):  # parts, some of which are thoughts
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        strings = [text for text in texts if isinstance(text, str)]
        content = "".join(strings) if len(strings) == len(texts) else texts
    text = refusal or content or ""
    if not isinstance(text, str):
        raise TransientError("the answer is not what this API promises: its content is no text")
    # some servers give no finish reason; then any text counts as a reply
    if not (refusal or ending in _WHOLE + _CUT or (not ending and text)):
        raise TransientError(f"the reply broke off: finish_reason {ending[:40] or 'is empty, and so is the reply'}")
    counted = getattr(completion, "usage", None)
    tokens_in, tokens_out = getattr(counted, "prompt_tokens", None), getattr(counted, "completion_tokens", None)
    usage = None
    if isinstance(tokens_in, int) and isinstance(tokens_out, int):
        usage = Usage(tokens_in=tokens_in, tokens_out=tokens_out)
    return ChatReply(
        text=text,
        is_whole=ending not in _CUT,
        is_refusal=bool(refusal),
        first_tokens=_first_tokens(choice, text),
        usage=usage,
    )


def _first_tokens(choice: Any, text: str) -> tuple[tuple[str, float], ...] | None:
    """Returns the most likely first tokens of the answer; None if a server returns none, or none of the answer's.

    Some servers list the tokens of all generated text, including thoughts, but return only the content: it is then
    searched for from the end. If the thoughts are part of the content, the answer is the text after them.
    """
    # bytes if available: a token may be half a character
    answer = text.rpartition("</think>")[2].strip().encode()
    try:
        entries = list(choice.logprobs.content)
        pieces = [bytes(entry.bytes) if entry.bytes else str(entry.token).encode() for entry in entries]
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + len(piece))
        whole, end = b"".join(pieces), len(pieces)
        while not whole[: starts[end]].rstrip().endswith(answer) and end and _END_TOKEN.fullmatch(pieces[end - 1]):
            end -= 1
        written = whole[: starts[end]].rstrip()
        if answer.startswith(written.lstrip()) and written.lstrip():  # the whole answer, or its first tokens
            begin = len(written) - len(written.lstrip())
        elif answer and written.endswith(answer):
            begin = len(written) - len(answer)
        else:
            return None
        first = max(index for index in range(end) if starts[index] <= begin)
        if whole[starts[first] : begin].strip():  # it begins within a token, whose probability covers more than that
            return None
        top: Sequence[Any] = entries[first].top_logprobs
        return tuple((str(entry.token), math.exp(min(entry.logprob, 0.0))) for entry in top) or None
    except (AttributeError, IndexError, TypeError, ValueError):
        return None
