"""Heartbeats: processes that others wait for report once a second that they live, and their progress.

A call to an actor has no time limit, because a rollout may legitimately take an hour. Instead `ended` checks heartbeats
while it waits: none for `MAX_SILENCE_S` means that the process is stopped (SIGSTOP, a debugger, a frozen machine), and
heartbeats without progress mean that it hangs. Ray itself reports a process that dies.

Heartbeats are sent by a separate thread, so that the work keeps its own (a GL context belongs to one thread), and are
stored in Ray's key-value store: RLlib makes the actors of runners and learners, and leaves no place for a method that
answers during the work.
"""

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayError
from ray.experimental.internal_kv import _internal_kv_put, internal_kv_get_gcs_client

from rlvlm.core.errors import MachineError
from rlvlm.core.progress import count_progress, progress

logger = logging.getLogger(__name__)

MAX_SILENCE_S = 120.0
"""Seconds without a heartbeat after which a process counts as stopped: far more than code holds Python's lock for."""
_PERIOD_S = 1.0
_NAMESPACE = "rlvlm-heartbeats"

_beating = threading.Lock()
"""Lock held forever by the thread that sends this process's heartbeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """Result of `ended` in place of an answer that will not come."""

    what: str
    """The process, its node and its fault, as the end of a sentence: "(process 7 on 10.0.0.2) is gone"."""
    fix: str
    """Fix to suggest to the user."""
    is_gone: bool
    """Whether the process has ended; one that is stopped or hangs still holds its resources."""


def start_heartbeat() -> None:
    """Starts this process's heartbeats if it is an actor's; later calls do nothing."""
    actor_id = ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None
    if actor_id is None or not _beating.acquire(blocking=False):
        return
    gpus = ", ".join(str(gpu) for gpu in ray.get_gpu_ids())
    where = f"process {os.getpid()} on node {ray.util.get_node_ip_address()}" + (f", GPU {gpus}" if gpus else "")

    def send(number: int) -> None:
        content = json.dumps([where, number, progress()])
        try:
            _internal_kv_put(actor_id, content, overwrite=True, namespace=_NAMESPACE)
        except RayError as error:  # the head node may come back
            logger.debug("no heartbeat: %s", error)

    def keep_sending() -> None:
        for number in itertools.count(1):
            time.sleep(_PERIOD_S)
            send(number)

    send(0)  # here: once this returns the process is monitored, however soon it is stopped
    threading.Thread(target=keep_sending, daemon=True, name="heartbeat").start()


class _Watch:
    """State of an actor's process while it is waited for."""

    def __init__(self) -> None:
        self._beat: tuple[str, int, int] | None = None
        self._silent_s = self._still_s = 0.0

    def look(self, beat: tuple[str, int, int] | None, passed_s: float, max_still_s: float | None) -> Lost | None:
        """Returns the fault of the process whose newest heartbeat is `beat`, `passed_s` seconds after the last check;
        None if it is healthy.
        """
        if beat is None:  # it has not sent any yet, or Ray's head does not answer
            return None
        before, self._beat = self._beat or beat, beat
        self._silent_s = 0.0 if beat[:2] != before[:2] else self._silent_s + passed_s
        if beat[2] != before[2]:
            self._still_s = 0.0
            count_progress()  # waiting for a working process counts as progress
        else:
            self._still_s += passed_s
        if self._silent_s >= MAX_SILENCE_S:
            return Lost(
                what=f"({beat[0]}) has given no sign of life for {MAX_SILENCE_S:g} s: it is stopped",
                fix="look for what stops it (SIGSTOP, a debugger, a machine or container that is frozen or swaps)",
                is_gone=False,
            )
        if max_still_s is not None and self._still_s >= max_still_s:
            return Lost(
                what=f"({beat[0]}) lives, but has done no step, chunk or reset for {max_still_s:g} s "
                "(`sample_timeout_s`): it hangs",
                fix="look for what it waits for, or where one of these honestly takes longer raise the limit, in "
                "Python: .env_runners(sample_timeout_s=...)",
                is_gone=False,
            )
        return None


def ended(calls: Iterable[ray.ObjectRef], max_still_s: float | None = None) -> Iterator[tuple[ray.ObjectRef, Any]]:
    """Yields calls to actors as they end, each with its answer, the exception it raised, or `Lost`.

    Args:
        calls: calls to methods of actors that have called `start_heartbeat`; others are waited for without a limit.
        max_still_s: seconds without `count_progress` after which a living process counts as hung; None: no limit.
    """
    waiting = {call: _Watch() for call in calls}
    last = time.monotonic()
    while waiting:
        ready, _ = ray.wait(list(waiting), timeout=_PERIOD_S)
        if ready:  # all that have ended, at once: each look at a thousand calls takes milliseconds
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for call in ready:
            del waiting[call]
            try:
                answer = ray.get(call)
            except (RayActorError, NodeDiedError, ObjectLostError) as error:  # or its answer was on a node that is gone
                what = f"{process_of(call)} is gone: {type(error).__name__}"
                answer = Lost(what=what.strip(), fix="look for what ends it (memory?)", is_gone=True)
            except Exception as error:  # the caller decides what to do before it is raised
                answer = error
            yield call, answer
        if (passed_s := time.monotonic() - last) < _PERIOD_S:
            continue
        last += passed_s
        beats = _heartbeats(map(_actor_of, waiting))
        for call, watch in list(waiting.items()):
            # capped: time in which this process was itself stopped, or Ray's head did not answer, is no silence of
            # others
            lost = watch.look(beats.get(_actor_of(call)), min(passed_s, 2 * _PERIOD_S), max_still_s)
            if lost is not None:
                del waiting[call]
                yield call, lost


class StoppedActors:
    """Ends actors whose process is stopped, for waits without `ended`; Ray then reports their death."""

    def __init__(self) -> None:
        self._watches: dict[str, _Watch] = {}
        self._last = time.monotonic()

    def end(self, actors: Mapping[str, ActorHandle]) -> dict[str, Lost]:
        """Ends stopped actors and returns their faults by name; `actors` are those running now.

        Checks at most once a second; in between it returns at once.
        """
        if (passed_s := time.monotonic() - self._last) < _PERIOD_S:
            return {}
        self._last += passed_s
        ids = {name: actor._actor_id.hex() for name, actor in actors.items()}
        self._watches = {actor_id: self._watches.get(actor_id) or _Watch() for actor_id in ids.values()}
        found, beats = {}, _heartbeats(ids.values())
        for name, actor in actors.items():
            lost = self._watches[ids[name]].look(beats.get(ids[name]), min(passed_s, 2 * _PERIOD_S), None)
            if lost is not None:
                ray.kill(actor)
                found[name] = lost
        return found


def process_of(call: ray.ObjectRef) -> str:
    """Returns the process that a call went to, with its node and GPU, in brackets; empty before its first heartbeat."""
    beat = _heartbeats([_actor_of(call)]).get(_actor_of(call))
    return f"({beat[0]})" if beat else ""


class Replacements:
    """Replaces processes that are stopped or hang, each at most once without a result in between: otherwise work that
    takes too long, or a process that always hangs, would be restarted for ever.

    Args:
        name: kind of process, e.g. "env runner".
        setting: setting of their number, for the message.
    """

    def __init__(self, name: str, setting: str) -> None:
        self._name, self._setting = name, setting
        self._replaced: set[int] = set()
        """Numbers of processes without a result since their replacement."""

    def note_result(self, number: int) -> None:
        """Records that process `number` has returned a result."""
        self._replaced.discard(number)

    def replace(self, number: int, actor: ActorHandle, lost: Lost) -> None:
        """Warns that process `number` is lost and ends it if it still exists; Ray restarts it.

        Raises:
            MachineError: it was replaced before, without a result since.
        """
        is_again = not lost.is_gone and number in self._replaced
        if not lost.is_gone:
            self._replaced.add(number)
            ray.kill(actor, no_restart=False)
        what = f"{self._name} {number} {lost.what}"
        if is_again:
            raise MachineError(
                f"{what}; it was replaced before and has brought nothing since",
                f"{lost.fix}; then `rlvlm resume`, with another number of {self._setting} or less played at once "
                "(--env.num-envs, --algo.groups or --algo.group-size lower)",
            )
        logger.warning("%s; it is replaced, and what it was playing begins anew (%s)", what, self._setting)


def _actor_of(call: ray.ObjectRef) -> str:
    return call.task_id().actor_id().hex()


def _heartbeats(actor_ids: Iterable[str]) -> dict[str, tuple[str, int, int]]:
    """Returns each process's location, newest heartbeat number and progress by actor, of those that have sent any; in
    one call to Ray's head for all.
    """
    try:
        head: Any = internal_kv_get_gcs_client()
        found = head.internal_kv_multi_get([actor_id.encode() for actor_id in actor_ids], _NAMESPACE.encode())
    except RayError:
        return {}
    return {key.decode(): tuple(json.loads(content)) for key, content in found.items() if content}
