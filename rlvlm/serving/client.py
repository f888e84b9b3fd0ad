"""The judge on Serve as runs ask it. Answers carry the digests of their questions, so that none is mistaken for
another's (`rlvlm_judge_crossed`).
"""

import hashlib
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

import numpy as np
from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_random_exponential

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.core.steps import Frames
from rlvlm.judges.goal_image import with_goal_image
from rlvlm.judges.judge import Judge, Tell
from rlvlm.serving.app_client import MAX_BACKOFF_S, REFUSED, AppClient
from rlvlm.serving.monitoring import ClientMetrics
from rlvlm.vlms.chats import Chat

IN_FLIGHT = 4
"""Number of concurrent requests: enough that a replica never waits for the next one."""

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


def answering_judge(app: str, image: Frames | None) -> Judge:
    """Returns the client of a Serve app that has answered once, as a fallback if the run's own judge is gone.

    Args:
        app: name of the app.
        image: goal image, shown with every question; None: none.

    Raises:
        JudgeUnavailable: there is no such app, or it does not answer.
    """
    judge = ServedJudge(app)
    try:
        _ = judge.stamp
    except JudgeUnavailable as error:
        fix = "start it with `rlvlm serve`, or leave out --reward.fallback-judge"
        raise JudgeUnavailable(f"reward.fallback_judge: {error}", fix) from error
    return with_goal_image(judge, image)
