"""Client for servers with OpenAI's chat completions: OpenAI, Google's Gemini, vLLM's own server, Ollama.

The `openai` client sends and reads; this file decides about retries, deadlines and costs. Retries follow after
jittered, growing pauses, or when the server says (`Retry-After`), which then delays all other requests too.

Servers differ in the parameters they accept, and report it. A parameter with two names (`max_tokens`) is sent under the
other name once a server has refused the first; probabilities, the seed and top_p are left out if a server names them as
not accepted, which is logged once; a temperature is never dropped, unless it is the servers' default, 1.
"""

import asyncio
import base64
import logging
import math
import random
import re
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_before_delay, wait_random_exponential

from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.judging import Usage
from rlvlm.vlms.chats import TOP_P, Chat, ChatReply, ChatRequest, Message, Refused, TransientError, images_of
from rlvlm.vlms.config import ApiConfig
from rlvlm.vlms.engines.budget import Budget
from rlvlm.vlms.engines.http_client import Proxy, make_http_client
from rlvlm.vlms.engines.loop import LoopThread, PerProcess
from rlvlm.vlms.engines.remote_failures import ROOT_FIX, failure_of, page_in, pause_of
from rlvlm.vlms.engines.remote_replies import joined_stream, read_reply
from rlvlm.vlms.engines.secret import read_key
from rlvlm.vlms.stills import to_png

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
NUM_LOG_PROBS = 20
"""Number of first tokens whose probabilities are requested; no known server returns more, and some only 5 or 8."""
MAX_IMAGE_TOKENS = 10_000
"""Maximum tokens that any known provider counts for one image of the size that judges use."""
TEMPLATE_TOKENS = 100
"""Tokens that a provider may add around a chat."""
_MAX_REASON_CHARS = 500
_TALKATIVE = ("httpcore2", "httpx2", "openai")
"""Loggers whose debug messages contain images and headers."""
_LIMIT_NAMES = ("max_tokens", "max_completion_tokens")
_TOO_LARGE = re.compile(r"too large|maximum|at most|exceed", re.IGNORECASE)
"""Pattern of errors about a limit's value; another name for the limit would not help."""


class _NotTaken(TransientError):
    """A server does not accept a parameter, and the next request is sent without it."""


@dataclass(frozen=True, slots=True)
class Provider:
    """Address of a provider's API, and the usual environment variables of its key."""

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
    """Describes which server a model is called at, and where its key comes from; empty for other backends."""
    if backend not in PROVIDERS:
        return ""
    usual = () if api.base_url else PROVIDERS[backend].key_names
    variables = " or ".join(f"${name}" for name in ((api.key_env,) if api.key_env else usual))
    key = f"the key in {api.key_file or variables}" if api.key_file or variables else "no key"
    return f"{api.base_url or PROVIDERS[backend].url}, with {key}"


class RemoteEngine:
    """A model behind an HTTP API, called with retries and within limits; its key never appears in a message.

    Args:
        model: name of the model at the server.
        api: address of the server, unless it is the provider's own, and the limits.
        provider: the provider.
        seed: seed of sampling.

    Raises:
        ModelUnavailable: the key is missing, or nothing can be sent: the proxy or the file of certificates is invalid.
    """

    revision, traits = "", ""  # a server reports neither

    def __init__(self, model: str, api: ApiConfig, provider: str, seed: int = 0) -> None:
        import openai  # slow to import, and only needed for this API

        own = PROVIDERS[provider]
        self._key = read_key(api, usual=own.key_names, is_needed=not api.base_url)
        self._sdk = openai
        url = api.base_url or own.url
        self._proxy = Proxy.of(url)

        def connect() -> tuple[LoopThread, Any]:
            client = openai.AsyncOpenAI(
                api_key=self._key.reveal() or "none",  # the client insists on a key
                base_url=url,
                timeout=api.timeout_s,
                max_retries=0,  # each try must pass the budget
                http_client=make_http_client(openai, url, self._proxy),
            )
            return LoopThread("remote-vlm"), client

        self._connection = PerProcess(connect)
        self._connection()  # now: its proxy or certificates may be invalid
        self._model = model
        self._config = api
        self._seed = seed
        self._first_limit_name = self._limit_name = _LIMIT_NAMES[0] if api.base_url else own.limit_name
        self._not_taken = set[str]()
        self._num_log_probs = NUM_LOG_PROBS
        self._image_tokens = MAX_IMAGE_TOKENS
        self._not_before = 0.0
        self.budget = Budget(api)
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` concurrently with all other requests of this model and returns its result; safe in any thread."""
        return self._connection()[0].run(work)

    async def reply(
        self, request: ChatRequest, *, max_new_tokens: int, temperature: float, deadline: float = math.inf
    ) -> ChatReply:
        """Returns the reply, after as many tries as needed and allowed, with its price if known.

        Raises:
            TransientError: every try failed; with the last one's reason.
            Refused: the server will not answer this question.
            ModelUnavailable: it will not answer any question, or the budget is spent.
        """
        left_s = max(0.0, min(deadline - time.monotonic(), self._config.deadline_s))
        deadline = time.monotonic() + left_s
        num_learned, is_late = 0, stop_before_delay(left_s)

        def is_last(state: RetryCallState) -> bool:
            # learning that a server does not accept a parameter is no failed try; it happens once per parameter
            nonlocal num_learned
            num_learned += isinstance(state.outcome and state.outcome.exception(), _NotTaken)
            return state.attempt_number - num_learned > self._config.retries or is_late(state)

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(TransientError),
            wait=self._pause_s,
            stop=is_last,
            reraise=True,
        )
        # on the loop of the client's connections, whichever loop the caller has
        loop, _ = self._connection()
        return await loop.on_loop(retrying(self._try, request, max_new_tokens, temperature, deadline))

    async def _try(self, request: ChatRequest, max_new_tokens: int, temperature: float, deadline: float) -> ChatReply:
        """Sends one request as soon as the server allows it, counts it, and gives up at the deadline."""
        hold_s = self._not_before - time.monotonic()
        if hold_s > 0:
            if time.monotonic() + hold_s >= deadline:
                section = self._config.section
                raise TransientError(
                    f"the server asked to wait longer than {section}.deadline_s allows",
                    fix=f"raise --{section}.deadline-s, or lower --{section}.concurrency",
                )
            await asyncio.sleep(hold_s)
        # before sending: a limit checked afterwards is already exceeded
        reserved = self.budget.reserve(self._most_tokens(request.chat), max_new_tokens)
        patience_s = min(self._config.timeout_s, max(0.0, deadline - time.monotonic()))
        reply = await self._outcome(self._ask(request, max_new_tokens, temperature), patience_s)
        if isinstance(reply, Exception):  # raised here, where no stack frame contains the server's text about the key
            raise reply
        usage = self._priced(reply.usage, request.chat)
        self.budget.settle(reserved, usage)
        return replace(reply, text=self._key.scrub(reply.text), usage=usage)

    async def _outcome(self, asked: Coroutine[Any, Any, ChatReply], patience_s: float) -> ChatReply | Exception:
        """Returns the reply, or the error to raise instead: without the key, and without the library's own."""
        try:
            return await asyncio.wait_for(asked, patience_s)
        except TimeoutError:
            fix = f"slow servers need --{self._config.section}.timeout-s"
            return TransientError(f"no answer within {patience_s:.1f} s", fix=fix)
        except (TransientError, Refused, ModelUnavailable) as error:
            reason = self._key.scrub(" ".join(str(error).split()))[:_MAX_REASON_CHARS]
            if isinstance(error, ModelUnavailable):
                return ModelUnavailable(reason, error.fix)
            if isinstance(error, Refused):
                return Refused(reason, error.fix)
            logger.info("a request to an API failed: %s", reason)
            if error.retry_after_s:
                # for all requests of this model: a quota does not concern a single question
                self._not_before = max(self._not_before, time.monotonic() + error.retry_after_s)
            return type(error)(reason, error.retry_after_s, error.fix)

    async def _ask(self, request: ChatRequest, max_new_tokens: int, temperature: float) -> ChatReply:
        """Returns the reply to one request; raises as `reply` does."""
        sdk = self._sdk
        body: dict[str, Any] = {
            "messages": [_turn(turn) for turn in request.chat],
            "temperature": temperature,
            self._limit_name: max_new_tokens,
        }
        body |= {"top_p": TOP_P, "seed": self._seed} if temperature > 0 else {}
        body |= {"logprobs": True, "top_logprobs": self._num_log_probs} if request.wants_log_probs else {}
        sent = {name: value for name, value in body.items() if name not in self._not_taken}
        try:
            # said aloud, as some servers stream by default
            completion = await self._connection()[1].chat.completions.create(model=self._model, stream=False, **sent)
        except sdk.APIStatusError as error:
            raise self._failure(error.status_code, error.body, error.message, sent, error.response.headers) from None
        except sdk.APIConnectionError as error:
            reason = f"the model cannot be reached{self._proxy.words}: {error.__cause__ or error}"
            fix = f"check --{self._config.section}.base-url, and that its server runs"
            raise TransientError(reason, fix=fix) from None
        except Exception as error:  # noqa: BLE001 - what a client raises that reads whatever a server sends
            what = f"the answer is not what this API promises: {type(error).__name__}: {error}"
            raise TransientError(what) from None
        if isinstance(completion, str):  # no JSON
            from openai.types.chat import ChatCompletion

            streamed = joined_stream(completion)
            if streamed is None:
                what = page_in(completion) or "neither JSON nor a stream"
                fix = ROOT_FIX.format(section=self._config.section)
                raise TransientError(f"the answer is not what this API promises: {what}", fix=fix)
            completion = ChatCompletion.construct(**streamed)
        choices = getattr(completion, "choices", None)
        choice = choices[0] if isinstance(choices, list) and choices else None
        # gateways send status 200 once they accept a question, and its error inside
        if said := getattr(completion, "error", None) or getattr(choice, "error", None):
            code = str(said.get("code")) if isinstance(said, Mapping) else ""
            status = int(code) if re.fullmatch("[45][0-9][0-9]", code) else HTTPStatus.BAD_GATEWAY
            raise self._failure(status, said, str(said), sent)
        return replace(read_reply(completion, choice), is_sampled=temperature > 0)

    def _failure(
        self, status: int, said: object, message: str, sent: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Exception:
        """Returns the exception for an error; remembers a parameter that the server does not accept for the next try.

        Args:
            status: HTTP status.
            said: body of the error: OpenAI's `error` object, or anything.
            message: the client's own message, used if the server sent none.
            sent: parameters of the request by name.
            headers: headers of the answer.
        """
        body = said[0] if isinstance(said, list) and said else said  # Gemini's is in a list
        body = body.get("error", body) if isinstance(body, Mapping) else {}
        body = body if isinstance(body, Mapping) else {}
        reason, named, details = (
            str(body.get("message") or said or message),
            str(body.get("param") or ""),
            body.get("metadata"),
        )
        if isinstance(details, Mapping) and details.get("raw"):  # a gateway's, which contains the provider's message
            reason += f" ({details['raw']})"
        section = self._config.section
        if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
            if self._learns(named, reason, sent):
                return _NotTaken(reason, 0.0)
            if "temperature" in sent and _names("temperature", named, reason):
                return ModelUnavailable(
                    f"{self._model} does not take this temperature: {reason}",
                    f"use --{section.partition('.')[0]}.temperature 1 where only the model's own is allowed",
                )
            if body.get("code") == "content_filter":
                return Refused(f"blocked by the provider: {reason}")
            if "api key" in reason.lower():  # Gemini's equivalent of 401
                return failure_of(HTTPStatus.UNAUTHORIZED, reason, section=section)
        return failure_of(
            status,
            reason,
            retry_after_s=pause_of(status, headers or {}, body),
            code=str(body.get("code") or ""),
            section=section,
        )

    def _learns(self, named: str, reason: str, sent: Mapping[str, Any]) -> bool:
        """Returns whether a retry without, or with another name for, the refused parameter may work; logs it once.

        Args:
            named: parameter that the server names in a field of its own, if any.
            reason: its message.
            sent: parameters of the request by name.
        """
        limit = next(name for name in _LIMIT_NAMES if name in sent)
        if limit == self._first_limit_name and _names(limit, named, reason) and not _TOO_LARGE.search(reason):
            self._limit_name = next(name for name in _LIMIT_NAMES if name != limit)
            return True
        if "logprobs" in sent and (named in ("logprobs", "top_logprobs") or "logprobs" in reason.lower()):
            # `must be at most 5`: as many as it gives are better than a text alone
            fewer = [number for number in map(int, re.findall(r"\b\d{1,2}\b", reason)) if number > 1]
            if fewer := [number for number in fewer if number < sent["top_logprobs"]]:
                self._num_log_probs = max(fewer)
                return True
            names, what = {"logprobs", "top_logprobs"}, "gives no probabilities; its text is read instead"
        else:
            # top_p before the temperature: if a server names both, it accepts one of them
            names = {name for name in ("top_p", "seed") if name in sent and _names(name, named, reason)}
            if not names and sent.get("temperature") == 1 and _names("temperature", named, reason):
                names = {"temperature"}
            what = f"does not take {', '.join(sorted(names))}; it is asked without: {self._key.scrub(reason)}"
        if not names <= self._not_taken:
            logger.warning("%s %s", self._model, what[:_MAX_REASON_CHARS])
        self._not_taken |= names
        return bool(names)

    def _pause_s(self, state: RetryCallState) -> float:
        """Returns the seconds until the next try: not before the server allows it, and never the same for all."""
        failure = state.outcome.exception() if state.outcome else None
        if isinstance(failure, TransientError) and failure.retry_after_s is not None:
            # spread a little: requests refused together would otherwise return together
            return failure.retry_after_s + random.random() * min(1.0, 0.1 * failure.retry_after_s)
        return wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S)(state)

    def _most_tokens(self, chat: Chat) -> int:
        """Returns an upper bound on a chat's tokens: one per byte, and the costliest provider's count per image."""
        parts = [part for turn in chat for part in turn["content"]]
        num_bytes = sum(len(part["text"].encode()) for part in parts if part["type"] == "text")
        return num_bytes + TEMPLATE_TOKENS + self._image_tokens * len(images_of(chat))

    def _priced(self, usage: Usage | None, chat: Chat) -> Usage | None:
        """Returns the usage with its price; the first one also sets the maximum tokens of an image of this size."""
        if usage is None:
            return None
        if num_images := len(images_of(chat)):
            per_image = -(-usage.tokens_in // num_images)
            known = 0 if self._image_tokens == MAX_IMAGE_TOKENS else self._image_tokens
            self._image_tokens = max(known, per_image)
        return replace(usage, cost_usd=self.budget.price(usage.tokens_in, usage.tokens_out))


def _turn(turn: Message) -> dict[str, Any]:
    """Converts a turn to OpenAI's format; plain text stays plain, because some servers accept nothing else."""
    if all(part["type"] == "text" for part in turn["content"]):
        return {"role": turn["role"], "content": "\n".join(part["text"] for part in turn["content"])}
    parts = []
    for part in turn["content"]:
        if part["type"] == "image":
            uri = "data:image/png;base64," + base64.b64encode(to_png(part["image"])).decode()
            part = {"type": "image_url", "image_url": {"url": uri}}
        parts.append(part)
    return {"role": turn["role"], "content": parts}


def _names(name: str, named: str, reason: str) -> bool:
    """Returns whether a server blames this parameter: by name, or in its message, unless that is about the chat."""
    in_words = not named and "messages" not in reason and re.search(rf"\b{name}\b", reason)
    return named == name or bool(in_words)
