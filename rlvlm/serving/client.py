"""A judge that runs elsewhere, reached by the name of its Serve app; looks like a local one."""

import logging
import random
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rlvlm.errors import JudgeUnavailable, UnsupportedQuestion, first_line
from rlvlm.serving.envelope import Kind, Receipt, Request, digest, request_key
from rlvlm.serving.monitoring import ClientMetrics
from rlvlm.types.judging import Clip, Query, Score, Stamp, Verdict
from rlvlm.vlms.chats import Chat

logger = logging.getLogger(__name__)

IN_FLIGHT = 4
"""Requests under way at once: enough that a replica never waits for the next one."""
MAX_BACKOFF_S = 10.0
REFUSED_WAIT_S = (0.1, 0.5)
"""Least and longest pause after a request met a full queue."""
_PASSING = (RayActorError, BackPressureError, DeploymentUnavailableError, TimeoutError, JudgeUnavailable)
"""Failures that another try may mend: a replica died or is overloaded, slow, or about to be replaced."""

Item = TypeVar("Item")


class ServedJudge:
    """The `Judge` protocol over a `DeploymentHandle`.

    Questions go out in pieces of `batch_size`, cut by position alone: with one client the model sees the same batches
    whatever the timing, so answers repeat to the bit. A piece that is lost with its replica is sent again under the
    same key, so that no replica judges it twice, and every answer comes with a digest of the pictures it is about, so
    that none is taken for another's. The object pickles; the handle is looked up where it is used.
    """

    def __init__(
        self,
        app: str,
        *,
        timeout_s: float = 120.0,
        retries: int = 4,
        batch_size: int = 16,
        in_flight: int = IN_FLIGHT,
        run: str = "",
    ) -> None:
        """Remembers where to ask; nothing is contacted yet.

        Args:
            app: name of the Serve application.
            timeout_s: longest wait for one request's answer.
            retries: tries after the first.
            batch_size: questions per request.
            in_flight: requests under way at once.
            run: who asks; the runs on one server get even shares of it. Empty makes up a name.
        """
        self._app = app
        self._in_flight = in_flight
        self._run = run or f"client-{uuid.uuid4().hex[:8]}"
        self._timeout_s = timeout_s
        self._retries = retries
        self._batch_size = batch_size
        self._handle: DeploymentHandle | None = None
        self._stamp: Stamp | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_metrics"} | {"_handle": None}

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
        return self._in_pieces(queries, partial(self._ask_piece, "compare", uuid.uuid4().hex))

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order.

        Raises:
            JudgeUnavailable: a request was not answered within its tries.
        """
        return self._in_pieces(clips, partial(self._ask_piece, "score", uuid.uuid4().hex))

    def generate(self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float) -> list[str]:
        """The model's reply to each chat, in order; see `judges.judge.Generator`.

        Raises:
            UnsupportedQuestion: the judge cannot write, or cannot read one of the chats.
            JudgeUnavailable: a request was not answered within its tries.
        """
        return self._in_pieces(chats, lambda _, piece: self._request("generate", piece, max_new_tokens, temperature))

    @cached_property
    def _metrics(self) -> ClientMetrics:
        return ClientMetrics()

    def _in_pieces(self, items: Sequence[Item], ask: Callable[[int, list[Item]], list[Any]]) -> list[Any]:
        """Sends the items in pieces, several at a time, and joins the answers in order."""
        if not items:
            return []
        pieces = [list(items[start : start + self._batch_size]) for start in range(0, len(items), self._batch_size)]
        self._connect()
        with ThreadPoolExecutor(min(self._in_flight, len(pieces)), thread_name_prefix="judge-request") as pool:
            parts = list(pool.map(ask, range(len(pieces)), pieces))
        return [answer for part in parts for answer in part]

    def _ask_piece(self, kind: Kind, call: str, index: int, items: list[Any]) -> list[Any]:
        """The answers to one piece of a call, once they are known to be about the pictures that were sent."""
        digests = [digest(item) for item in items]
        request = Request(key=request_key(call, index, digests), run=self._run, kind=kind, items=items)

        def opened(receipt: Receipt) -> list[Any]:
            if receipt.digests != digests or len(receipt.answers) != len(digests):
                self._metrics.crossed.inc(1, {"run": self._run})
                raise JudgeUnavailable(
                    f"judge app {self._app!r} answered a question that was not asked",
                    "client and server must run the same version of rlvlm",
                )
            return receipt.answers

        return self._request("ask", request, check=opened)

    def _request(self, method: str, *args: Any, check: Callable[[Any], Any] | None = None) -> Any:
        """One request's answer, after as many tries as it takes."""
        retrying = Retrying(
            stop=stop_after_attempt(1 + self._retries),
            wait=wait_random_exponential(multiplier=0.5, max=MAX_BACKOFF_S),
            retry=retry_if_exception_type(_PASSING),
            before_sleep=self._note_retry,
            reraise=True,
        )
        handle = self._connect()
        try:
            return retrying(self._try_once, getattr(handle, method), args, check)
        except JudgeUnavailable:
            raise
        except (*_PASSING, RayTaskError, RayServeException) as error:
            raise JudgeUnavailable(
                f"judge app {self._app!r} gave no answer in {1 + self._retries} tries: "
                f"{type(error).__name__}: {first_line(error)}",
                "look at `serve status`, or raise --serve.timeout-s, --serve.retries or --serve.num-replicas",
            ) from error

    def _try_once(self, method: DeploymentHandle, args: tuple[Any, ...], check: Callable[[Any], Any] | None) -> Any:
        """One try. A full queue is no failure: it is met again soon, until the try's time is over."""
        give_up = time.monotonic() + self._timeout_s
        while True:
            response = method.remote(*args)
            try:
                outcome = response.result(timeout_s=self._timeout_s)
            except TimeoutError:
                response.cancel()
                raise
            except BackPressureError:
                self._metrics.refused.inc(1, {"run": self._run})
                if time.monotonic() > give_up:
                    raise
                time.sleep(random.uniform(*REFUSED_WAIT_S))
                continue
            if isinstance(outcome, JudgeUnavailable | UnsupportedQuestion):
                raise outcome
            return check(outcome) if check else outcome

    def _connect(self) -> DeploymentHandle:
        """The app's handle, looked up on first use in this process."""
        if self._handle is None:
            try:
                self._handle = serve.get_app_handle(self._app)
            except RayServeException as error:
                raise JudgeUnavailable(
                    f"no Serve app {self._app!r} on this cluster",
                    "start one with `rlvlm serve` or `serve deploy serve_apps/pocket.yaml`, or leave out --serve.app",
                ) from error
        return self._handle

    def _note_retry(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        self._metrics.retries.inc(1, {"run": self._run, "reason": type(error).__name__})
        logger.warning(
            "judge app %s: try %d failed (%s); trying again", self._app, state.attempt_number, type(error).__name__
        )
