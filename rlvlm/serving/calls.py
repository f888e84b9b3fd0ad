"""One request to a Serve app by its name, tried again where another try may mend it. Used by the clients."""

import logging
import random
import time
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from rlvlm.core.errors import ModelUnavailable, RunError, first_line

logger = logging.getLogger(__name__)

REFUSED = "refused"
MAX_BACKOFF_S = 10.0
REFUSED_WAIT_S = (0.1, 0.5)
"""Least and longest pause after a request met a full queue."""
DIED = (RayActorError, NodeDiedError, ObjectLostError, DeploymentUnavailableError)
"""A replica died, its node with the answer on it, or the app has a deployment of another name by now."""
_PASSING = (*DIED, BackPressureError, TimeoutError, ModelUnavailable)
"""Failures that another try may mend: a replica died or is overloaded, slow, or about to be replaced."""
_LOOK_UP_S = 1.0
"""How soon a request that waits sees that nobody wants its answer any more."""


class AppCalls:
    """Calls of one app's methods. It pickles; the app's handle is looked up where it is used.

    Args:
        app: name of the Serve application.
        what: is behind it, for messages: `judge`.
        section: of the options that say where it runs: `serve`.
        unavailable: raised when no try was answered.
        timeout_s: longest wait for one request's answer.
        retries: tries after the first.
        note: called each time a request is sent again, with the name of what went wrong; `REFUSED` for a full queue.
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
        """Looked up on first use in this process."""
        self._what, self._section, self._unavailable = what, section, unavailable
        self._timeout_s = timeout_s
        self._retries = retries
        self._note = note
        self._is_over = False

    def hang_up(self) -> None:
        """Ends the requests under way in this process, and refuses new ones: whoever asked is done.

        A thread that waited on for an answer would keep the process alive as long.
        """
        self._is_over = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"handle": None}

    def call(self, method: str, *args: Any, check: Callable[[Any], Any] | None = None) -> Any:
        """One request's answer, after as many tries as it takes.

        Args:
            method: of the replica.
            args: its arguments.
            check: makes the result of the answer; what it raises counts as that try's failure.

        Raises:
            ModelUnavailable: no try was answered; of the kind that was asked for.
            RunError: what the replica answered with, where another try would not help.
        """
        retrying = Retrying(
            stop=stop_after_attempt(1 + self._retries),
            wait=wait_random_exponential(multiplier=0.5, max=MAX_BACKOFF_S),
            retry=retry_if_exception(lambda error: isinstance(error, _PASSING) and not self._is_over),
            before_sleep=self._before_sleep,
            reraise=True,
        )
        self.connect()  # an app that is not there is told at once, and not tried again
        try:
            return retrying(self._try_once, method, args, check)
        except ModelUnavailable:
            raise
        except (TimeoutError, RayError, RayServeException) as error:
            section = self._section
            raise self._unavailable(
                f"{self._what} app {self.app!r} gave no answer in {1 + self._retries} tries: "
                f"{type(error).__name__}: {first_line(error)}",
                f"look at `serve status`, or raise --{section}.timeout-s, --{section}.retries or "
                f"--{section}.num-replicas",
            ) from error

    def _try_once(self, method: str, args: tuple[Any, ...], check: Callable[[Any], Any] | None) -> Any:
        """One try. A full queue is no failure: it is met again soon, until the try's time is over."""
        give_up = time.monotonic() + self._timeout_s
        while True:
            if self._is_over:
                raise self._unavailable(f"{self._what} app {self.app!r} is not asked any more: the run is over", "")
            response = getattr(self.connect(), method).remote(*args)
            try:
                outcome = self._wait(response)
            except TimeoutError:
                response.cancel()
                raise
            except DeploymentUnavailableError:
                self.handle = None  # it names a deployment, and an app that was deployed anew may have another one
                raise
            except BackPressureError:
                self._note(REFUSED)
                if time.monotonic() > give_up:
                    raise
                time.sleep(random.uniform(*REFUSED_WAIT_S))
                continue
            if isinstance(outcome, RunError):
                raise outcome
            return check(outcome) if check else outcome

    def _wait(self, response: DeploymentResponse[Any] | DeploymentResponseGenerator[Any]) -> Any:
        """The result, waited for in short pieces.

        Raises:
            TimeoutError: it did not come in time, or nobody wants it any more; or the replica raised one.
        """
        give_up = time.monotonic() + self._timeout_s
        while True:
            left_s = give_up - time.monotonic()
            try:
                return response.result(timeout_s=max(min(_LOOK_UP_S, left_s), 0))
            except TimeoutError as error:
                if isinstance(error, RayTaskError) or left_s <= _LOOK_UP_S or self._is_over:
                    raise

    def connect(self) -> DeploymentHandle:
        """The app's handle.

        Raises:
            ModelUnavailable: there is no such app; of the kind that was asked for.
        """
        handle = self.handle  # another thread may take it away
        if handle is None:
            try:
                handle = self.handle = serve.get_app_handle(self.app)
            except RayServeException as error:
                raise self._unavailable(
                    f"no Serve app {self.app!r} on this cluster",
                    "start one with `rlvlm serve` or `serve deploy serve_apps/pocket.yaml`, or leave out --serve.app",
                ) from error
        return handle

    def _before_sleep(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        self._note(type(error).__name__)
        logger.warning(
            "%s app %s: try %d failed (%s); trying again", self._what, self.app, state.attempt_number,
            type(error).__name__,
        )  # fmt: skip
