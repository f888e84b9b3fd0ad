"""Leases by which engines and learners share GPUs in turn: learners wait until every engine sleeps, sampling waits
until it is awake.

A Serve handle reaches one replica, not all of them, so each replica asks a small actor for the present lease, and
reports when it has complied. A restarted replica asks first, so it does not take a GPU that it has no lease for.
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

Gpu = tuple[str, str]
"""A GPU: the Ray id of its node, and its id there, as in CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The present holder of the GPUs."""

    number: int
    """Number of the lease; 0 is before the first."""
    is_engines: bool
    """Whether the engines hold it, as opposed to the learners."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs of the learners; empty if they learn on CPUs."""


class Leases:
    """Actor that knows the present lease, and which of `num_replicas` have complied. Engines start asleep."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._lease = Lease(number=0, is_engines=False)
        self._reached: dict[int, int] = {}
        self._failed = ""
        self._changed = asyncio.Condition()

    async def begin(self, is_engines: bool, gpus: tuple[Gpu, ...]) -> str:
        """Begins another lease; returns once all replicas have complied, or with the error of one of them."""
        async with self._changed:
            number = self._lease.number + 1
            self._lease, self._failed = Lease(number=number, is_engines=is_engines, gpus=gpus), ""
            self._changed.notify_all()
            # by rank: a restarted replica takes the place of the lost one
            await self._changed.wait_for(
                lambda: (
                    self._failed or sum(reached >= number for reached in self._reached.values()) >= self._num_replicas
                )
            )
            return self._failed

    async def follow(self, rank: int, reached: int) -> Lease:
        """Waits for the next lease and returns it; `reached` is the last lease that the replica complied with, -1 for
        one that has just started and holds nothing.
        """
        async with self._changed:
            self._reached[rank] = reached
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._lease.number > reached)
            return self._lease

    async def fail(self, reason: str) -> None:
        """Reports to callers waiting for a lease that a replica cannot take it."""
        async with self._changed:
            self._failed = reason
            self._changed.notify_all()


@contextmanager
def gpu_leases(app: str, num_replicas: int) -> Iterator[None]:
    """Runs the actor of `app` while the context is open."""
    made: Any = ray.remote(Leases)
    actor = made.options(name=f"{app}-leases", namespace=_NAMESPACE, num_cpus=0, max_concurrency=1000).remote(
        num_replicas
    )
    try:
        yield
    finally:
        if ray.is_initialized():
            ray.kill(actor)


def begin_lease(app: str, *, is_engines: bool, gpus: tuple[Gpu, ...] = ()) -> None:
    """Begins another lease on the GPUs of `app`'s engines, and waits until they have woken up or gone to sleep.

    Raises:
        ModelUnavailable: an engine cannot be loaded, or does not answer.
    """
    try:
        actor: Any = ray.get_actor(f"{app}-leases", _NAMESPACE)
        failed = ray.get(actor.begin.remote(is_engines, gpus), timeout=START_TIMEOUT_S)
    except (RayError, ValueError) as error:
        raise ModelUnavailable(f"the policy's engines do not take leases: {error}", "rlvlm resume") from error
    if failed:
        raise ModelUnavailable(
            f"the policy's engine cannot wake: {failed}",
            "where the GPU is full lower --engine.vllm.memory-share, where there is none leave out --engine.colocated",
        )


class LeaseHolder:
    """Follows a replica's leases in a thread of its own.

    Args:
        wake: takes the GPU with the given id, empty without one; loads the model if necessary.
        sleep: releases the GPU.
    """

    def __init__(self, wake: Callable[[str], None], sleep: Callable[[], None]) -> None:
        self._wake, self._sleep = wake, sleep
        self._condition = threading.Condition()
        self._is_awake, self._num_busy = False, 0
        replica = serve.get_replica_context()
        self._leases: Any = ray.get_actor(f"{replica.app_name}-leases", _NAMESPACE)
        ranks = replica.rank
        self._rank, self._local_rank = ranks.rank, ranks.local_rank
        threading.Thread(target=self._follow, daemon=True, name="gpu-leases").start()

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Returns context for the model's work: it is entered when the engine is awake, and keeps the engine awake."""
        entering = asyncio.get_running_loop().run_in_executor(None, self._enter)
        try:
            await asyncio.shield(entering)
        except asyncio.CancelledError:  # the caller has left, and the thread still waits
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
                lease: Lease = ray.get(self._leases.follow.remote(self._rank, reached))
            except RayError:
                return  # the run is over
            try:
                self._take(lease)
            except Exception as error:  # the run waits for this engine, whatever the error
                logger.exception("this engine cannot take its lease")
                cause = error.__cause__ or error
                ray.get(self._leases.fail.remote(str(cause) or type(cause).__name__))
            reached = lease.number

    def _take(self, lease: Lease) -> None:
        if lease.is_engines == self._is_awake:  # another engine failed, and the lease was begun again for all
            return
        with self._condition:
            # finish running samples first: cancelled callers would only ask again
            self._condition.wait_for(lambda: not self._num_busy)
            if not lease.is_engines:
                self._sleep()
            elif not lease.gpus:  # the learners learn on CPUs
                self._wake("")
            else:
                node = ray.get_runtime_context().get_node_id()
                own = [gpu for where, gpu in lease.gpus if where == node]
                if not own:  # weights and caches cannot move to a GPU of another machine
                    fix = "leave out --engine.colocated"
                    raise ModelUnavailable("no learner has a GPU on this engine's node", fix)
                self._wake(own[self._local_rank % len(own)])
            self._is_awake = lease.is_engines
            self._condition.notify_all()
