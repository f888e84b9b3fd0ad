"""A judge or policy on Serve, asked by its app's name: again where its replica died, later where its queue was full.
Used by runs from threads, and by the HTTP server from its event loop.

Serve tries no request again that a replica had accepted: without this `tests/faults/test_served_judges.py` loses the
batches of every replica that it kills. The digests of what was asked travel with the answers, so that none is taken for
another's (`rlvlm_judge_crossed`).
"""

import asyncio
import hashlib
import logging
import random
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

import numpy as np
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

from rlvlm.core.errors import JudgeUnavailable, ModelUnavailable, RunError, UsageError, first_line
from rlvlm.core.judging import Clip, Query, Score, Stamp, Verdict
from rlvlm.serving.monitoring import ClientMetrics
from rlvlm.serving.refusal import Refusal, overloaded
from rlvlm.vlms.chats import Chat

logger = logging.getLogger(__name__)

IN_FLIGHT = 4
"""Requests under way at once: enough that a replica never waits for the next one."""
REFUSED = "refused"
MAX_BACKOFF_S = 10.0
REFUSED_WAIT_S = (0.1, 0.5)
"""Least and longest pause after a request met a full queue."""
_DIED = (RayActorError, NodeDiedError, ObjectLostError, DeploymentUnavailableError)
"""A replica died, its node with the answer on it, or the app has a deployment of another name by now."""
_PASSING = (*_DIED, BackPressureError, TimeoutError, ModelUnavailable)
"""Failures after which another try may succeed: a replica died or is overloaded, slow, or about to be replaced."""
_POLL_S = 1.0
"""How soon a request that waits sees that its answer is no longer wanted."""

Item = TypeVar("Item")
Kind = Literal["compare", "score"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Some questions of one run, sent together."""

    key: str
    """The same for every try of this request: a replica that meets it twice judges once."""
    run: str
    """Name of the run that asks; runs share a replica evenly."""
    kind: Kind
    items: list[Any]
    """Queries or clips."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """The answers to one request, with what they are about."""

    answers: list[Verdict] | list[Score]
    digests: list[bytes]
    """`digest` of each question as the replica received it."""


def digest(item: Query | Clip) -> bytes:
    """32 bytes that two questions share only when goal, action and all images are the same."""
    clips = [item.frames] if isinstance(item, Clip) else [item.left, item.right]
    # a goal image is part of the question: without it two goals with the same words would share answers
    clips += [item.goal_picture] if item.goal_picture is not None else []
    words = (item.goal, item.action) if isinstance(item, Clip) and item.action else item.goal
    # shapes are hashed too, or one clip of two frames and two clips of one would be the same bytes
    content = hashlib.sha256(repr((type(item).__name__, words, [clip.shape for clip in clips])).encode())
    for clip in clips:
        content.update(np.ascontiguousarray(clip).data)
    return content.digest()


class AppClient:
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
        self._is_closed = False

    def close(self) -> None:
        """Ends the requests under way in this process, and refuses new ones: their callers are done.

        A thread that waited on for an answer would keep the process alive as long.
        """
        self._is_closed = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"handle": None}  # a handle belongs to the process that asked for it

    def call(self, method: str, *args: Any, check: Callable[[Any], Any] | None = None) -> Any:
        """What the replica's `method` answers, after as many tries as it takes. `check` makes the result of the answer;
        what it raises counts as that try's failure.

        Raises:
            ModelUnavailable: no try was answered; of the kind that was asked for.
            RunError: what the replica answered with, where another try would not help.
        """
        retrying = Retrying(
            stop=stop_after_attempt(1 + self._retries),
            wait=wait_random_exponential(multiplier=0.5, max=MAX_BACKOFF_S),
            retry=retry_if_exception(lambda error: isinstance(error, _PASSING) and not self._is_closed),
            before_sleep=self._before_sleep,
            reraise=True,
        )
        self.connect()  # an app that is not there is reported at once, and not tried again
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

    def _try_once(self, method: str, args: tuple[Any, ...], check: Callable[[Any], Any] | None) -> Any:
        """One try. A full queue is no failure: it is met again soon, until the try's time is over."""
        give_up = time.monotonic() + self._timeout_s
        while True:
            if self._is_closed:
                raise self._unavailable(f"{self._what} app {self.app!r} is not asked any more: the run is over", "")
            # the handle chooses among the replicas that live now, so the next try goes to another one
            response = getattr(self.connect(), method).remote(*args)
            try:
                outcome = self._wait(response)
            except TimeoutError:
                response.cancel()  # or the replica would go on for no caller
                raise
            except DeploymentUnavailableError:
                self.handle = None  # it names a deployment, and an app that was deployed anew may have another one
                raise
            except BackPressureError:
                self._note(REFUSED)
                if time.monotonic() > give_up:
                    raise
                # apart from each other: callers who come back together are refused together
                time.sleep(random.uniform(*REFUSED_WAIT_S))
                continue
            if isinstance(outcome, RunError):  # errors come as values, see `JudgeReplica`
                raise outcome
            return check(outcome) if check else outcome

    def _wait(self, response: DeploymentResponse[Any] | DeploymentResponseGenerator[Any]) -> Any:
        """The result, waited for in short pieces.

        Raises:
            TimeoutError: it did not come in time, or is no longer wanted; or the replica raised one.
        """
        give_up = time.monotonic() + self._timeout_s
        while True:
            left_s = give_up - time.monotonic()
            try:
                # one long wait could not be ended when the run is over: Ray's own has no way to be
                # interrupted from another thread
                return response.result(timeout_s=max(min(_POLL_S, left_s), 0))
            except TimeoutError as error:
                # the replica's own TimeoutError is its answer; ours only means that this piece of the wait is over
                if isinstance(error, RayTaskError) or left_s <= _POLL_S or self._is_closed:
                    raise

    def _before_sleep(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        name = type(error).__name__
        self._note(name)
        logger.warning("%s app %s: try %d failed (%s); trying again", self._what, self.app, state.attempt_number, name)


class ServedJudge:
    """The `Judge` protocol over a Serve app.

    Questions go out in pieces of `batch_size`, cut by position alone: with one client the model sees the same batches
    whatever the timing, so answers repeat to the bit. A piece that is lost with its replica is sent again under the
    same key, so that no replica judges it twice. The object pickles.
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
            run: name of the run that asks; the runs on one server get even shares of it. Empty makes up a name.
        """
        self.app = app
        """Name of the Serve application."""
        self._in_flight = in_flight
        self._run = run or f"client-{uuid.uuid4().hex[:8]}"
        self._batch_size = batch_size
        self._client = AppClient(
            app,
            what="judge",
            section="serve",
            unavailable=JudgeUnavailable,
            timeout_s=timeout_s,
            retries=retries,
            note=self._note,
        )
        self._stamp: Stamp | None = None

    def __getstate__(self) -> dict[str, Any]:
        # counters register with the process they are made in, and locks do not pickle
        return {name: value for name, value in self.__dict__.items() if name != "_metrics"}

    @property
    def stamp(self) -> Stamp:
        """Where the answers come from, asked once.

        Raises:
            JudgeUnavailable: the app does not answer.
        """
        stamp = self._stamp or self._client.call("stamp")
        self._stamp = stamp
        return stamp

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order.

        Raises:
            JudgeUnavailable: a request was not answered within its tries.
        """
        return self._in_pieces(queries, partial(self._ask_piece, "compare", uuid.uuid4().hex))

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order; raises as `compare` does."""
        return self._in_pieces(clips, partial(self._ask_piece, "score", uuid.uuid4().hex))

    def generate(self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float) -> list[str]:
        """The model's reply to each chat, in order; see `judges.judge.Generator`.

        Raises:
            UnsupportedQuestion: the judge cannot write, or cannot read one of the chats.
            JudgeUnavailable: a request was not answered within its tries.
        """
        return self._in_pieces(
            chats, lambda _, piece: self._client.call("generate", piece, max_new_tokens, temperature)
        )

    def close(self) -> None:
        """Ends what is asked in this process, and refuses more; see `AppClient.close`."""
        self._client.close()

    @cached_property
    def _metrics(self) -> ClientMetrics:
        return ClientMetrics()

    def _in_pieces(self, items: Sequence[Item], ask: Callable[[int, list[Item]], list[Any]]) -> list[Any]:
        """Sends the items in pieces, several at a time, and joins the answers in order."""
        if not items:
            return []
        # by position alone, so that the model sees the same batches in every run
        pieces = [list(items[start : start + self._batch_size]) for start in range(0, len(items), self._batch_size)]
        self._client.connect()
        # several pieces under way keep the replica busy while answers travel; `map` gives them back in order
        with ThreadPoolExecutor(min(self._in_flight, len(pieces)), thread_name_prefix="judge-request") as pool:
            parts = list(pool.map(ask, range(len(pieces)), pieces))
        return [answer for part in parts for answer in part]

    def _ask_piece(self, kind: Kind, call: str, index: int, items: list[Any]) -> list[Any]:
        """The answers to one piece of a call, once they are known to be about the images that were sent."""
        digests = [digest(item) for item in items]
        # call and place are part of the key: a sampling judge may be asked the same thing again on purpose
        key = f"{call}:{index}:{hashlib.sha256(b''.join(digests)).hexdigest()}"

        def opened(receipt: Receipt) -> list[Any]:
            if receipt.digests != digests or len(receipt.answers) != len(digests):
                self._metrics.crossed.inc(1, {"run": self._run})
                raise JudgeUnavailable(
                    f"judge app {self.app!r} answered a question that was not asked",
                    "client and server must run the same version of rlvlm",
                )
            return receipt.answers

        return self._client.call("ask", Request(key=key, run=self._run, kind=kind, items=items), check=opened)

    def _note(self, reason: str) -> None:
        if reason == REFUSED:
            self._metrics.refused.inc(1, {"run": self._run})
        else:
            self._metrics.retries.inc(1, {"run": self._run, "reason": reason})


class AsyncAppClient:
    """A judge or policy on Serve, asked from an event loop that hundreds of callers wait in.

    Serve's own bounded queue decides about overload: its `BackPressureError` becomes a 429 at once, and is not tried
    again here, where the caller knows better how long it can wait.

    Args:
        app: name of the Serve application; it may start later.
        timeout_s: longest wait for one answer, all tries together.
        retries: tries after the first, where a replica died.
        what: is behind it, for messages.
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

    async def generate(self, chat: Chat, max_new_tokens: int, temperature: float) -> str:
        replies = await self.ask("generate", [chat], max_new_tokens, temperature)
        return replies[0]

    async def ask(self, method: str, *args: Any) -> Any:
        """The answer of one call.

        Raises:
            Refusal: overloaded (429), not running or broken (503), too slow (504), or not to be asked this (422).
        """
        retrying = AsyncRetrying(
            stop=stop_after_attempt(1 + self._retries),
            wait=wait_random_exponential(multiplier=0.2, max=5.0),
            retry=retry_if_exception_type(_DIED),
            reraise=True,
        )
        try:
            # all tries share one deadline: the HTTP caller behind waits no longer
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
        if isinstance(outcome, Exception):  # what it says is the operator's to know
            reason = outcome if isinstance(outcome, ModelUnavailable) else type(outcome).__name__
            logger.warning("%s app %s did not answer: %s", self._what, self._app, reason)
            message = f"the {self._what} does not answer now"
            raise Refusal(503, self._what, message, "try again; its operator sees why")
        return outcome

    async def _try_once(self, method: str, *args: Any) -> Any:
        handle = self._handle  # another request may take it away
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
                self._handle = None  # it names a deployment, and an app that was deployed anew may have another one
            logger.warning("%s app %s: a replica died", self._what, self._app)
            raise
