"""Any server that speaks OpenAI's chat completions: GPT-4-class models, vLLM's own server, Ollama. Extra: api.

Servers differ in what they take. What means the same under another name (`max_tokens`) is sent under that name once a
server has refused the first, and probabilities are gone without where a server has none to give; whatever would change
the answer, such as the temperature, is never dropped in silence.
"""

import base64
import logging
import math
from collections.abc import Mapping
from json import JSONDecodeError
from typing import Any

from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.judging import Usage
from rlvlm.vlms.chats import TOP_P, Message, Reply
from rlvlm.vlms.config import ApiConfig
from rlvlm.vlms.engines.remote import (
    ApiRequest,
    Refused,
    RemoteEngine,
    TransientError,
    encode_png,
    failure_of,
    retry_after_s,
)
from rlvlm.vlms.engines.secret import Secret, read_key

logger = logging.getLogger(__name__)

OFFICIAL_URL = "https://api.openai.com/v1"
NUM_LOG_PROBS = 20
"""First tokens whose probabilities are asked for; no known server gives more."""
_LIMIT_NAMES = ("max_tokens", "max_completion_tokens")
_LOG_PROB_NAMES = ("logprobs", "top_logprobs")


def connect(model: str, api: ApiConfig, seed: int = 0) -> RemoteEngine:
    """The model of that name on `api.base_url`, or at OpenAI. Nothing is sent yet.

    Raises:
        ModelUnavailable: the client library or the key is missing.
    """
    key = read_key(api, usual=("OPENAI_API_KEY",), is_needed=not api.base_url)
    return RemoteEngine(OpenAIProvider(model, api, key), api, key, seed)


class OpenAIProvider:
    """Chat completions, one try at a time.

    Args:
        model: what the server calls it.
        api: names the server.
        key: sent as bearer token; an empty one for servers without.

    Raises:
        ModelUnavailable: the package `openai` is missing.
    """

    def __init__(self, model: str, api: ApiConfig, key: Secret) -> None:
        try:
            import openai
        except ImportError as error:
            raise ModelUnavailable("the engine openai needs the package openai", "pip install openai") from error
        self._sdk = openai
        self._model = model
        self._section = api.section
        self._limit = _LIMIT_NAMES[0] if api.base_url else _LIMIT_NAMES[1]
        self._gives_log_probs = True
        self._client = openai.AsyncOpenAI(
            api_key=key.reveal() or "none",  # the client insists on one
            base_url=api.base_url or OFFICIAL_URL,
            timeout=api.timeout_s,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),  # a key goes where it was sent
        )

    async def ask(self, request: ApiRequest) -> Reply:
        """One completion; see `remote.Provider`."""
        sdk = self._sdk
        limit, wants_log_probs = self._limit, request.wants_log_probs and self._gives_log_probs
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_turn(turn) for turn in request.chat],
            "temperature": request.temperature,
            limit: request.max_new_tokens,
        }
        body |= {"top_p": TOP_P, "seed": request.seed} if request.temperature > 0 else {}
        body |= {"logprobs": True, "top_logprobs": NUM_LOG_PROBS} if wants_log_probs else {}
        try:
            completion = await self._client.chat.completions.create(**body)
        except sdk.APIStatusError as error:
            raise self._failure(error, limit, wants_log_probs) from None
        except sdk.APIConnectionError as error:
            raise TransientError(f"no connection: {error.__cause__ or error}") from None
        except (sdk.OpenAIError, JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransientError(f"the answer is not what this API promises: {error}") from None
        return _reply(completion)

    def _failure(self, error: Any, limit: str, wants_log_probs: bool) -> Exception:
        """What an error status means; a name that the server does not know is learned for the next try."""
        body = error.body if isinstance(error.body, Mapping) else {}
        reason, named = str(body.get("message") or error.message), str(body.get("param") or "")
        if error.status_code in (400, 422):
            if wants_log_probs and (named in _LOG_PROB_NAMES or "logprobs" in reason):
                logger.warning("%s gives no probabilities; its text is read instead", self._model)
                self._gives_log_probs = False
                return TransientError(reason, 0.0)
            if named == limit or (not named and limit in reason):
                self._limit = next(name for name in _LIMIT_NAMES if name != limit)
                return TransientError(reason, 0.0)
            if named == "temperature":
                return ModelUnavailable(
                    f"{self._model} does not take this temperature: {reason}",
                    "use --judge.temperature 1 where only the model's own is allowed",
                )
            if body.get("code") == "content_filter":
                return Refused(f"blocked by the provider: {reason}")
        return failure_of(
            error.status_code,
            reason,
            retry_after_s=retry_after_s(error.response.headers),
            code=str(body.get("code") or ""),
            section=self._section,
        )


def _turn(turn: Message) -> dict[str, Any]:
    """A turn of `prompts` in OpenAI's words; plain text stays plain, which is all that some servers read."""
    if all(part["type"] == "text" for part in turn["content"]):
        return {"role": turn["role"], "content": "\n".join(part["text"] for part in turn["content"])}
    parts = []
    for part in turn["content"]:
        if part["type"] == "image":
            uri = "data:image/png;base64," + base64.b64encode(encode_png(part["image"])).decode()
            part = {"type": "image_url", "image_url": {"url": uri}}
        parts.append(part)
    return {"role": turn["role"], "content": parts}


def _reply(completion: Any) -> Reply:
    """The reply in a completion, untrusted: whatever lacks its parts is a failed try.

    Raises:
        TransientError: there is no reply in it.
        Refused: the provider blocked the question or the answer.
    """
    choices = getattr(completion, "choices", None)
    message = getattr(choices[0], "message", None) if isinstance(choices, list) and choices else None
    if not choices or message is None:
        raise TransientError("the answer is not what this API promises: it holds no choices")
    refusal, text = getattr(message, "refusal", None), getattr(message, "content", None)
    ending = getattr(choices[0], "finish_reason", None)
    if ending == "content_filter":
        raise Refused("blocked by the provider's content filter")
    if not isinstance(refusal or text or "", str):
        raise TransientError("the answer is not what this API promises: its content is no text")
    return Reply(
        text=refusal or text or "",
        is_whole=ending != "length",
        is_refusal=bool(refusal),
        first_tokens=_first_tokens(choices[0]),
        usage=_usage(completion),
    )


def _first_tokens(choice: Any) -> tuple[tuple[str, float], ...] | None:
    try:
        top = choice.logprobs.content[0].top_logprobs
        return tuple((str(entry.token), math.exp(min(entry.logprob, 0.0))) for entry in top) or None
    except (AttributeError, IndexError, TypeError):
        return None  # the server gives none


def _usage(completion: Any) -> Usage | None:
    usage = getattr(completion, "usage", None)
    tokens_in, tokens_out = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
    if not isinstance(tokens_in, int) or not isinstance(tokens_out, int):
        return None
    return Usage(tokens_in=tokens_in, tokens_out=tokens_out)
