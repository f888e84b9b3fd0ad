"""A judge that runs elsewhere, reached by the name of its Serve app; looks like a local one."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rlvlm.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.judges.prompts import Chat
from rlvlm.types import Clip, Query, Score, Stamp, Verdict

logger = logging.getLogger(__name__)

IN_FLIGHT = 4
"""Requests under way at once: enough that a replica never waits for the next one."""
MAX_BACKOFF_S = 10.0
_PASSING = (RayActorError, BackPressureError, DeploymentUnavailableError, TimeoutError, JudgeUnavailable)
"""Failures that another try may mend: a replica died or is overloaded, slow, or about to be replaced."""

Item = TypeVar("Item", Query, Clip, Chat)


class ServedJudge:
    """The `Judge` protocol over a `DeploymentHandle`.

    Questions go out in pieces of `batch_size`, cut by position alone: with one client the model sees the same batches
    whatever the timing, so answers repeat to the bit. A piece that is lost with its replica is sent again. The object
    pickles; the handle is looked up where it is used.
    """

    def __init__(self, app: str, *, timeout_s: float = 120.0, retries: int = 4, batch_size: int = 16) -> None:
        """Remembers where to ask; nothing is contacted yet.

        Args:
            app: name of the Serve application.
            timeout_s: longest wait for one request's answer.
            retries: tries after the first.
            batch_size: questions per request.
        """
        self._app = app
        self._timeout_s = timeout_s
        self._retries = retries
        self._batch_size = batch_size
        self._handle: DeploymentHandle | None = None
        self._stamp: Stamp | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handle": None}

    @property
    def stamp(self) -> Stamp:
        """Where the answers come from, asked once.

        Raises:
            JudgeUnavailable: the app does not answer.
        """
        stamp = self._stamp or self._request("stamp")
        self._stamp = stamp
        return stamp

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order.

        Raises:
            JudgeUnavailable: a request was not answered within its tries.
        """
        return self._ask("compare", queries)

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order.

        Raises:
            JudgeUnavailable: a request was not answered within its tries.
        """
        return self._ask("score", clips)

    def generate(self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float) -> list[str]:
        """The model's reply to each chat, in order; see `judges.judge.Generator`.

        Raises:
            UnsupportedQuestion: the judge cannot write, or cannot read one of the chats.
            JudgeUnavailable: a request was not answered within its tries.
        """
        return self._ask("generate", chats, max_new_tokens, temperature)

    def _ask(self, method: str, items: Sequence[Item], *args: Any) -> list[Any]:
        """Sends the items in pieces, several at a time, and joins the answers in order."""
        if not items:
            return []
        pieces = [list(items[start : start + self._batch_size]) for start in range(0, len(items), self._batch_size)]
        self._connect()
        with ThreadPoolExecutor(min(IN_FLIGHT, len(pieces)), thread_name_prefix="judge-request") as pool:
            parts = list(pool.map(lambda piece: self._request(method, piece, *args), pieces))
        return [answer for part in parts for answer in part]

    def _request(self, method: str, *args: Any) -> Any:
        """One request's answer, after as many tries as it takes."""
        retrying = Retrying(
            stop=stop_after_attempt(1 + self._retries),
            wait=wait_random_exponential(multiplier=0.5, max=MAX_BACKOFF_S),
            retry=retry_if_exception_type(_PASSING),
            before_sleep=self._log_retry,
            reraise=True,
        )
        handle = self._connect()
        try:
            return retrying(self._try_once, getattr(handle, method), *args)
        except JudgeUnavailable:
            raise
        except (*_PASSING, RayTaskError, RayServeException) as error:
            raise JudgeUnavailable(
                f"judge app {self._app!r} gave no answer in {1 + self._retries} tries: {_first_line(error)}",
                "look at `serve status`, or raise --serve.timeout-s, --serve.retries or --serve.num-replicas",
            ) from error

    def _try_once(self, method: DeploymentHandle, *args: Any) -> Any:
        response = method.remote(*args)
        try:
            outcome = response.result(timeout_s=self._timeout_s)
        except TimeoutError:
            response.cancel()
            raise
        if isinstance(outcome, JudgeUnavailable | UnsupportedQuestion):
            raise outcome
        return outcome

    def _connect(self) -> DeploymentHandle:
        """The app's handle, looked up on first use in this process."""
        if self._handle is None:
            try:
                self._handle = serve.get_app_handle(self._app)
            except RayServeException as error:
                raise JudgeUnavailable(
                    f"no Serve app {self._app!r} on this cluster",
                    "start one with `serve deploy serve_apps/judge.yaml`, or leave out --serve.app",
                ) from error
        return self._handle

    def _log_retry(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        logger.warning("judge app %s: try %d failed (%s); trying again", self._app, state.attempt_number,
                       type(error).__name__)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
