"""Engines and learners that share their cards take turns: who learns waits until every engine sleeps, and who samples
until it is awake.

A Serve handle reaches one replica and not all of them, so each replica asks a small actor whose turn it is, and says
when it has made way. One that is lost and comes back asks first, so it does not take a card that is not its own yet.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from rlvlm.core.errors import ModelUnavailable
from rlvlm.serving.replica import START_TIMEOUT_S

logger = logging.getLogger(__name__)

_NAMESPACE = "rlvlm"

Card = tuple[str, str]
"""A GPU: the id of its node in Ray, and its own there, as in CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardTurn:
    """The turn that is under way."""

    number: int
    """Number of the turn; 0 is before the first."""
    is_engines: bool
    """Whether it is the engines' turn; else the learners'."""
    cards: tuple[Card, ...] = ()
    """GPUs of the learners; none where they learn on CPUs."""


class CardTurns:
    """The actor: whose turn it is, and which of `num_replicas` have made way. Engines begin asleep."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._turn = CardTurn(number=0, is_engines=False)
        self._reached: dict[int, int] = {}
        self._failed = ""
        self._changed = asyncio.Condition()

    async def begin(self, is_engines: bool, cards: tuple[Card, ...]) -> str:
        """Begins another turn; returns once all replicas are where it wants them, or with what hit one of them."""
        async with self._changed:
            number = self._turn.number + 1
            self._turn, self._failed = CardTurn(number=number, is_engines=is_engines, cards=cards), ""
            self._changed.notify_all()
            # by rank: a replica that comes back takes the place of the one that was lost
            await self._changed.wait_for(
                lambda: (
                    self._failed or sum(reached >= number for reached in self._reached.values()) >= self._num_replicas
                )
            )
            return self._failed

    async def follow(self, rank: int, reached: int) -> CardTurn:
        """The next turn, once it begins; `reached` is the one that the replica has made way for, -1 for one that has
        just come and holds nothing.
        """
        async with self._changed:
            self._reached[rank] = reached
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._turn.number > reached)
            return self._turn

    async def fail(self, reason: str) -> None:
        """Tells callers that wait for a turn that a replica cannot take it."""
        async with self._changed:
            self._failed = reason
            self._changed.notify_all()


@contextmanager
def card_turns(app: str, num_replicas: int) -> Iterator[None]:
    """The actor of `app`, while the context is open."""
    made: Any = ray.remote(CardTurns)
    actor = made.options(name=f"{app}-turns", namespace=_NAMESPACE, num_cpus=0, max_concurrency=1000).remote(
        num_replicas
    )
    try:
        yield
    finally:
        if ray.is_initialized():
            ray.kill(actor)


def begin_turn(app: str, *, is_engines: bool, cards: tuple[Card, ...] = ()) -> None:
    """Begins another turn on the cards of `app`'s engines, and waits until they have taken it or made way.

    Raises:
        ModelUnavailable: an engine cannot be loaded, or does not answer.
    """
    try:
        actor: Any = ray.get_actor(f"{app}-turns", _NAMESPACE)
        failed = ray.get(actor.begin.remote(is_engines, cards), timeout=START_TIMEOUT_S)
    except (RayError, ValueError) as error:
        raise ModelUnavailable(f"the policy's engines do not take turns: {error}", "rlvlm resume") from error
    if failed:
        raise ModelUnavailable(
            f"the policy's engine cannot wake: {failed}",
            "where the card is full lower --engine.vllm.memory-share, where there is none leave out --engine.colocated",
        )


class TurnTaker:
    """Takes a replica's turns, in a thread of its own.

    Args:
        wake: takes the card, given its id, empty without one; the model is loaded where it is not yet.
        sleep: makes way.
    """

    def __init__(self, wake: Callable[[str], None], sleep: Callable[[], None]) -> None:
        self._wake, self._sleep = wake, sleep
        self._condition = threading.Condition()
        self._is_awake, self._num_busy = False, 0
        replica = serve.get_replica_context()
        self._turns: Any = ray.get_actor(f"{replica.app_name}-turns", _NAMESPACE)
        ranks = replica.rank
        self._rank, self._local_rank = ranks.rank, ranks.local_rank
        threading.Thread(target=self._follow, daemon=True, name="card-turns").start()

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Around work of the model: it begins when the engine is awake, and the engine stays so until it ends."""
        entering = asyncio.get_running_loop().run_in_executor(None, self._enter)
        try:
            await asyncio.shield(entering)
        except asyncio.CancelledError:  # the caller is gone, and the thread still waits
            entering.add_done_callback(lambda _: self._leave())
            raise
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._is_awake)
            self._num_busy += 1

    def _leave(self) -> None:
        with self._condition:
            self._num_busy -= 1
            self._condition.notify_all()

    def _follow(self) -> None:
        reached = -1
        while True:
            try:
                turn: CardTurn = ray.get(self._turns.follow.remote(self._rank, reached))
            except RayError:
                return  # the run is over
            try:
                self._take(turn)
            except Exception as error:  # whatever it is, the run waits for this engine
                logger.exception("this engine cannot take its turn")
                cause = error.__cause__ or error
                ray.get(self._turns.fail.remote(str(cause) or type(cause).__name__))
            reached = turn.number

    def _take(self, turn: CardTurn) -> None:
        if turn.is_engines == self._is_awake:  # where another engine failed, the turn is begun again for all
            return
        with self._condition:
            # what is being sampled comes to its end first: torn off, its callers would only ask again
            self._condition.wait_for(lambda: not self._num_busy)
            if not turn.is_engines:
                self._sleep()
            elif not turn.cards:  # the learners learn on CPUs
                self._wake("")
            else:
                node = ray.get_runtime_context().get_node_id()
                own = [card for where, card in turn.cards if where == node]
                if not own:  # weights and caches cannot be put on a card of another machine
                    fix = "leave out --engine.colocated"
                    raise ModelUnavailable("no learner has a card on this engine's node", fix)
                self._wake(own[self._local_rank % len(own)])
            self._is_awake = turn.is_engines
            self._condition.notify_all()
