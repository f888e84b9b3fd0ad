"""Any server that speaks OpenAI's chat completions: OpenAI, Google's Gemini, vLLM's own server, Ollama.

The `openai` client sends and reads; here are how many tries, until when, and for how much. Tries follow each other with
jittered, growing pauses, or when the server says so (`Retry-After`), which then holds back every other request too.

Servers differ in what they take. What means the same under another name (`max_tokens`) is sent under that name once a
server has refused the first, and probabilities are gone without where a server has none to give; whatever would change
the answer, such as the temperature, is never dropped in silence.
"""

import asyncio
import base64
import logging
import math
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import mktime_tz, parsedate_tz
from http import HTTPStatus
from json import JSONDecodeError
from typing import Any, Literal, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.judging import Usage
from rlvlm.vlms.chats import TOP_P, Chat, ChatReply, ChatRequest, Message, Refused, TransientError, images_of
from rlvlm.vlms.config import ApiConfig
from rlvlm.vlms.engines.budget import Budget
from rlvlm.vlms.engines.loop import LoopThread
from rlvlm.vlms.engines.secret import read_key
from rlvlm.vlms.stills import to_png

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
NUM_LOG_PROBS = 20
"""First tokens whose probabilities are asked for; no known server gives more."""
MAX_IMAGE_TOKENS = 10_000
"""Most tokens that any known provider counts for one image of the size that judges look at."""
TEMPLATE_TOKENS = 100
"""What a provider may add around a chat."""
_MAX_REASON_CHARS = 500
_TALKATIVE = ("httpcore2", "httpx2", "openai")
"""Loggers whose finer lines hold images and headers."""
_PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
_LIMIT_NAMES = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True, slots=True)
class Provider:
    """Where a provider's own API is, and where its key usually lies."""

    url: str
    key_names: tuple[str, ...]
    limit_name: str


# OpenAI's newer models refuse `max_tokens`; servers that copy its API know no other name
PROVIDERS = {
    "openai": Provider("https://api.openai.com/v1", ("OPENAI_API_KEY",), "max_completion_tokens"),
    "gemini": Provider(
        "https://generativelanguage.googleapis.com/v1beta/openai/", ("GEMINI_API_KEY", "GOOGLE_API_KEY"), "max_tokens"
    ),
}


def describe_server(backend: str, api: ApiConfig) -> str:
    """Which server a model is asked at, and where the key comes from that it is sent; empty for other backends."""
    if backend not in PROVIDERS:
        return ""
    usual = () if api.base_url else PROVIDERS[backend].key_names
    variables = " or ".join(f"${name}" for name in ((api.key_env,) if api.key_env else usual))
    key = f"the key in {api.key_file or variables}" if api.key_file or variables else "no key"
    return f"{api.base_url or PROVIDERS[backend].url}, with {key}"


class RemoteEngine:
    """A model behind somebody's API, asked with patience, within limits, and without its key in any message.

    Args:
        model: what the server calls it.
        api: names the server, unless it is the provider's own, and the limits.
        provider: whose it is.
        seed: of sampling.

    Raises:
        ModelUnavailable: the key is missing.
    """

    revision, traits = "", ""  # a server says neither

    def __init__(self, model: str, api: ApiConfig, provider: Literal["openai", "gemini"], seed: int = 0) -> None:
        import openai  # slow, and only needed where somebody is asked

        own = PROVIDERS[provider]
        self._key = read_key(api, usual=own.key_names, is_needed=not api.base_url)
        self._sdk = openai
        self._client = openai.AsyncOpenAI(
            api_key=self._key.reveal() or "none",  # the client insists on one
            base_url=api.base_url or own.url,
            timeout=api.timeout_s,
            max_retries=0,  # each try must pass the budget
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),  # a key goes where it was sent
        )
        self._model = model
        self._config = api
        self._seed = seed
        self._limit_name = _LIMIT_NAMES[0] if api.base_url else own.limit_name
        self._gives_log_probs = True
        self._image_tokens = MAX_IMAGE_TOKENS
        self._not_before = 0.0
        self.budget = Budget(api)
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        self._loop = LoopThread("remote-vlm")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, run beside all other requests of this model; safe in any thread."""
        return self._loop.run(work)

    async def reply(
        self, request: ChatRequest, *, max_new_tokens: int, temperature: float, deadline: float = math.inf
    ) -> ChatReply:
        """The reply, after as many tries as it takes and is allowed; with its price, where that is known.

        Raises:
            TransientError: every try failed; the last one's reason.
            Refused: the server will not answer this.
            ModelUnavailable: it will not answer anything, or the budget is spent.
        """
        left_s = max(0.0, min(deadline - time.monotonic(), self._config.deadline_s))
        deadline = time.monotonic() + left_s
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(TransientError),
            wait=self._pause_s,
            stop=stop_after_attempt(self._config.retries + 1) | stop_before_delay(left_s),
            reraise=True,
        )
        return await retrying(self._try, request, max_new_tokens, temperature, deadline)

    async def _try(self, request: ChatRequest, max_new_tokens: int, temperature: float, deadline: float) -> ChatReply:
        """One request, sent as soon as the server lets us, counted, and given up when its time is over."""
        hold_s = self._not_before - time.monotonic()
        if hold_s > 0:
            if time.monotonic() + hold_s >= deadline:
                raise TransientError(f"the server asked to wait longer than {self._config.section}.deadline_s allows")
            await asyncio.sleep(hold_s)
        # before it is sent: a cap that is looked at afterwards has been passed already
        reserved = self.budget.reserve(self._most_tokens(request.chat), max_new_tokens)
        patience_s = min(self._config.timeout_s, max(0.0, deadline - time.monotonic()))
        reply = await self._outcome(self._ask(request, max_new_tokens, temperature), patience_s)
        if isinstance(reply, Exception):  # raised here, where no frame knows what the server said about the key
            raise reply
        usage = self._priced(reply.usage, request.chat)
        self.budget.settle(reserved, usage)
        return replace(reply, text=self._key.scrub(reply.text), usage=usage)

    async def _outcome(self, asked: Coroutine[Any, Any, ChatReply], patience_s: float) -> ChatReply | Exception:
        """The reply, or what to raise in its place: without the key, and without the library's own exceptions."""
        try:
            return await asyncio.wait_for(asked, patience_s)
        except TimeoutError:
            return TransientError(f"no answer within {patience_s:.1f} s")
        except (TransientError, Refused, ModelUnavailable) as error:
            reason = self._key.scrub(" ".join(str(error).split()))[:_MAX_REASON_CHARS]
            if isinstance(error, ModelUnavailable):
                return ModelUnavailable(reason, error.fix)
            if isinstance(error, Refused):
                return Refused(reason)
            logger.info("a request to an API failed: %s", reason)
            if error.retry_after_s:
                # for all requests of this model: a quota is not of one question
                self._not_before = max(self._not_before, time.monotonic() + error.retry_after_s)
            return TransientError(reason, error.retry_after_s)

    async def _ask(self, request: ChatRequest, max_new_tokens: int, temperature: float) -> ChatReply:
        """What one request comes to; raises as `reply` does."""
        sdk, limit = self._sdk, self._limit_name
        wants_log_probs = request.wants_log_probs and self._gives_log_probs
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_turn(turn) for turn in request.chat],
            "temperature": temperature,
            limit: max_new_tokens,
        }
        body |= {"top_p": TOP_P, "seed": self._seed} if temperature > 0 else {}
        body |= {"logprobs": True, "top_logprobs": NUM_LOG_PROBS} if wants_log_probs else {}
        try:
            return _reply(await self._client.chat.completions.create(**body))
        except sdk.APIStatusError as error:
            raise self._failure(error, limit, wants_log_probs) from None
        except sdk.APIConnectionError as error:
            raise TransientError(f"no connection: {error.__cause__ or error}") from None
        except (sdk.OpenAIError, JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransientError(f"the answer is not what this API promises: {error}") from None

    def _failure(self, error: Any, limit: str, wants_log_probs: bool) -> Exception:
        """What an error status means; a name that the server does not know is learned for the next try."""
        body = error.body[0] if isinstance(error.body, list) and error.body else error.body  # Gemini's is in a list
        body = body.get("error", body) if isinstance(body, Mapping) else {}
        reason, named = str(body.get("message") or error.message), str(body.get("param") or "")
        if error.status_code in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
            if wants_log_probs and (named in ("logprobs", "top_logprobs") or "logprobs" in reason.lower()):
                logger.warning("%s gives no probabilities; its text is read instead", self._model)
                self._gives_log_probs = False
                return TransientError(reason, 0.0)
            if named == limit or (not named and limit in reason):
                self._limit_name = next(name for name in _LIMIT_NAMES if name != limit)
                return TransientError(reason, 0.0)
            if named == "temperature":
                return ModelUnavailable(
                    f"{self._model} does not take this temperature: {reason}",
                    "use --judge.temperature 1 where only the model's own is allowed",
                )
            if body.get("code") == "content_filter":
                return Refused(f"blocked by the provider: {reason}")
            if "api key" in reason.lower():  # Gemini's way of saying 401
                return failure_of(HTTPStatus.UNAUTHORIZED, reason, section=self._config.section)
        asked_s = _retry_delay_s(body.get("details"))
        return failure_of(
            error.status_code,
            reason,
            retry_after_s=retry_after_s(error.response.headers) if asked_s is None else asked_s,
            code=str(body.get("code") or ""),
            section=self._config.section,
        )

    def _pause_s(self, state: RetryCallState) -> float:
        """Seconds to the next try: never before the server wants it, and never all at the same moment."""
        failure = state.outcome.exception() if state.outcome else None
        if isinstance(failure, TransientError) and failure.retry_after_s is not None:
            # spread a little: all that were refused together would come back together
            return failure.retry_after_s + random.random() * min(1.0, 0.1 * failure.retry_after_s)
        return wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S)(state)

    def _most_tokens(self, chat: Chat) -> int:
        """No fewer than a provider will count: a token is at least a byte, an image what the dearest one takes."""
        parts = [part for turn in chat for part in turn["content"]]
        num_bytes = sum(len(part["text"].encode()) for part in parts if part["type"] == "text")
        return num_bytes + TEMPLATE_TOKENS + self._image_tokens * len(images_of(chat))

    def _priced(self, usage: Usage | None, chat: Chat) -> Usage | None:
        """The usage with its price; the first one also says what an image of this run's size counts at most."""
        if usage is None:
            return None
        if num_images := len(images_of(chat)):
            per_image = -(-usage.tokens_in // num_images)
            known = 0 if self._image_tokens == MAX_IMAGE_TOKENS else self._image_tokens
            self._image_tokens = max(known, per_image)
        return replace(usage, cost_usd=self.budget.price(usage.tokens_in, usage.tokens_out))


def failure_of(
    status: int, reason: str, *, retry_after_s: float | None = None, code: str = "", section: str = "judge.api"
) -> Exception:
    """What an HTTP error status means for the question that met it.

    Args:
        status: of the answer.
        reason: the server's words, untrusted.
        retry_after_s: how long it wants to be left alone.
        code: its machine-readable reason, if any.
        section: where the settings of this API stand on the command line.
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
    """Seconds that a `Retry-After` header asks for, as a number or a date; None where it is absent or unreadable.

    Args:
        headers: of the answer, any mapping with lower-case look-up.
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name) or ""
        try:
            seconds = float(value) * unit
        except ValueError:
            date = parsedate_tz(value)
            seconds = mktime_tz(date) - time.time() if date else -1.0
        if 0 <= seconds < float("inf"):
            return seconds
    return None


def _retry_delay_s(details: Any) -> float | None:
    """Seconds in the `RetryInfo` among an error's details, as Google's servers say it; None where there is none."""
    try:
        for detail in details:
            if str(detail.get("@type", "")).endswith("RetryInfo"):
                return max(0.0, float(str(detail["retryDelay"]).removesuffix("s")))
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    return None


def _turn(turn: Message) -> dict[str, Any]:
    """A turn in OpenAI's words; plain text stays plain, which is all that some servers read."""
    if all(part["type"] == "text" for part in turn["content"]):
        return {"role": turn["role"], "content": "\n".join(part["text"] for part in turn["content"])}
    parts = []
    for part in turn["content"]:
        if part["type"] == "image":
            uri = "data:image/png;base64," + base64.b64encode(to_png(part["image"])).decode()
            part = {"type": "image_url", "image_url": {"url": uri}}
        parts.append(part)
    return {"role": turn["role"], "content": parts}


def _reply(completion: Any) -> ChatReply:
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
    if isinstance(ending, str) and ending.startswith("content_filter"):
        raise Refused("blocked by the provider's content filter")
    if not isinstance(refusal or text or "", str):
        raise TransientError("the answer is not what this API promises: its content is no text")
    try:
        top: Sequence[Any] = choices[0].logprobs.content[0].top_logprobs
        first_tokens = tuple((str(entry.token), math.exp(min(entry.logprob, 0.0))) for entry in top) or None
    except (AttributeError, IndexError, TypeError):
        first_tokens = None  # the server gives none
    counted = getattr(completion, "usage", None)
    tokens_in, tokens_out = getattr(counted, "prompt_tokens", None), getattr(counted, "completion_tokens", None)
    usage = None
    if isinstance(tokens_in, int) and isinstance(tokens_out, int):
        usage = Usage(tokens_in=tokens_in, tokens_out=tokens_out)
    return ChatReply(
        text=refusal or text or "",
        is_whole=ending != "length",
        is_refusal=bool(refusal),
        first_tokens=first_tokens,
        usage=usage,
    )
