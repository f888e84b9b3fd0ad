"""Base of every model's replica: a thread for the model, a share of a GPU, a health check that detects a stuck model.

Ray Serve calls `check_health` once a second, and replaces a replica that failed three times in a row. No clock can tell
whether a model is stuck or busy with one long batch, so signs of life decide (`Heartbeat`); without them
`tests/faults/test_served_judges.py::test_a_stuck_replica_is_replaced` waits for ever. A replica whose event loop is
blocked, or whose process is stopped, answers late and counts as failed anyway.
"""

import asyncio
import faulthandler
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from rlvlm.core.errors import (
    JudgeUnavailable,
    MachineError,
    ModelUnavailable,
    RunError,
    UnsupportedQuestion,
    first_line,
)
from rlvlm.core.imports import uncollected
from rlvlm.serving.config import PlacementConfig

logger = logging.getLogger(__name__)

HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 2.5
"""Seconds between two health checks, and the least wait for the answer to one, which never waits for the model."""
FAILED_CHECKS = 3
"""Number of consecutive failures after which Serve replaces the replica."""
START_TIMEOUT_S = 1_800.0
"""Maximum time to load, seconds: a big model takes some minutes from a slow disk."""
GIB = 1 << 30
_MAX_STACK = 64
_MARK = "rlvlm-cause: "
_KINDS = {kind.__name__: kind for kind in (JudgeUnavailable, ModelUnavailable, MachineError)}

Model = TypeVar("Model")


class Replica:
    """A copy of a model in a process of its own; base of the classes that `deployments` puts on Serve.

    Args:
        what: kind of model, for messages: `judge`.
        device: device requested by the config.
        placement: resources of the replica.
        section: prefix of the options that place it, for messages: `serve`.
        is_elsewhere: whether the model runs in another process, as an engine or behind an API.
        unavailable: error for a model that cannot be loaded.
    """

    def __init__(
        self,
        what: str,
        device: str,
        placement: PlacementConfig,
        *,
        section: str,
        is_elsewhere: bool = False,
        unavailable: type[ModelUnavailable] = ModelUnavailable,
    ) -> None:
        self._what, self._placement, self._section, self._unavailable = what, placement, section, unavailable
        self._device = assigned_device(device)
        self._heartbeat = Heartbeat(waits_for_gpu=self._device.startswith("cuda"), is_elsewhere=is_elsewhere)
        # a single thread: models are not thread-safe, and two concurrent batches would take twice the memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=what)

    def _load(self, build: Callable[[], Model]) -> Model:
        """Runs `build` in the model's thread and returns the model, within the replica's share of the machine.

        Raises:
            RuntimeError: it cannot be loaded, takes too long or exceeds its share of a GPU; the one-line message has
                the cause and the fix for callers that wait for the app.
        """

        def limited() -> Model:
            # before the model is built: memory once reserved is not returned
            share = self._placement.num_gpus
            limit_share(self._device, share)
            model = build()
            if torch := sys.modules.get("torch"):  # a judge behind an API needs none, and starts sooner without
                # torch would use every core of the machine, as would each replica beside it
                torch.set_num_threads(max(1, int(self._placement.num_cpus)))
            check_share(self._device, share, self._what, self._section)
            return model

        try:
            # in the model's thread, because OpenMP's number of threads and CUDA's current device are per thread
            return self._thread.submit(limited).result(START_TIMEOUT_S)
        except (ModelUnavailable, UnsupportedQuestion) as error:
            logger.exception("the %s cannot be loaded", self._what)
            raise marked(self._unavailable(str(error), error.fix)) from error
        except Exception as error:  # any error: Serve would hide it in a traceback
            logger.exception("the %s cannot be loaded", self._what)
            name, line = type(error).__name__, first_line(error)
            reason = name if line == name else f"{name}: {line}"
            if isinstance(error, TimeoutError):
                reason = f"it took longer than {START_TIMEOUT_S:.0f} s"
            cause = f"the {self._what} cannot be loaded: {reason}"
            fix = getattr(error, "fix", "") or "the traceback is in the replica's log in Ray's session folder"
            raise marked(self._unavailable(cause, fix)) from error

    async def _run(self, work: Callable[[Any], Model], items: Any) -> Model:
        """Runs the model in its only thread, so that the event loop stays free for health checks."""

        def timed() -> Model:
            with self._heartbeat.working():
                return work(items)

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)

    async def check_health(self) -> None:
        """Raises if the model is stuck.

        Raises:
            RuntimeError: it shows no sign of life, or a batch takes longer than callers wait.
        """
        placement = self._placement
        seconds = {"stall_s": placement.stall_s, "deadline_s": placement.timeout_s}
        if reason := self._heartbeat.stuck(**seconds, section=self._section):
            logger.error("this replica is stuck: %s", reason)
            # Serve is about to kill the process; this is the only trace of where it was stuck
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
            raise RuntimeError(reason)


class Heartbeat:
    """Signs of life of the model's thread, checked by each health check.

    - CPU time: on a CPU a computing thread uses some between any two checks, while one that sleeps, or waits for a
      lock or a pipe, uses none. A thread waiting for a GPU may spin, so there it says nothing.
    - finished layers: on a GPU every module that returns counts; a hung kernel fills the launch queue and stops them.
    - the stack: changed since the last check, as while decoding images.

    A model that runs elsewhere shows none of these even when healthy; for it only the deadline counts. Silence is
    counted in checks, not seconds: a starved or stopped process checks less often too.

    Args:
        waits_for_gpu: whether the model runs on a GPU of this process.
        is_elsewhere: whether it runs in another process.
    """

    def __init__(self, *, waits_for_gpu: bool = False, is_elsewhere: bool = False) -> None:
        self._waits_for_gpu = waits_for_gpu
        self._is_elsewhere = is_elsewhere
        self._clock: int | None = None
        self._thread = 0
        self._num_batches = self._num_layers = self._num_silent = 0
        self._last: tuple[Any, ...] | None = None
        self._begun: dict[object, float] = {}
        self._is_fetching = False
        if waits_for_gpu:
            from torch.nn.modules.module import register_module_forward_hook

            def count_layer(*_: object) -> None:
                self._num_layers += 1

            register_module_forward_hook(count_layer)

    @property
    def busy_since(self) -> float | None:
        """Monotonic time at which the oldest running batch or question began; None if there is none."""
        # dicts keep their order, so the first one is the oldest; a copy, because other threads change it
        return next(iter(list(self._begun.values())), None)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Returns context of one batch, in the model's thread."""
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._num_batches += 1
        with self.waiting():
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Returns context of one question to a model that runs elsewhere; any number may be open at once."""
        ticket = object()
        self._begun[ticket] = time.monotonic()
        try:
            yield
        finally:
            del self._begun[ticket]

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Returns context in which the model's thread waits for bytes from elsewhere: only the deadline counts."""
        self._is_fetching = True
        try:
            yield
        finally:
            self._is_fetching = False

    def stuck(self, *, stall_s: float, deadline_s: float, section: str = "serve") -> str | None:
        """Makes one check: returns why the model counts as stuck, or None.

        Args:
            stall_s: silence after which Serve should replace the replica, seconds; it takes `FAILED_CHECKS` checks.
            deadline_s: maximum duration of a batch, even with signs of life: callers have given up by then.
            section: prefix of the options that set the two, for the message.
        """
        busy_since = self.busy_since
        if busy_since is None:
            self._num_silent = 0
            return None
        busy_s = time.monotonic() - busy_since
        # a model may show life for ever, e.g. in an endless loop; no caller waits for the answer any more
        if busy_s > deadline_s:
            return f"one batch has taken {busy_s:.0f} s, callers wait {deadline_s:.0f} s (--{section}.timeout-s)"
        # waiting for an engine's process, an API or weights looks the same as being stuck
        if self._is_elsewhere or self._is_fetching or self._clock is None:
            self._num_silent = 0
            return None
        if self._waits_for_gpu:
            now = self._num_batches, self._num_layers, *_stack(self._thread)
        else:
            now = self._num_batches, time.clock_gettime_ns(self._clock)
        # any change at all is a sign of life
        self._num_silent = self._num_silent + 1 if now == self._last else 0
        self._last = now
        # Serve replaces after `FAILED_CHECKS` consecutive failures, so the first comes as many checks early
        if self._num_silent < max(1, round(stall_s / HEALTH_PERIOD_S) - FAILED_CHECKS + 1):
            return None
        return (
            f"the model has shown no sign of life for {self._num_silent * HEALTH_PERIOD_S:.0f} s; "
            f"if it was only slow, raise --{section}.stall-s"
        )


def _stack(thread: int) -> Iterator[tuple[int, int]]:
    """Yields the innermost frames of a thread and the instruction that each is at."""
    with uncollected():  # Python 3.11 before .9 waits for ever if it collects within (python/cpython#106883)
        frame = sys._current_frames().get(thread)
    for _ in range(_MAX_STACK):
        if frame is None:
            return
        yield id(frame), frame.f_lasti
        frame = frame.f_back


def assigned_device(device: str) -> str:
    """Returns a replica's device: the GPU that Ray assigned to this process, even if `device` is `cpu`, which then
    is meant for the run's own process; else the CPU.

    Ray leaves every GPU visible to a process that requested none (ray#54868), so visibility proves nothing.
    """
    if ray.is_initialized() and ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        import torch

        if torch.cuda.is_available():
            return "cuda"
    return "cpu" if device == "auto" else device


def limit_share(device: str, share: float) -> None:
    """Limits torch to `share` of the GPU's memory; a whole GPU or none sets no limit.

    Ray's `num_gpus: 0.5` is only bookkeeping, so a model that takes more would starve its neighbour.
    """
    if device.startswith("cuda") and 0 < share < 1:
        import torch

        torch.cuda.set_per_process_memory_fraction(share)


def measured(device: str) -> tuple[int, int] | None:
    """Returns the maximum GPU memory that torch has reserved here, and the GPU's total, bytes; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(0).total_memory


def check_share(device: str, share: float, what: str, section: str) -> None:
    """Checks that the model, loaded and asked once, stays within its share; 0 and 1 set no limit.

    Each process's CUDA context, some hundred MB, comes on top and is in no process's share. `what` names the kind of
    model and its own options' section; `section` is that of the options that place it.

    Raises:
        ModelUnavailable: it uses more.
    """
    peak, total = measured(device) or (0, 1)
    if 0 < share < 1 and peak > share * total:
        needed = min(1.0, peak / total + 0.1)
        raise ModelUnavailable(
            f"the {what} holds {peak / GIB:.2f} of {total / GIB:.2f} GiB, its share is {share:g} of the GPU",
            f"raise --{section}.num-gpus to {needed:.1f}, or --{what}.quantization nf4",
        )


def marked(cause: ModelUnavailable | MachineError) -> RuntimeError:
    """Encodes an error for Serve, which keeps only the text of a constructor's error: cause and fix in one line."""
    is_one_of_several = ray.is_initialized() and sum(node["Alive"] for node in ray.nodes()) > 1
    where = f" (on node {ray.util.get_node_ip_address()})" if is_one_of_several else ""  # a path may be missing there
    return RuntimeError(_MARK + json.dumps([type(cause).__name__, f"{cause}{where}", cause.fix]))


def cause_of(status: ApplicationStatusOverview) -> RunError | None:
    """Returns the error that the app reports, or Serve's once it gave up; None if it may still succeed.

    An error that the app itself reports is final, so Serve's further tries are not waited for.
    """
    # a deployment's message is closer to the cause than the app's, which only says that a deployment failed
    messages = [deployment.message for deployment in status.deployments.values()] + [status.message]
    for message in messages:
        # somewhere in one of Ray's tracebacks, so it is searched for
        if found := re.search(re.escape(_MARK) + r"(\[.*\])", message):
            kind, what, fix = json.loads(found[1])
            return _KINDS[kind](what, fix)
    if status.status not in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
        return None
    lines = [line for message in messages for line in message.strip().splitlines() if line.strip()]
    return JudgeUnavailable(
        f"it could not start: {lines[-1] if lines else status.status.value}",
        "look at the replica's log in Ray's session folder",
    )
