"""A judge that runs elsewhere, reached by the name of its Serve app; looks like a local one."""

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Clip, Query, Score, Stamp, Verdict
from rlvlm.serving.calls import REFUSED, AppCalls
from rlvlm.serving.envelope import Kind, Receipt, Request, digest, request_key
from rlvlm.serving.monitoring import ClientMetrics
from rlvlm.vlms.chats import Chat

IN_FLIGHT = 4
"""Requests under way at once: enough that a replica never waits for the next one."""

Item = TypeVar("Item")


class ServedJudge:
    """The `Judge` protocol over a `DeploymentHandle`.

    Questions go out in pieces of `batch_size`, cut by position alone: with one client the model sees the same batches
    whatever the timing, so answers repeat to the bit. A piece that is lost with its replica is sent again under the
    same key, so that no replica judges it twice, and every answer comes with a digest of the images it is about, so
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
        self._batch_size = batch_size
        self._calls = AppCalls(
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
        return {name: value for name, value in self.__dict__.items() if name != "_metrics"}

    @property
    def stamp(self) -> Stamp:
        """Where the answers come from, asked once.

        Raises:
            JudgeUnavailable: the app does not answer.
        """
        stamp = self._stamp or self._calls.call("stamp")
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
        return self._in_pieces(chats, lambda _, piece: self._calls.call("generate", piece, max_new_tokens, temperature))

    def hang_up(self) -> None:
        """Ends what is asked in this process, and refuses more; see `AppCalls.hang_up`."""
        self._calls.hang_up()

    @cached_property
    def _metrics(self) -> ClientMetrics:
        return ClientMetrics()

    def _in_pieces(self, items: Sequence[Item], ask: Callable[[int, list[Item]], list[Any]]) -> list[Any]:
        """Sends the items in pieces, several at a time, and joins the answers in order."""
        if not items:
            return []
        pieces = [list(items[start : start + self._batch_size]) for start in range(0, len(items), self._batch_size)]
        self._calls.connect()
        with ThreadPoolExecutor(min(self._in_flight, len(pieces)), thread_name_prefix="judge-request") as pool:
            parts = list(pool.map(ask, range(len(pieces)), pieces))
        return [answer for part in parts for answer in part]

    def _ask_piece(self, kind: Kind, call: str, index: int, items: list[Any]) -> list[Any]:
        """The answers to one piece of a call, once they are known to be about the images that were sent."""
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

        return self._calls.call("ask", request, check=opened)

    def _note(self, reason: str) -> None:
        if reason == REFUSED:
            self._metrics.refused.inc(1, {"run": self._run})
        else:
            self._metrics.retries.inc(1, {"run": self._run, "reason": reason})
