"""Clients of an app on Serve, by its name, which ask again if a replica died or its queue was full: `AppClient` for
runs, from threads or an event loop, `AsyncAppClient` for the HTTP server.

Serve does not retry a request that a replica had accepted: without this `tests/faults/test_served_judges.py` loses
the batches of every replica it kills.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from rlvlm.core.errors import ModelUnavailable, RunError, UsageError, first_line
from rlvlm.core.judging import Clip, Query, Score, Stamp, Verdict
from rlvlm.serving.bags import Bag
from rlvlm.serving.refusal import Refusal, overloaded
from rlvlm.vlms.chats import Chat

logger = logging.getLogger(__name__)

REFUSED = "refused"
MAX_BACKOFF_S = 10.0
REFUSED_WAIT_S = (0.1, 0.5)
"""Minimum and maximum pause after a request was refused by a full queue, seconds."""
_DIED = (RayActorError, NodeDiedError, ObjectLostError, DeploymentUnavailableError)
"""Errors if a replica died, the node with the answer died, or the app was deployed again under another deployment
name."""
_PASSING = (*_DIED, BackPressureError, TimeoutError, ModelUnavailable)
"""Errors after which a retry may succeed: a replica died or is overloaded, slow, or about to be replaced."""
_POLL_S = 1.0
"""Interval at which a waiting request checks whether its answer is still wanted, seconds."""


class AppClient:
    """Calls methods of one app. It pickles; the app's handle is looked up in each process.

    Args:
        app: name of the Serve application.
        what: kind of model behind it, for messages: `judge`.
        section: options that configure it: `serve`.
        unavailable: error raised if no try was answered.
        timeout_s: longest wait for one request's answer.
        retries: tries after the first.
        note: called at each retry with the name of the error; `REFUSED` for a full queue.
    """

    def __init__(
        self,
        app: str,
        *,
        what: str,
        section: str,
        unavailable: type[ModelUnavailable],
        timeout_s: float,
        retries: int,
        note: Callable[[str], None],
    ) -> None:
        self.app = app
        self.handle: DeploymentHandle | None = None
        """Handle of the app, looked up on first use in this process."""
        self._what, self._section, self._unavailable = what, section, unavailable
        self._timeout_s = timeout_s
        self.retries = retries
        self._note = note
        self._is_closed = False

    def close(self) -> None:
        """Cancels the requests running in this process, and refuses new ones: their callers have finished.

        A thread still waiting for an answer would keep the process alive.
        """
        self._is_closed = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"handle": None}  # a handle belongs to the process that requested it

    def call(self, method: str, *args: Any, check: Callable[[Any], Any] | None = None) -> Any:
        """Returns the answer of the replica's `method`, with as many tries as needed. `check` turns the answer into the
        result; an error that it raises counts as a failed try.

        Raises:
            ModelUnavailable: no try was answered; an error of the configured class.
            RunError: the replica's own error, for which a retry would not help.
        """
        self.connect()  # a missing app is reported at once, without retries
        with self._explained():
            return Retrying(**self._tries())(self._try_once, method, args, check)

    async def stream(self, method: str, bag: Bag) -> None:
        """Passes the answers that the replica's generator `method` yields to `bag`, with as many tries as needed; each
        sends the calls that are still open.

        Raises:
            ModelUnavailable, RunError: as `call` does.
        """
        with self._explained():
            await AsyncRetrying(**self._tries())(self._stream_once, method, bag)

    def _tries(self) -> dict[str, Any]:
        return dict(
            stop=stop_after_attempt(1 + self.retries),
            wait=wait_random_exponential(multiplier=0.5, max=MAX_BACKOFF_S),
            retry=retry_if_exception(self._may_pass),
            before_sleep=self._before_sleep,
            reraise=True,
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Returns context in which Ray's errors become the configured one."""
        try:
            yield
        except ModelUnavailable:
            raise
        except (TimeoutError, RayError, RayServeException) as error:
            section = self._section
            raise self._unavailable(
                f"{self._what} app {self.app!r} gave no answer in {1 + self.retries} tries: "
                f"{type(error).__name__}: {first_line(error)}",
                f"look at `serve status`, or raise --{section}.timeout-s, --{section}.retries or "
                f"--{section}.num-replicas",
            ) from error

    def _may_pass(self, error: BaseException) -> bool:
        is_final = isinstance(error, ModelUnavailable) and error.is_final
        return isinstance(error, _PASSING) and not is_final and not self._is_closed

    def connect(self) -> DeploymentHandle:
        """Returns the app's handle.

        Raises:
            ModelUnavailable: there is no such app; an error of the configured class.
        """
        handle = self.handle  # another thread may clear it
        if handle is None:
            try:
                handle = self.handle = serve.get_app_handle(self.app)
            except RayServeException as error:
                raise self._unavailable(
                    f"no Serve app {self.app!r} on this cluster",
                    "start one with `rlvlm serve` or `serve deploy serve_apps/pocket.yaml`, or leave out --serve.app",
                ) from error
        return handle

    def _try_once(self, method: str, args: tuple[Any, ...], check: Callable[[Any], Any] | None) -> Any:
        """Makes one try. A full queue is no failure: the request is repeated until the try's time is over."""
        give_up = time.monotonic() + self._timeout_s
        while True:
            if self._is_closed:
                raise self._unavailable(f"{self._what} app {self.app!r} is not asked any more: the run is over", "")
            # the handle chooses among living replicas, so the next try goes to another one
            response = getattr(self.connect(), method).remote(*args)
            try:
                outcome = self._wait(response)
            except TimeoutError:
                response.cancel()  # otherwise the replica would compute an unwanted answer
                raise
            except DeploymentUnavailableError:
                self.handle = None  # it names a deployment, and a redeployed app may have another one
                raise
            except BackPressureError:
                self._note(REFUSED)
                if time.monotonic() > give_up:
                    raise
                # staggered, because callers that return together are refused together
                time.sleep(random.uniform(*REFUSED_WAIT_S))
                continue
            if isinstance(outcome, RunError):  # errors are returned as values, see `JudgeReplica`
                raise outcome
            return check(outcome) if check else outcome

    async def _stream_once(self, method: str, bag: Bag) -> None:
        """Makes one try, as `_try_once` does."""
        give_up = time.monotonic() + self._timeout_s
        while True:
            handle = self.handle or await asyncio.to_thread(self.connect)
            response: Any = handle.options(method_name=method, stream=True).remote(bag)
            try:
                async with asyncio.timeout(self._timeout_s):
                    async for answers in response:
                        bag.take(answers)
                return bag.end_try()
            except (TimeoutError, asyncio.CancelledError):
                response.cancel()  # otherwise the replica would compute unwanted answers
                raise
            except DeploymentUnavailableError:
                self.handle = None
                raise
            except BackPressureError:
                self._note(REFUSED)
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(random.uniform(*REFUSED_WAIT_S))

    def _wait(self, response: DeploymentResponse[Any] | DeploymentResponseGenerator[Any]) -> Any:
        """Waits for the result in short intervals and returns it.

        Raises:
            TimeoutError: it did not come in time, or is no longer wanted; or the replica raised one.
        """
        give_up = time.monotonic() + self._timeout_s
        while True:
            left_s = give_up - time.monotonic()
            try:
                # one long wait could not be ended when the run is over: Ray's own cannot be interrupted from another
                # thread
                return response.result(timeout_s=max(min(_POLL_S, left_s), 0))
            except TimeoutError as error:
                # the replica's own TimeoutError is its answer; ours only ends this interval
                if isinstance(error, RayTaskError) or left_s <= _POLL_S or self._is_closed:
                    raise

    def _before_sleep(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        name = type(error).__name__
        self._note(name)
        logger.warning("%s app %s: try %d failed (%s); trying again", self._what, self.app, state.attempt_number, name)


class AsyncAppClient:
    """Client for a judge or policy on Serve, for an event loop with hundreds of waiting callers.

    Serve's own bounded queue decides about overload: its `BackPressureError` becomes a 429 at once, without a retry,
    because the caller knows better how long it can wait.

    Args:
        app: name of the Serve application; it may start later.
        timeout_s: maximum wait for one answer, over all tries, seconds.
        retries: tries after the first, if a replica died.
        what: kind of model behind it, for messages.
    """

    def __init__(self, app: str, timeout_s: float, retries: int, what: str = "judge") -> None:
        self._app = app
        self._what = what
        self._timeout_s = timeout_s
        self._retries = retries
        self._handle: DeploymentHandle | None = None

    async def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        return await self.ask("compare", list(queries))

    async def score(self, clips: Sequence[Clip]) -> list[Score]:
        return await self.ask("score", list(clips))

    async def stamp(self) -> Stamp:
        return await self.ask("stamp")

    async def generate(self, chat: Chat, max_new_tokens: int, temperature: float) -> str:
        replies = await self.ask("generate", [chat], max_new_tokens, temperature)
        return replies[0]

    async def ask(self, method: str, *args: Any) -> Any:
        """Returns the answer of one call.

        Raises:
            Refusal: overloaded (429), not running or broken (503), too slow (504), or an unsupported question (422).
        """
        retrying = AsyncRetrying(
            stop=stop_after_attempt(1 + self._retries),
            wait=wait_random_exponential(multiplier=0.2, max=5.0),
            retry=retry_if_exception_type(_DIED),
            reraise=True,
        )
        try:
            # all tries share one deadline: the HTTP caller waits no longer
            async with asyncio.timeout(self._timeout_s):
                outcome = await retrying(self._try_once, method, *args)
        except BackPressureError:
            raise overloaded(f"the {self._what}'s queue is full") from None
        except TimeoutError:
            message = f"the {self._what} did not answer within {self._timeout_s:g} s"
            raise Refusal(504, "deadline", message, "send fewer questions at once") from None
        except (RayError, RayServeException) as error:
            outcome = error
        if isinstance(outcome, UsageError):
            raise Refusal(422, "unsupported", str(outcome), outcome.fix)
        if isinstance(outcome, Exception):  # its message is for the operator only
            reason = outcome if isinstance(outcome, ModelUnavailable) else type(outcome).__name__
            logger.warning("%s app %s did not answer: %s", self._what, self._app, reason)
            message = f"the {self._what} does not answer now"
            raise Refusal(503, self._what, message, "try again; its operator sees why")
        return outcome

    async def _try_once(self, method: str, *args: Any) -> Any:
        handle = self._handle  # another request may clear it
        if handle is None:
            # the look-up asks Serve's controller and blocks, which the event loop must not
            handle = self._handle = await asyncio.to_thread(serve.get_app_handle, self._app)
        response = getattr(handle, method).remote(*args)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except _DIED as error:
            if isinstance(error, DeploymentUnavailableError):
                self._handle = None  # it names a deployment, and a redeployed app may have another one
            logger.warning("%s app %s: a replica died", self._what, self._app)
            raise
