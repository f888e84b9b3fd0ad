"""A Serve app, a judge or a policy, asked from the event loop: retries what died, passes on what is overloaded."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rlvlm.core.errors import ModelUnavailable, UsageError
from rlvlm.core.judging import Clip, Query, Score, Verdict
from rlvlm.serving.calls import DIED
from rlvlm.serving.refusal import Refusal, overloaded
from rlvlm.serving.replicas.policy import ReplyCall, ReplyReceipt
from rlvlm.vlms.chats import Chat

logger = logging.getLogger(__name__)


class AsyncJudge(Protocol):
    """A judge that is asked without blocking; `AsyncAppClient` is one, and so are the stand-ins of the tests."""

    async def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order."""
        ...

    async def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order."""
        ...

    async def generate(self, chat: Chat, max_new_tokens: int, temperature: float) -> str:
        """The model's reply."""
        ...


class AsyncAppClient:
    """`AsyncJudge` over the handle of a Serve app.

    Serve's own bounded queue decides about overload: its `BackPressureError` becomes a 429 at once, and is not tried
    again here, where the caller knows better how long it can wait.
    """

    def __init__(self, app: str, timeout_s: float, retries: int, what: str = "judge") -> None:
        """Remembers where to ask, and what is there; the app may start later."""
        self._app = app
        self._what = what
        self._timeout_s = timeout_s
        self._retries = retries
        self._handle: DeploymentHandle | None = None

    async def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order.

        Raises:
            Refusal: overloaded (429), not running or broken (503), too slow (504).
        """
        return await self._ask("compare", list(queries))

    async def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order; raises as `compare` does."""
        return await self._ask("score", list(clips))

    async def generate(self, chat: Chat, max_new_tokens: int, temperature: float) -> str:
        """The model's reply; raises as `compare` does, and a 422 Refusal where the judge cannot write."""
        replies = await self._ask("generate", [chat], max_new_tokens, temperature)
        return replies[0]

    async def sample(self, call: ReplyCall) -> ReplyReceipt:
        """What a policy answers; raises as `compare` does, and a 422 Refusal where it cannot be asked this."""
        return await self._ask("ask", call)

    async def _ask(self, method: str, *args: Any) -> Any:
        """The answer of one call, or what became of it as a `Refusal`."""
        retrying = AsyncRetrying(
            stop=stop_after_attempt(1 + self._retries),
            wait=wait_random_exponential(multiplier=0.2, max=5.0),
            retry=retry_if_exception_type(DIED),
            reraise=True,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome = await retrying(self._try_once, method, *args)
        except BackPressureError:
            raise overloaded(f"the {self._what}'s queue is full") from None
        except TimeoutError:
            raise Refusal(
                504,
                "deadline",
                f"the {self._what} did not answer within {self._timeout_s:g} s",
                "send fewer questions at once",
            ) from None
        except (RayError, RayServeException, ModelUnavailable) as error:
            logger.warning("%s app %s did not answer: %s", self._what, self._app, type(error).__name__)
            said = f"the {self._what} does not answer now"
            raise Refusal(503, self._what, said, "try again; its operator sees why") from None
        if isinstance(outcome, UsageError):
            raise Refusal(422, "unsupported", str(outcome), outcome.fix)
        if isinstance(outcome, ModelUnavailable):
            logger.warning("%s app %s: %s", self._what, self._app, outcome)
            said = f"the {self._what} broke on this request"
            raise Refusal(503, self._what, said, "try again; its operator sees why")
        return outcome

    async def _try_once(self, method: str, *args: Any) -> Any:
        start = time.monotonic()
        handle = self._handle  # another request may take it away
        if handle is None:
            handle = self._handle = await asyncio.to_thread(serve.get_app_handle, self._app)
        response = getattr(handle, method).remote(*args)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except DIED as error:
            if isinstance(error, DeploymentUnavailableError):
                self._handle = None  # it names a deployment, and an app that was deployed anew may have another one
            died = time.monotonic() - start
            logger.warning("%s app %s: a replica died after %.1f s", self._what, self._app, died)
            raise
