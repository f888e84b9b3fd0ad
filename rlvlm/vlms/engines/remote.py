"""Requests to somebody's API: how many at once, how often again, until when, for how much.

A `Provider` knows one API's words; everything else is here, once. Tries follow each other with jittered, growing
pauses, or when the server says so (`Retry-After`), which then holds back every other request too.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from email.utils import mktime_tz, parsedate_tz
from http import HTTPStatus
from io import BytesIO
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
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
from rlvlm.vlms.chats import Chat, Reply, pictures_of
from rlvlm.vlms.config import ApiConfig
from rlvlm.vlms.engines.budget import Budget
from rlvlm.vlms.engines.secret import Secret

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
MAX_PICTURE_TOKENS = 10_000
"""Most tokens that any known provider counts for one image of the size that judges look at."""
TEMPLATE_TOKENS = 100
"""What a provider may add around a chat."""
_MAX_REASON_CHARS = 500
_TALKATIVE = ("httpcore2", "httpx2", "openai", "google_genai")
"""Loggers whose finer lines hold images and headers."""
_PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)

T = TypeVar("T")


class TransientError(Exception):
    """A try failed and the next one may not.

    Args:
        reason: untrusted words of the server, or ours.
        retry_after_s: how long the server wants to be left alone; None when it does not say.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Refused(Exception):  # noqa: N818 - likewise
    """This question will not be answered, however often it is asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiRequest:
    """One chat that is to be sent."""

    chat: Chat
    max_new_tokens: int
    temperature: float
    seed: int = 0
    """Sent where the temperature is above 0."""
    wants_log_probs: bool = False
    """Whether the probabilities of the reply's first token are wanted, where the server gives them."""


class Provider(Protocol):
    """One API's words."""

    async def ask(self, request: ApiRequest) -> Reply:
        """One try.

        Raises:
            TransientError: it failed and another may not.
            Refused: this question will not be answered.
            ModelUnavailable: no question will be: wrong key, no such model, nothing paid.
        """
        ...


class RemoteEngine:
    """A provider asked with patience, within limits, and without its key in any message.

    Args:
        provider: the API.
        config: the limits.
        key: is masked in everything that comes back.
        seed: of sampling.
    """

    def __init__(self, provider: Provider, config: ApiConfig, key: Secret, seed: int = 0) -> None:
        self._provider = provider
        self._config = config
        self._key = key
        self._seed = seed
        self.gate = asyncio.Semaphore(config.concurrency)
        """Held by each question that is under way."""
        self._picture_tokens = MAX_PICTURE_TOKENS
        self._not_before = 0.0
        self.budget = Budget(config)
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote-vlm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, run beside all other requests of this model; safe in any thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also on Ctrl-C: no request goes on behind our back
            future.cancel()
            raise

    def generate(self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float) -> list[Reply]:
        """One reply per chat, in order; raises as `ask` does where one does not come."""

        async def write(chat: Chat) -> Reply:
            request = ApiRequest(chat=chat, max_new_tokens=max_new_tokens, temperature=temperature, seed=self._seed)
            async with self.gate:
                return await self.ask(request, time.monotonic() + self._config.deadline_s)

        async def write_all() -> list[Reply]:
            return await asyncio.gather(*map(write, chats))

        return self.run(write_all())

    async def ask(self, request: ApiRequest, deadline: float) -> Reply:
        """The reply, after as many tries as it takes and is allowed.

        Args:
            request: what is sent.
            deadline: `time.monotonic` by which the reply must be there, waits included.

        Raises:
            TransientError: every try failed; the last one's reason.
            Refused: the server will not answer this.
            ModelUnavailable: it will not answer anything, or the budget is spent.
        """
        left_s = max(0.0, deadline - time.monotonic())
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(TransientError),
            wait=self._pause_s,
            stop=stop_after_attempt(self._config.retries + 1) | stop_before_delay(left_s),
            reraise=True,
        )
        return await retrying(self._try, request, deadline)

    async def _try(self, request: ApiRequest, deadline: float) -> Reply:
        """One request, sent as soon as the server lets us, counted, and given up when its time is over."""
        hold_s = self._not_before - time.monotonic()
        if hold_s > 0:
            if time.monotonic() + hold_s >= deadline:
                raise TransientError(f"the server asked to wait longer than {self._config.section}.deadline_s allows")
            await asyncio.sleep(hold_s)
        reserved = self.budget.reserve(self._most_tokens(request.chat), request.max_new_tokens)
        patience_s = min(self._config.timeout_s, max(0.0, deadline - time.monotonic()))
        reply = await self._outcome(request, patience_s)
        if isinstance(reply, Exception):  # raised here, where no frame knows what the server said about the key
            raise reply
        usage = self._priced(reply.usage, request.chat)
        self.budget.settle(reserved, usage)
        return replace(reply, text=self._key.scrub(reply.text), usage=usage)

    async def _outcome(self, request: ApiRequest, patience_s: float) -> Reply | Exception:
        """The reply, or what to raise in its place: without the key, and without the library's own exceptions."""
        try:
            return await asyncio.wait_for(self._provider.ask(request), patience_s)
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
                self._not_before = max(self._not_before, time.monotonic() + error.retry_after_s)
            return TransientError(reason, error.retry_after_s)

    def _pause_s(self, state: RetryCallState) -> float:
        """Seconds to the next try: never before the server wants it, and never all at the same moment."""
        failure = state.outcome.exception() if state.outcome else None
        if isinstance(failure, TransientError) and failure.retry_after_s is not None:
            return failure.retry_after_s + random.random() * min(1.0, 0.1 * failure.retry_after_s)
        return wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S)(state)

    def _most_tokens(self, chat: Chat) -> int:
        """No fewer than a provider will count: a token is at least a byte, an image what the dearest one takes."""
        parts = [part for turn in chat for part in turn["content"]]
        num_bytes = sum(len(part["text"].encode()) for part in parts if part["type"] == "text")
        return num_bytes + TEMPLATE_TOKENS + self._picture_tokens * len(pictures_of(chat))

    def _priced(self, usage: Usage | None, chat: Chat) -> Usage | None:
        """The usage with its price; the first one also tells what an image of this run's size counts at most."""
        if usage is None:
            return None
        if num_pictures := len(pictures_of(chat)):
            per_picture = -(-usage.tokens_in // num_pictures)
            known = 0 if self._picture_tokens == MAX_PICTURE_TOKENS else self._picture_tokens
            self._picture_tokens = max(known, per_picture)
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
    told = f"HTTP {status}: {reason}"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return ModelUnavailable(
            f"the API does not accept the key ({told})", f"check --{section}.key-file or --{section}.key-env"
        )
    if status == HTTPStatus.NOT_FOUND:
        return ModelUnavailable(
            f"the API has no such model or address ({told})", f"check the model's name and --{section}.base-url"
        )
    if status == HTTPStatus.PAYMENT_REQUIRED or code == "insufficient_quota":
        return ModelUnavailable(
            f"the account of the API has nothing left ({told})", "top it up, then go on with `rlvlm resume`"
        )
    if status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return TransientError(told, retry_after_s)
    return Refused(told)


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


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """The image [H, W, 3] as a PNG file."""
    stream = BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()
