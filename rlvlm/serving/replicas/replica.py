"""One copy of a judge in a process of its own: the class that `deployments` puts behind Ray Serve."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion, first_line
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import ContinuousJudge, Generator, Judge
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.envelope import Receipt, Request, digest
from rlvlm.serving.monitoring import ReplicaMetrics
from rlvlm.serving.replicas.batches import FairBatches
from rlvlm.serving.replicas.gpu import assigned_device, check_share, limit_share, measured
from rlvlm.serving.replicas.slots import FairSlots
from rlvlm.serving.replicas.watchdog import Heartbeat, Watchdog, loading_within
from rlvlm.serving.startup import START_TIMEOUT_S, marked
from rlvlm.vlms.chats import Chat

logger = logging.getLogger(__name__)

BATCH_WAIT_S = 0.005
"""How long a request waits for others to share its batch."""
PROBE_EVERY_S = 30.0
"""An idle judge is asked something this often, to know that it would answer."""

Unanswered = JudgeUnavailable | UnsupportedQuestion
_UNANSWERED = (JudgeUnavailable, UnsupportedQuestion)
Outcome = list[Verdict] | list[Score] | Unanswered
"""What one request gets. An error travels as a value: raised, Serve would log it as a fault of the deployment."""
Builder = Callable[[JudgeConfig], Judge]


@dataclass(frozen=True, slots=True)
class _Chat:
    """A chat that is to be replied to."""

    chat: Chat
    max_new_tokens: int
    temperature: float


class JudgeReplica:
    """One copy of a judge. Requests are lists of questions; small ones are merged, and one thread runs the model, or
    an engine that batches by itself is given their questions one by one.
    """

    def __init__(self, config: JudgeConfig, placement: PlacementConfig, build: Builder = build_judge) -> None:
        """Loads the judge and asks it one question, so that the first caller does not wait for what loads late.

        Raises:
            RuntimeError: the judge cannot be loaded or does not answer; its one line carries the cause and the fix to
                `apps.start_judge`.
        """
        self._placement = placement
        # never probed: each question costs, and a new replica mends no outage of somebody else's
        self._is_paid = config.is_remote
        self._failure = ""
        self._last_answer = time.monotonic()
        self._probing: asyncio.Task[None] | None = None
        self._watchdog: Watchdog | None = None
        self._metrics = ReplicaMetrics()
        self._batch_size = config.batch_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="pictures")
        self._device = assigned_device(config.device)
        self._heartbeat = Heartbeat(waits_for_gpu=self._device.startswith("cuda"), is_elsewhere=config.runs_elsewhere)
        try:
            with loading_within(START_TIMEOUT_S):
                self._judge = self._thread.submit(self._load, replace(config, device=self._device), build).result()
        except _UNANSWERED as error:
            logger.exception("the judge cannot be loaded")
            raise marked(JudgeUnavailable(str(error), error.fix)) from error
        except Exception as error:  # whatever it is, Serve would hide it in a traceback
            logger.exception("the judge cannot be loaded")
            name, line = type(error).__name__, first_line(error)
            what = f"the judge cannot be loaded: {name}{'' if line == name else f': {line}'}"
            fix = "the traceback is in the replica's log in Ray's session folder"
            raise marked(JudgeUnavailable(what, fix)) from error
        self._queues: Mapping[str, FairBatches | FairSlots]
        if config.batches_itself:  # twice what is computed at once: meanwhile the next ones are made ready
            self._slots = FairSlots(self._ask_one, slots=2 * config.batch_size)
            self._queues = {"compare": self._slots, "score": self._slots}
        else:
            self._slots = None
            self._queues = {
                "compare": self._make_batches("compare", self._judge.compare),
                "score": self._make_batches("score", self._judge.score),
            }

    def __repr__(self) -> str:
        return f"JudgeReplica({self._judge.stamp.judge}, {self._judge.stamp.prompt})"

    async def stamp(self) -> Stamp:
        """Where the answers come from."""
        return self._judge.stamp

    async def ask(self, request: Request) -> Receipt | Unanswered:
        """The answers to one request, or the error that hit them all. What `ServedJudge` calls."""
        start = time.perf_counter()
        items, digests = await asyncio.get_running_loop().run_in_executor(self._helper, self._prepared, request)
        try:
            answers = await self._queues[request.kind].put(items, run=request.run, key=request.key)
        except _UNANSWERED as error:
            return error
        self._metrics.request(request.kind, request.run, answers, time.perf_counter() - start)
        return Receipt(answers=answers, digests=digests)

    async def compare(self, queries: list[Query]) -> Outcome:
        """One verdict per query, in order, or the error that hit them all. For callers that hold a plain handle."""
        return await self._ask_in_parts("compare", queries)

    async def score(self, clips: list[Clip]) -> Outcome:
        """One score per clip, in order, or the error that hit them all."""
        return await self._ask_in_parts("score", clips)

    async def generate(self, chats: list[Chat], max_new_tokens: int, temperature: float) -> list[str] | Unanswered:
        """The model's reply to each chat, in order, or the error that hit them all."""
        if not isinstance(self._judge, Generator):
            return UnsupportedQuestion(f"{self._judge.stamp.judge} cannot write text", "choose a chat model")
        if self._slots is not None:
            try:
                return await self._slots.put([_Chat(chat, max_new_tokens, temperature) for chat in chats])
            except _UNANSWERED as error:
                return error
        write = partial(self._judge.generate, max_new_tokens=max_new_tokens, temperature=temperature)
        replies: list[str] = []
        try:
            for part in self._parts(chats):
                replies += await self._run(write, part)
        except _UNANSWERED as error:
            return error
        return replies

    async def check_health(self) -> None:
        """Passes at once unless the judge is known to be broken; an idle judge is probed beside it.

        Serve asks this every few seconds and counts a late answer as a failure, so it never waits for the model: a
        model that is stuck is the watchdog's to find, one that breaks on its last questions shows here.

        Raises:
            RuntimeError: the judge answered nothing when it was last asked; after three such checks in a row Serve
                replaces the replica.
        """
        if self._watchdog is None:
            self._watchdog = Watchdog(
                self._heartbeat, stall_s=self._placement.stall_s, deadline_s=self._placement.timeout_s
            )
            self._watchdog.start(asyncio.get_running_loop())
        memory = measured(self._device)
        num_waiting = sum(queue.num_waiting for queue in set(self._queues.values()))
        self._metrics.state(num_waiting, memory.peak if memory else 0)
        is_idle = self._heartbeat.busy_since is None and time.monotonic() - self._last_answer > PROBE_EVERY_S
        if (is_idle or self._failure) and not self._is_paid and (self._probing is None or self._probing.done()):
            self._probing = asyncio.get_running_loop().create_task(self._probe())
        if self._failure:
            raise RuntimeError(f"the judge does not answer: {self._failure}")

    def _load(self, config: JudgeConfig, build: Builder) -> Judge:
        """The judge, in a process whose torch uses as many threads as the replica has cores, once it has answered.

        Raises:
            JudgeUnavailable: it cannot be loaded, does not answer, or does not fit its share of a GPU.
        """
        limit_share(config.device, self._placement.num_gpus)
        judge = build(config)
        if torch := sys.modules.get("torch"):  # a judge behind an API needs none, and its replica starts sooner
            torch.set_num_threads(max(1, int(self._placement.num_cpus)))
        if not self._is_paid:
            _check_probe(judge)
        check_share(config.device, self._placement.num_gpus)
        return judge

    def _make_batches(self, kind: str, ask: Callable[[Sequence[Any]], list[Any]]) -> FairBatches:
        async def run(items: list[Any]) -> list[Any]:
            self._metrics.batch_size.observe(len(items), {"kind": kind})
            return await self._run(ask, items)

        return FairBatches(run, batch_size=self._batch_size, wait_s=BATCH_WAIT_S)

    async def _ask_one(self, item: Query | Clip | _Chat) -> Verdict | Score | str:
        """Has a judge whose engine batches by itself answer one question among others."""
        judge = cast(ContinuousJudge, self._judge)
        with self._heartbeat.waiting():
            try:
                answer: Verdict | Score | str
                if isinstance(item, Query):
                    answer = await judge.compare_one(item)
                elif isinstance(item, Clip):
                    answer = await judge.score_one(item)
                else:
                    answer = await judge.generate_one(
                        item.chat, max_new_tokens=item.max_new_tokens, temperature=item.temperature
                    )
            except JudgeUnavailable as error:
                self._failure = str(error)
                raise
        self._failure, self._last_answer = "", time.monotonic()
        return answer

    def _prepared(self, request: Request) -> tuple[list[Any], list[bytes]]:
        """What can be done while the model is at work on others: the items with resized images, and their digests."""
        digests = [digest(item) for item in request.items]
        shrink = getattr(self._judge, "shrink", None)
        if shrink is None or request.kind != "compare":
            return request.items, digests
        return list(map(shrink, request.items)), digests

    async def _ask_in_parts(self, kind: Any, items: list[Any]) -> Any:
        requests = [Request(key="", run="", kind=kind, items=part) for part in self._parts(items)]
        joined: list[Any] = []
        for outcome in await asyncio.gather(*map(self.ask, requests)):
            if not isinstance(outcome, Receipt):
                return outcome
            joined += outcome.answers
        return joined

    async def _probe(self) -> None:
        """Learns whether the judge would answer; `_run` notes it."""
        try:
            await self._run(lambda judges: [_check_probe(judge) for judge in judges], [self._judge])
        except _UNANSWERED as error:
            logger.warning("the judge failed on a probe: %s", error)

    async def _run(self, ask: Callable[[Any], list[Any]], items: Sequence[Any]) -> list[Any]:
        """Runs the model in its one thread, so that the event loop stays free for health checks."""

        def timed() -> list[Any]:
            with self._heartbeat.working():
                return ask(items)

        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, timed)
        except JudgeUnavailable as error:
            self._failure = "" if self._is_paid else str(error)
            raise
        self._failure, self._last_answer = "", time.monotonic()
        return answers

    def _parts(self, items: list[Any]) -> list[list[Any]]:
        return [items[start : start + self._batch_size] for start in range(0, len(items), self._batch_size)]


def _check_probe(judge: Judge) -> None:
    """Asks one grey question, for a score where the judge compares nothing; a refusal shows that it is there.

    Raises:
        JudgeUnavailable: no answer came.
    """
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
