"""One copy of a judge in a process of its own."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.envs.registry import task_goal
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import ChatTask, ContinuousJudge, Generator, Judge
from rlvlm.pocket.models import known_tasks
from rlvlm.serving.client import Receipt, Request, digest
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.fair_queue import FairQueue
from rlvlm.serving.monitoring import ReplicaMetrics
from rlvlm.serving.replica import Replica, measured
from rlvlm.vlms.chats import Chat

logger = logging.getLogger(__name__)

BATCH_WAIT_S = 0.005
"""Time for which a request waits for others to share its batch, seconds."""
PROBE_EVERY_S = 30.0
"""Interval at which an idle judge is probed, seconds."""

Unanswered = JudgeUnavailable | UnsupportedQuestion
_UNANSWERED = (JudgeUnavailable, UnsupportedQuestion)
Builder = Callable[[JudgeConfig], Judge]


class JudgeReplica(Replica):
    """Requests are lists of questions. Small ones are merged and a thread runs the model; an engine that batches by
    itself gets their questions one by one.

    Errors are returned as values: Serve would log raised ones as faults of the deployment.
    """

    def __init__(self, config: JudgeConfig, placement: PlacementConfig, build: Builder = build_judge) -> None:
        """Loads the judge and asks it one question, so that the first caller does not wait for lazy loading.

        Raises:
            RuntimeError: the judge cannot be loaded or does not answer; the one-line message has the cause and the fix.
        """
        super().__init__(
            "judge",
            config.device,
            placement,
            section="serve",
            is_elsewhere=config.runs_elsewhere,
            unavailable=JudgeUnavailable,
        )
        # never probed: each question costs money, and a new replica would not end a provider's outage
        self._is_paid = config.is_remote
        self._failure = ""
        self._last_answer = time.monotonic()
        self._probing: asyncio.Task[None] | None = None
        self._metrics = ReplicaMetrics()
        self._batch_size = config.batch_size
        few = config.knows_few_tasks and config.untrained == "refuse"
        # a run refuses an unsuitable task before it starts; requests of other callers are refused here
        self._goals = frozenset(map(task_goal, known_tasks())) if few else frozenset[str]()
        # the model would idle while its own thread resized and hashed images
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="images")
        settled = replace(config, device=self._device)

        def load() -> Judge:
            judge = build(settled)
            if not self._is_paid:
                _probe(judge)
            return judge

        self._judge = self._load(load)
        self._queues: Mapping[str, FairQueue]
        if config.batches_itself:
            self._slots = FairQueue(self._ask_engine, batch_size=1, concurrency=config.max_at_once)
            self._queues = {"compare": self._slots, "score": self._slots}
        else:
            self._slots = None
            self._queues = {
                kind: FairQueue(partial(self._ask_batch, kind), batch_size=config.batch_size, wait_s=BATCH_WAIT_S)
                for kind in ("compare", "score")
            }

    def __repr__(self) -> str:
        return f"JudgeReplica({self._judge.stamp.judge}, {self._judge.stamp.prompt})"

    async def stamp(self) -> Stamp:
        return self._judge.stamp

    async def ask(self, request: Request) -> Receipt | Unanswered:
        """Returns the answers to one request, or the error of all of them. Called by `ServedJudge`."""
        start = time.perf_counter()
        items, digests = await asyncio.get_running_loop().run_in_executor(self._helper, self._prepared, request)
        try:
            answers = await self._queues[request.kind].put(items, run=request.run, key=request.key)
        except _UNANSWERED as error:
            return error
        given = [answer for answer in answers if not isinstance(answer, JudgeUnavailable)]
        if not given:
            return answers[0]
        self._metrics.request(request.kind, request.run, given, time.perf_counter() - start)
        return Receipt(answers=answers, digests=digests)

    async def compare(self, queries: list[Query]) -> list[Verdict] | Unanswered:
        """Returns one verdict per query, in order, or the error of all. For callers with a plain handle."""
        return await self._ask_in_parts("compare", queries)

    async def score(self, clips: list[Clip]) -> list[Score] | Unanswered:
        return await self._ask_in_parts("score", clips)

    async def generate(self, chats: list[Chat], max_new_tokens: int, temperature: float) -> list[str] | Unanswered:
        """Returns the model's reply to each chat, in order, or the error of all."""
        if not isinstance(self._judge, Generator):
            return UnsupportedQuestion(f"{self._judge.stamp.judge} cannot write text", "choose a chat model")
        write = partial(self._judge.generate, max_new_tokens=max_new_tokens, temperature=temperature)
        try:
            if self._slots is not None:  # an engine that batches by itself mixes questions and chats
                return await self._slots.put([ChatTask(chat, max_new_tokens, temperature) for chat in chats])
            return [reply for part in self._parts(chats) for reply in await self._watched(write, part)]
        except _UNANSWERED as error:
            return error

    async def check_health(self) -> None:
        """Returns at once, and raises if the judge is known to be stuck or broken; an idle judge is probed in parallel.

        Raises:
            RuntimeError: the judge is stuck, or did not answer the last question.
        """
        await super().check_health()
        peak, _ = measured(self._device) or (0, 0)
        self._metrics.state(sum(queue.num_waiting for queue in set(self._queues.values())), peak)
        # a judge that answers questions is healthy; only an idle one could be dead unnoticed
        is_idle = self._heartbeat.busy_since is None and time.monotonic() - self._last_answer > PROBE_EVERY_S
        if (is_idle or self._failure) and not self._is_paid and (self._probing is None or self._probing.done()):
            # in parallel, because the check must answer within 2.5 s; the next one sees the result
            self._probing = asyncio.get_running_loop().create_task(self._probe_beside())
        if self._failure:
            raise RuntimeError(f"the judge does not answer: {self._failure}")

    async def _ask_batch(self, kind: str, items: list[Any]) -> list[Any]:
        self._metrics.batch_size.observe(len(items), {"kind": kind})
        return await self._watched(self._judge.compare if kind == "compare" else self._judge.score, items)

    async def _ask_engine(self, items: list[Query | Clip | ChatTask]) -> list[Any]:
        """Passes one question to a judge whose engine batches by itself."""
        judge, [item] = cast(ContinuousJudge, self._judge), items
        try:
            with self._heartbeat.waiting(), self._noted():
                return [await judge.answer(item)]
        except JudgeUnavailable as error:
            if not error.is_final:
                raise
            return [error]  # alone: the answers to the rest of its request were paid for

    def _prepared(self, request: Request) -> tuple[list[Any], list[bytes]]:
        """Prepares a request while the model is busy: returns the items with resized images, and their digests."""
        # digests of the received images before resizing: the client compares them with those it sent
        digests = [digest(item) for item in request.items]
        shrink = getattr(self._judge, "shrink", None)
        if shrink is None or request.kind != "compare":
            return request.items, digests
        return list(map(shrink, request.items)), digests

    async def _ask_in_parts(self, kind: Any, items: list[Any]) -> Any:
        # not in `ask`: our own runs were refused before they started, and their users may have set --judge.untrained ok
        if self._goals and (unknown := [item.goal for item in items if item.goal not in self._goals]):
            return UnsupportedQuestion(
                f"the pocket judge was not trained on the goal {unknown[0]!r}: its answers mean nothing",
                f"it knows {sorted(self._goals)}; a general model knows more, and judge.untrained ok asks all the same",
            )
        # no key: a plain handle's calls are never sent again
        requests = [Request(key="", run="", kind=kind, items=part) for part in self._parts(items)]
        joined: list[Any] = []
        for outcome in await asyncio.gather(*map(self.ask, requests)):
            if not isinstance(outcome, Receipt):
                return outcome
            joined += outcome.answers
        return next((answer for answer in joined if isinstance(answer, JudgeUnavailable)), joined)

    async def _probe_beside(self) -> None:
        """Probes the judge; `_noted` stores the result."""
        try:
            await self._watched(_probe, self._judge)
        except JudgeUnavailable as error:
            logger.warning("the judge failed on a probe: %s", error)

    async def _watched(self, ask: Callable[[Any], Any], items: Any) -> Any:
        """Calls `_run` and notes whether the judge answers at all."""
        with self._noted():
            return await self._run(ask, items)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Returns context of a question, which notes for the health check whether the judge answers."""
        try:
            yield
        except JudgeUnavailable as error:
            # a provider's outage is no reason to replace a replica: a new one would not end it
            self._failure = "" if self._is_paid else str(error)
            raise
        self._failure, self._last_answer = "", time.monotonic()

    def _parts(self, items: Sequence[Any]) -> list[list[Any]]:
        return [list(items[start : start + self._batch_size]) for start in range(0, len(items), self._batch_size)]


def _probe(judge: Judge) -> None:
    """Asks one question about grey images, for a score if the judge compares nothing; a refusal shows that it is alive.

    Raises:
        JudgeUnavailable: no answer came.
    """
    # two equal images: any verdict will do, only an answer matters
    grey = np.full((1, 32, 32, 3), 128, np.uint8)
    answer: Verdict | Score
    try:
        answer = judge.compare([Query(goal="open the drawer", left=grey, right=grey)])[0]
    except UnsupportedQuestion:
        try:
            answer = judge.score([Clip(goal="open the drawer", frames=np.concatenate([grey, grey]), action="pull")])[0]
        except UnsupportedQuestion:
            return
    if answer.status is Status.FAILED:
        raise JudgeUnavailable(
            f"the judge failed on a first, easy question: {answer.text}",
            "look at the replica's log in Ray's session folder",
        )
