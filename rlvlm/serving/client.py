"""Clients of a judge or policy on Serve, by app name: they retry if its replica died or its queue was full. Used by
runs from threads, and by the HTTP server from its event loop.

Serve does not retry a request that a replica had accepted: without this `tests/faults/test_served_judges.py` loses
the batches of every replica it kills. Answers carry the digests of their questions, so that none is mistaken for
another's (`rlvlm_judge_crossed`).
"""

import asyncio
import hashlib
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
    retry_if_result,
    stop_after_attempt,
    wait_random_exponential,
)

from rlvlm.core.errors import JudgeUnavailable, ModelUnavailable, RunError, UsageError, first_line
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.judges.judge import Tell
from rlvlm.serving.bags import Bag
from rlvlm.serving.monitoring import ClientMetrics
from rlvlm.serving.refusal import Refusal, overloaded
from rlvlm.vlms.chats import Chat

logger = logging.getLogger(__name__)

IN_FLIGHT = 4
"""Number of concurrent requests: enough that a replica never waits for the next one."""
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

Item = TypeVar("Item")
Kind = Literal["compare", "score"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Questions of one run, sent together."""

    key: str
    """Key shared by all tries of this request: a replica that receives it twice judges once."""
    run: str
    """Name of the asking run; runs share a replica evenly."""
    kind: Kind
    items: list[Any]
    """Queries or clips to judge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """Answers to one request, with the digests of its questions."""

    answers: list[Any]
    """A `Verdict` or `Score` for each question; a `JudgeUnavailable` for one that came after the end of a budget."""
    digests: list[bytes]
    """`digest` of each question as received by the replica."""


def digest(item: Query | Clip) -> bytes:
    """Returns 32 bytes that two questions share only if goal, action and all images are equal."""
    clips = [item.frames] if isinstance(item, Clip) else [item.left, item.right]
    # a goal image is part of the question: otherwise two goals with the same words would share answers
    clips += [item.goal_picture] if item.goal_picture is not None else []
    words = (item.goal, item.action) if isinstance(item, Clip) and item.action else item.goal
    # shapes are hashed too, or one clip of two frames and two clips of one frame would have the same bytes
    content = hashlib.sha256(repr((type(item).__name__, words, [clip.shape for clip in clips])).encode())
    for clip in clips:
        content.update(np.ascontiguousarray(clip).data)
    return content.digest()


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


class ServedJudge:
    """The `Judge` protocol over a Serve app.

    Questions are sent in pieces of `batch_size`, cut by position alone: with a single client the model sees the same
    batches whatever the timing, so answers repeat to the bit. A piece lost with its replica is sent again with the same
    key, so that no replica judges it twice. The object pickles.
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
        """Stores the settings; connects to nothing yet.

        Args:
            app: name of the Serve application.
            timeout_s: maximum wait for one request's answer, seconds.
            retries: tries after the first.
            batch_size: questions per request.
            in_flight: number of concurrent requests.
            run: name of the asking run; runs share a server evenly. If empty, a name is generated.
        """
        self.app = app
        self.at_once = in_flight * batch_size
        """See `judge.questions_at_once`."""
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
        # counters register with the process that makes them, and locks do not pickle
        return {name: value for name, value in self.__dict__.items() if name != "_metrics"}

    @property
    def stamp(self) -> Stamp:
        """Identity of the judge, asked once.

        Raises:
            JudgeUnavailable: the app does not answer.
        """
        stamp = self._stamp or self._client.call("stamp")
        self._stamp = stamp
        return stamp

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """Returns one verdict per query, in order.

        Raises:
            JudgeUnavailable: a request was not answered within its tries.
        """
        return self.tell_each(queries, lambda *_: None)

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        return self.tell_each(clips, lambda *_: None)

    def tell_each(self, items: Sequence[Query] | Sequence[Clip], tell: Tell) -> list[Any]:
        """Returns the answers of `compare` or `score`, in order, and tells those of each piece as soon as they are
        there; see `TellingJudge`.

        Raises:
            JudgeUnavailable: a request was not answered within its tries, or every question failed in all of them.
        """
        if not items:
            return []
        kind: Kind = "compare" if isinstance(items[0], Query) else "score"
        final: list[JudgeUnavailable] = []

        def ask(call: str, index: int, piece: list[Any]) -> list[Any]:
            if final:  # a wrong key or a spent budget fails every piece alike
                raise final[0]
            try:
                answers = self._ask_piece(kind, call, index, piece)
                lost = None
                for place, answer in enumerate(answers, start=index * self._batch_size):
                    if isinstance(answer, JudgeUnavailable):
                        lost = answer
                    else:
                        tell(place, answer)
                if lost is not None:
                    raise lost
            except JudgeUnavailable as error:
                final.extend([error] if error.is_final else [])
                raise
            return answers

        def is_outage(answers: Sequence[Verdict | Score]) -> bool:
            # one that was waited for in vain; a question that is refused has failed at once, and fails again
            return all(answer.status is Status.FAILED for answer in answers) and any(a.latency_s for a in answers)

        retrying = Retrying(
            stop=stop_after_attempt(1 + self._client.retries),
            wait=wait_random_exponential(multiplier=0.5, max=MAX_BACKOFF_S),
            retry=retry_if_result(is_outage),
            retry_error_callback=lambda state: state.outcome and state.outcome.result(),
        )
        answers = retrying(lambda: self._in_pieces(items, partial(ask, uuid.uuid4().hex)))
        if is_outage(answers):
            raise JudgeUnavailable(
                f"the judge failed on every one of {len(answers)} questions: {answers[0].text}",
                "look at its server; answers that came before are kept",
            )
        return answers

    def generate(self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float) -> list[str]:
        """Returns the model's reply to each chat, in order; see `judges.judge.Generator`.

        Raises:
            UnsupportedQuestion: the judge cannot generate text, or cannot read one of the chats.
            JudgeUnavailable: a request was not answered within its tries.
        """
        return self._in_pieces(
            chats, lambda _, piece: self._client.call("generate", piece, max_new_tokens, temperature)
        )

    def close(self) -> None:
        self._client.close()

    @cached_property
    def _metrics(self) -> ClientMetrics:
        return ClientMetrics()

    def _in_pieces(self, items: Sequence[Item], ask: Callable[[int, list[Item]], list[Any]]) -> list[Any]:
        """Sends the items in pieces, several at a time, and returns the answers in order."""
        if not items:
            return []
        # by position alone, so that the model sees the same batches in every run
        pieces = [list(items[start : start + self._batch_size]) for start in range(0, len(items), self._batch_size)]
        self._client.connect()
        # several concurrent pieces keep the replica busy while answers travel; `map` returns them in order
        with ThreadPoolExecutor(min(self._in_flight, len(pieces)), thread_name_prefix="judge-request") as pool:
            parts = list(pool.map(ask, range(len(pieces)), pieces))
        return [answer for part in parts for answer in part]

    def _ask_piece(self, kind: Kind, call: str, index: int, items: list[Any]) -> list[Any]:
        """Returns the answers to one piece of a call, after checking that they are about the images sent."""
        digests = [digest(item) for item in items]
        # call and index are part of the key: a sampling judge may be asked the same thing twice on purpose
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
