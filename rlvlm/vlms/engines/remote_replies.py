"""Parsing of chat completions, all of it untrusted: replies, streams, first tokens and usage."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlvlm.core.judging import Usage
from rlvlm.vlms.chats import ChatReply, Refused, TransientError

# finish reasons of a complete reply, in OpenAI's API and its copies; any other reason is an error or a refusal
_WHOLE = ("stop", "stop_sequence", "eos", "eos_token", "end_turn")
_CUT = ("length", "max_tokens", "model_length")
_BLOCKED = ("content_filter", "safety", "recitation", "blocklist", "prohibited_content", "spii", "sensitive")
_END_TOKEN = re.compile(rb"\s*|<[^\s<>]{1,40}>")
"""Pattern of tokens after the content that are not part of it: `<|im_end|>`, `</s>`."""


def joined_stream(text: str) -> dict[str, Any] | None:
    """Returns the completion in a stream of chunks (`data: {...}`), which some servers send unasked; None if the text
    is none.

    The reply is that of the first choice, with its tokens' probabilities; `usage` is the last that is given.
    """
    texts, tokens = list[str](), list[Any]()
    body: dict[str, Any] = {}
    choice: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            chunk = json.loads(line.removeprefix("data:")) if line.startswith("data:") else None
        except (ValueError, RecursionError):  # the last line, `[DONE]`, or a torn one
            continue
        if not isinstance(chunk, dict):
            continue
        body |= {name: chunk[name] for name in ("id", "model", "usage", "error") if chunk.get(name)}
        parts = chunk.get("choices")
        part = parts[0] if isinstance(parts, list) and parts and isinstance(parts[0], dict) else {}
        delta, odds = part.get("delta"), part.get("logprobs")
        texts += [delta["content"]] if isinstance(delta, dict) and isinstance(delta.get("content"), str) else []
        tokens += odds["content"] if isinstance(odds, dict) and isinstance(odds.get("content"), list) else []
        # a stream that ends without a reason was torn, and is asked for again
        choice |= {"finish_reason": part["finish_reason"]} if part.get("finish_reason") else {}
        body["choices"] = [choice]
    if not body:
        return None
    choice |= {"index": 0, "message": {"role": "assistant", "content": "".join(texts)}}
    choice |= {"logprobs": {"content": tokens}} if tokens else {}
    choice.setdefault("finish_reason", "none: the stream is torn")
    return body


def read_reply(completion: object, choice: Any) -> ChatReply:
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
    return ChatReply(
        text=text,
        is_whole=ending not in _CUT,
        is_refusal=bool(refusal),
        first_tokens=_first_tokens(choice, text),
        usage=_usage(getattr(completion, "usage", None)),
    )


def _usage(counted: object) -> Usage | None:
    """Returns the tokens that are billed, the thoughts among them; None if the server does not count them.

    Gemini lists thoughts in `total_tokens` alone, others in `completion_tokens_details` alone.
    """
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    tokens_in, written, total = (getattr(counted, name, None) for name in names)
    if not isinstance(tokens_in, int) or not isinstance(written, int):
        return None
    thoughts = getattr(getattr(counted, "completion_tokens_details", None), "reasoning_tokens", None)
    # thoughts are a part of what was written, so more of them than that are counted apart
    told_apart = thoughts if isinstance(thoughts, int) and thoughts > written else 0
    rest = total - tokens_in if isinstance(total, int) else 0
    return Usage(tokens_in=tokens_in, tokens_out=max(rest, written + told_apart))


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
