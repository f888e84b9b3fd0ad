"""One copy of a judge in a process of its own."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.envs.registry import task_goal
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import ContinuousJudge, Generator, Judge
from rlvlm.pocket.models import known_tasks
from rlvlm.serving.client import Receipt, Request, digest
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.fair_queue import FairQueue
from rlvlm.serving.monitoring import ReplicaMetrics
from rlvlm.serving.replica import Replica, measured
from rlvlm.vlms.chats import Chat

logger = logging.getLogger(__name__)

BATCH_WAIT_S = 0.005
"""How long a request waits for others to share its batch."""
PROBE_EVERY_S = 30.0
"""An idle judge is asked something this often, to know that it would answer."""

Unanswered = JudgeUnavailable | UnsupportedQuestion
_UNANSWERED = (JudgeUnavailable, UnsupportedQuestion)
Builder = Callable[[JudgeConfig], Judge]


@dataclass(frozen=True, slots=True)
class _Chat:
    """A chat that is to be replied to."""

    chat: Chat
    max_new_tokens: int
    temperature: float


class JudgeReplica(Replica):
    """Requests are lists of questions; small ones are merged, and one thread runs the model, or an engine that batches
    by itself is given their questions one by one.

    An error travels to the caller as a value: raised, Serve would log it as a fault of the deployment.
    """

    def __init__(self, config: JudgeConfig, placement: PlacementConfig, build: Builder = build_judge) -> None:
        """Loads the judge and asks it one question, so that the first caller does not wait for what loads late.

        Raises:
            RuntimeError: the judge cannot be loaded or does not answer; its one line carries the cause and the fix.
        """
        super().__init__(
            "judge",
            config.device,
            placement,
            section="serve",
            is_elsewhere=config.runs_elsewhere,
            unavailable=JudgeUnavailable,
        )
        # never probed: each question costs, and a new replica would meet a provider's outage too
        self._is_paid = config.is_remote
        self._failure = ""
        self._last_answer = time.monotonic()
        self._probing: asyncio.Task[None] | None = None
        self._metrics = ReplicaMetrics()
        self._batch_size = config.batch_size
        few = config.knows_few_tasks and config.untrained == "refuse"
        # a run refuses a task that its judge does not know before it starts; other callers are met here
        self._goals = frozenset(map(task_goal, known_tasks())) if few else frozenset[str]()
        # resizing images and hashing them in the model's thread would leave the model idle meanwhile
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="images")
        settled = replace(config, device=self._device)

        def load() -> Judge:
            judge = build(settled)
            if not self._is_paid:
                _probe(judge)
            return judge

        self._judge = self._load(load)
        self._queues: Mapping[str, FairQueue]
        if config.batches_itself:  # twice what is computed at once: meanwhile the next ones are made ready
            self._slots = FairQueue(self._ask_engine, batch_size=1, concurrency=2 * config.batch_size)
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

    async def compare(self, queries: list[Query]) -> list[Verdict] | Unanswered:
        """One verdict per query, in order, or the error that hit them all. For callers that hold a plain handle."""
        return await self._ask_in_parts("compare", queries)

    async def score(self, clips: list[Clip]) -> list[Score] | Unanswered:
        """One score per clip, in order, or the error that hit them all."""
        return await self._ask_in_parts("score", clips)

    async def generate(self, chats: list[Chat], max_new_tokens: int, temperature: float) -> list[str] | Unanswered:
        """The model's reply to each chat, in order, or the error that hit them all."""
        if not isinstance(self._judge, Generator):
            return UnsupportedQuestion(f"{self._judge.stamp.judge} cannot write text", "choose a chat model")
        write = partial(self._judge.generate, max_new_tokens=max_new_tokens, temperature=temperature)
        try:
            if self._slots is not None:  # an engine batches by itself, questions and chats together
                return await self._slots.put([_Chat(chat, max_new_tokens, temperature) for chat in chats])
            return [reply for part in self._parts(chats) for reply in await self._watched(write, part)]
        except _UNANSWERED as error:
            return error

    async def check_health(self) -> None:
        """Returns at once, and raises if the judge is known to be stuck or broken; an idle judge is probed beside it.

        Raises:
            RuntimeError: the judge is stuck, or answered nothing when it was last asked.
        """
        await super().check_health()
        peak, _ = measured(self._device) or (0, 0)
        self._metrics.state(sum(queue.num_waiting for queue in set(self._queues.values())), peak)
        # a judge that answers questions is well; only an idle one could be dead unnoticed
        is_idle = self._heartbeat.busy_since is None and time.monotonic() - self._last_answer > PROBE_EVERY_S
        if (is_idle or self._failure) and not self._is_paid and (self._probing is None or self._probing.done()):
            # beside the check, which must answer within 2.5 s; the next one sees the result
            self._probing = asyncio.get_running_loop().create_task(self._probe_beside())
        if self._failure:
            raise RuntimeError(f"the judge does not answer: {self._failure}")

    async def _ask_batch(self, kind: str, items: list[Any]) -> list[Any]:
        self._metrics.batch_size.observe(len(items), {"kind": kind})
        return await self._watched(self._judge.compare if kind == "compare" else self._judge.score, items)

    async def _ask_engine(self, items: list[Query | Clip | _Chat]) -> list[Verdict | Score | str]:
        """Has a judge whose engine batches by itself answer one question among others."""
        judge, [item] = cast(ContinuousJudge, self._judge), items
        with self._heartbeat.waiting(), self._noted():
            if isinstance(item, Query):
                return [await judge.compare_one(item)]
            if isinstance(item, Clip):
                return [await judge.score_one(item)]
            wanted, temperature = item.max_new_tokens, item.temperature
            return [await judge.generate_one(item.chat, max_new_tokens=wanted, temperature=temperature)]

    def _prepared(self, request: Request) -> tuple[list[Any], list[bytes]]:
        """What can be done while the model is at work on others: the items with resized images, and their digests."""
        # of what came in, before it is made smaller: the client compares them with what it sent
        digests = [digest(item) for item in request.items]
        shrink = getattr(self._judge, "shrink", None)
        if shrink is None or request.kind != "compare":
            return request.items, digests
        return list(map(shrink, request.items)), digests

    async def _ask_in_parts(self, kind: Any, items: list[Any]) -> Any:
        # not in `ask`: our own runs were refused before they started, and a user may have said
        # --judge.untrained ok
        if self._goals and (unknown := [item.goal for item in items if item.goal not in self._goals]):
            return UnsupportedQuestion(
                f"the pocket judge was not trained on the goal {unknown[0]!r}: its answers mean nothing",
                f"it knows {sorted(self._goals)}; a general model knows more, and judge.untrained ok asks all the same",
            )
        # without a key: a plain handle's calls are never sent again
        requests = [Request(key="", run="", kind=kind, items=part) for part in self._parts(items)]
        joined: list[Any] = []
        for outcome in await asyncio.gather(*map(self.ask, requests)):
            if not isinstance(outcome, Receipt):
                return outcome
            joined += outcome.answers
        return joined

    async def _probe_beside(self) -> None:
        """Learns whether the judge would answer, and leaves the note to `_noted`."""
        try:
            await self._watched(_probe, self._judge)
        except JudgeUnavailable as error:
            logger.warning("the judge failed on a probe: %s", error)

    async def _watched(self, ask: Callable[[Any], Any], items: Any) -> Any:
        """`_run`, with a note of whether the judge answers at all."""
        with self._noted():
            return await self._run(ask, items)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Around a question: notes for the health check whether the judge answers."""
        try:
            yield
        except JudgeUnavailable as error:
            # a provider's outage is no reason to replace a replica: a new one would meet it too
            self._failure = "" if self._is_paid else str(error)
            raise
        self._failure, self._last_answer = "", time.monotonic()

    def _parts(self, items: Sequence[Any]) -> list[list[Any]]:
        return [list(items[start : start + self._batch_size]) for start in range(0, len(items), self._batch_size)]


def _probe(judge: Judge) -> None:
    """Asks one grey question, for a score where the judge compares nothing; a refusal shows that it is there.

    Raises:
        JudgeUnavailable: no answer came.
    """
    # two equal images: whatever the judge says is right, only that it answers counts
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
