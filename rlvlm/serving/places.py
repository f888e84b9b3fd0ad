"""Places of processes on a Ray cluster: what is asked of Ray before anything is loaded, and how long it is waited for.

Ray, Serve and RLlib by themselves wait silently, and Serve spreads replicas over all nodes, whatever else needs a place
there. Used by runs for all that they start, and by Serve apps for their replicas.
"""

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private import worker
from ray._private.state import available_resources_per_node
from ray._private.state import state as ray_state
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rlvlm.core.errors import MachineError
from rlvlm.serving.config import PLACE_TIMEOUT_S, Role

logger = logging.getLogger(__name__)

_REPORT_S = 10.0
_MAX_SHOWN = 8
"""Maximum number of machines in a message."""
_STATUS_S = 30.0
"""Time in which an autoscaler that has just been started says what it does, seconds."""
_HOLD_S = 3.0
"""Time in which Ray holds places that are free, seconds."""
_GPU_TYPE = "ray.io/accelerator-type"
"""Label of a node with the kind of its GPUs; Ray sets it where it knows them."""
_STATUS, _UNMANAGED = "__autoscaling_status", "node_"
"""Key under which Ray's first autoscaler says what it does, and the prefix of the types of nodes that none manages."""


@dataclass(kw_only=True, slots=True)
class Node:
    """A machine of the cluster, with its free resources."""

    name: str
    cpus: float
    gpus: list[float] = field(default_factory=list)
    """Free share of each GPU."""
    gpu_type: str | None = None
    """Kind of these, as Ray labels the node; None: unknown, as of a machine that Ray has not seen, and taken for
    any."""
    is_own: bool = False
    """Whether the run's own process is on it."""
    node_id: str = ""
    """Its id in Ray; empty for a machine that is not there yet."""

    def take(self, role: Role) -> bool:
        """Assigns resources to one process of `role`, as Ray does: shares of a GPU on the fullest with room."""
        # the small term: shares such as 0.1 do not add up exactly
        if role.cpus > self.cpus + 1e-9 or (role.gpu_type and self.gpu_type not in (None, role.gpu_type)):
            return False
        if role.gpus >= 1:  # whole GPUs: Ray does not allow 1.5
            whole = [number for number, free in enumerate(self.gpus) if free == 1][: int(role.gpus)]
            if len(whole) < role.gpus:
                return False
            for number in whole:
                self.gpus[number] = 0.0
        elif role.gpus:
            room = [number for number, free in enumerate(self.gpus) if free + 1e-9 >= role.gpus]
            if not room:
                return False
            self.gpus[min(room, key=lambda number: self.gpus[number])] -= role.gpus
        self.cpus -= role.cpus
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Placing:
    """Where replicas go, and how long to wait for that."""

    node_ids: tuple[str, ...] = ()
    """Nodes that they prefer; empty: any."""
    timeout_s: float = PLACE_TIMEOUT_S
    """Maximum wait for a place, seconds."""
    setting: str = ""
    """Setting of `timeout_s`, for messages."""
    log: Callable[[str], None] = logger.info
    """Called every 10 s with what is waited for; it may raise."""


ANYWHERE = Placing()


def cluster_nodes(*, only_free: bool = False) -> list[Node]:
    """Returns the living machines of the present Ray cluster, with all their resources free; if `only_free`, with what
    nothing holds now. Of shares of GPUs Ray says only the sum, so their number may be smaller than it seems.
    """
    own = ray.get_runtime_context().get_node_id()
    free = available_resources_per_node() if only_free else {}
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            has = free.get(node["NodeID"], {}) if only_free else node["Resources"]
            gpus = has.get("GPU", 0.0)
            shares = [1.0] * int(gpus) + [gpus % 1] * (gpus % 1 > 0)
            mark = "(here)" if node["NodeID"] == own else f"({node['NodeID'][:6]})"
            name = f"{node['NodeManagerAddress']} {mark}"
            found.append(
                Node(
                    name=name,
                    cpus=has.get("CPU", 0.0),
                    gpus=shares,
                    gpu_type=node["Labels"].get(_GPU_TYPE, ""),
                    is_own=node["NodeID"] == own,
                    node_id=node["NodeID"],
                )
            )
    return found


def place(roles: Sequence[Role], machines: Sequence[Node]) -> dict[str, list[str]]:
    """Returns, by role, the names of the nodes on which its processes can be placed, one for each process.

    Processes that name a kind of GPU, and then those with the largest requests, are placed first, because they fit in
    the fewest places.

    Raises:
        MachineError: one cannot be placed; the message has each node's free resources and the settings to change.
    """
    found: dict[str, list[str]] = {role.name: [] for role in roles}
    for role in sorted(roles, key=lambda role: (not role.is_own, not role.gpu_type, -role.gpus, -role.cpus)):
        for number in range(role.count):
            taken = next((node for node in machines if (node.is_own or not role.is_own) and node.take(role)), None)
            if taken is None:
                which = f" {number + 1} of {role.count}" if role.count > 1 else ""
                left = "; ".join(f"{node.name} {node.cpus:g} CPU, {_gpus(node)}" for node in machines)
                raise MachineError(
                    f"{role.name}{which} asks for {role.cpus:g} CPU and {_gpus_of(role)}, and has no place: after the "
                    f"others are left {left}",
                    f"{role.setting}, or use a cluster that has them",
                )
            found[role.name].append(taken.name)
    return found


@contextmanager
def reserve_places(
    roles: Sequence[Role], fits: Callable[[], object], placing: Placing
) -> Iterator[dict[str, tuple[tuple[str, ...], PlacementGroup]]]:
    """Yields node ids and placement group of each of `roles`, whose places nothing else gets while the context is open.
    All are held or none, so that two runs do not wait for each other. Meanwhile a cluster that grows is asked for all
    of them.

    Args:
        roles: processes that need a place; those that ask for nothing are left out.
        fits: raises MachineError as long as the machines that there are cannot hold all, whoever uses them now.
        placing: how long to wait.

    Raises:
        MachineError: the machines cannot hold all and the cluster does not grow, or others hold the places for too
            long; the message has what lies where.
    """
    roles, began = [role for role in roles if _bundle(role)], time.monotonic()
    machines = cluster_nodes(only_free=True)
    ids, groups = {node.name: node.node_id for node in machines}, None
    with suppress(MachineError):
        where = place(roles, machines)
        groups = _hold(roles, {name: tuple(ids[node] for node in found) for name, found in where.items()})
    while groups is None:
        groups = _hold(roles, _await_room(roles, fits, placing, began))
        if groups is None and time.monotonic() - began > placing.timeout_s:
            raise MachineError(f"others take the places of {_listed(roles)} again and again: {_lying()}", "try again")
    try:
        yield groups
    finally:
        if ray.is_initialized():
            for _, group in groups.values():
                remove_placement_group(group)


def _hold(
    roles: Sequence[Role], node_ids: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[tuple[str, ...], PlacementGroup]] | None:
    """Returns node ids and placement group of each role; None, and holds nothing, if the places are not free."""
    groups = {}
    for role in roles:
        where = [{"ray.io/node-id": node_id} for node_id in node_ids[role.name]]
        group = placement_group([_bundle(role)] * role.count, bundle_label_selector=where)
        groups[role.name] = node_ids[role.name], group
    if all(group.wait(_HOLD_S) for _, group in groups.values()):
        return groups
    for _, group in groups.values():
        remove_placement_group(group)
    return None


def _await_room(
    roles: Sequence[Role], fits: Callable[[], object], placing: Placing, began: float
) -> dict[str, tuple[str, ...]]:
    """Returns node ids on which Ray has found room for all processes of each role; see `reserve_places`."""
    reported = began - _REPORT_S
    # Ray's queue for what others hold, and what an autoscaler looks at
    wanted = [role for role in roles for _ in range(role.count)]
    demand = placement_group([*map(_bundle, wanted)], bundle_label_selector=[*map(_kind, wanted)])
    try:
        while not demand.wait(1):
            grows, coming = _autoscaler()
            try:
                fits()
                asked = f"others hold the places of {_listed(roles)}: {_lying()}"
            except MachineError as error:
                if grows is False or (grows is None and time.monotonic() - began > _STATUS_S):
                    raise
                asked = f"the cluster is asked for {_listed(roles)}, and has no machine for all: {error}"
            now = time.monotonic()
            if grows:
                asked = f"{asked}; coming: {coming or 'none'}"
            if now - reported >= _REPORT_S:
                reported = now
                placing.log(f"{asked} ({now - began:.0f} s)")
            if now - began > placing.timeout_s:
                settings = ", ".join(dict.fromkeys(role.setting for role in roles))
                longer = placing.setting and f"wait longer ({placing.setting}), "
                raise MachineError(f"after {now - began:.0f} s {asked}", f"{longer}stop what is there, or {settings}")
        found = iter(dict(sorted(placement_group_table(demand)["bundles_to_node_id"].items())).values())
        return {role.name: tuple(next(found) for _ in range(role.count)) for role in roles}
    finally:
        if ray.is_initialized():
            remove_placement_group(demand)


def _autoscaler() -> tuple[bool | None, str]:
    """Returns whether the cluster has an autoscaler (None: it has not said yet what it does), and the machines that it
    is starting, by their type.
    """
    if not os.environ.get("RAY_ADDRESS"):  # a private Ray
        return False, ""
    if is_autoscaler_v2():
        status: Any = get_cluster_status(ray.get_runtime_context().gcs_address)
        types = [node.ray_node_type_name for node in (*status.active_nodes, *status.idle_nodes)]
        coming = Counter(node.ray_node_type_name for node in status.pending_nodes)
        for launch in status.pending_launches:
            coming[launch.ray_node_type_name] += launch.count
    else:
        report = json.loads(_internal_kv_get(_STATUS) or "{}").get("autoscaler_report") or {}
        types = list(report.get("active_nodes", ()))
        coming = Counter(report.get("pending_launches"))
        coming.update(kind for _, kind, _ in report.get("pending_nodes", ()))
    grows = any(not kind.startswith(_UNMANAGED) for kind in types) if types else None
    return grows, ", ".join(f"{count} x {kind}" for kind, count in coming.items())


@contextmanager
def bounded_start(placing: Placing) -> Iterator[None]:
    """Ends actors of this process that have had no place for `placing.timeout_s` while the context is open. What starts
    them there waits for them without a limit, as RLlib does for env runners, whose places another run may have taken
    in the moment between `reserve_places` and their start.

    Raises:
        MachineError: actors were ended.
    """
    is_over, lying = threading.Event(), ""
    driver: Any = worker.global_worker

    def watch() -> None:
        nonlocal lying
        began = reported = time.monotonic()
        while not is_over.wait(1) and not lying:
            waiting = ray_state.actor_table(None, driver.current_job_id, "PENDING_CREATION")
            names = ", ".join(f"{count} {name}" for name, count in _classes(waiting.values()).items())
            now = time.monotonic()
            if not waiting:
                began = now
            elif now - began > placing.timeout_s:
                lying = f"after {now - began:.0f} s others still hold the places of {names}: {_lying()}"
                for actor_id in waiting:
                    driver.core_worker.kill_actor(ray.ActorID.from_hex(actor_id), True)
            elif now - max(began, reported) >= _REPORT_S:
                reported = now
                with suppress(Exception):  # a request to stop, which the start itself will heed
                    placing.log(f"starting, or waiting for a place: {names}; {_lying()} ({now - began:.0f} s)")

    thread = threading.Thread(target=watch, name="places", daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        if lying:
            raise MachineError(lying, f"wait longer ({placing.setting}), or stop what is there") from error
        raise
    finally:
        is_over.set()
        thread.join()


def preferring(node_ids: Sequence[str], gpu_type: str = "") -> dict[str, Any]:
    """Returns Ray's options of an actor that starts on these nodes, or elsewhere once they are lost or full, but not on
    GPUs of another kind than `gpu_type`; empty: any.
    """
    kind = {_GPU_TYPE: gpu_type} if gpu_type else {}
    if not node_ids:
        return {"label_selector": kind} if kind else {}
    selector = {"ray.io/node-id": f"in({','.join(dict.fromkeys(node_ids))})"} | kind
    return {"label_selector": selector, "fallback_strategy": [{"label_selector": kind}]}


def _gpus_of(role: Role) -> str:
    """Returns the GPUs that a process of `role` asks for, in words: `1 GPU`, `0.5 GPU (A100)`."""
    return f"{role.gpus:g} GPU" + (f" ({role.gpu_type})" if role.gpu_type else "")


def _gpus(node: Node) -> str:
    return f"{sum(node.gpus):g} GPU" + (f" ({node.gpu_type})" if node.gpu_type and node.gpus else "")


def _bundle(role: Role) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", role.cpus), ("GPU", role.gpus)) if amount}


def _kind(role: Role) -> dict[str, str]:
    """Returns the labels of a node that has the GPUs of `role`."""
    return {_GPU_TYPE: role.gpu_type} if role.gpu_type else {}


def _listed(roles: Sequence[Role]) -> str:
    """Returns the roles with what each asks for."""
    found = []
    for role in roles:
        amounts = [f"{role.cpus:g} CPU"] * bool(role.cpus) + [_gpus_of(role)] * bool(role.gpus)
        found.append(f"{role.name} ({role.count} x {' + '.join(amounts)})")
    return ", ".join(found)


def _classes(actors: Iterable[Any]) -> Counter[str]:
    return Counter(actor["ActorClassName"].rpartition(".")[2] for actor in actors)  # without `<locals>`


def _lying() -> str:
    """Returns what is free on each machine, and the actors that live there."""
    actors = ray_state.actor_table(None, None, "ALIVE").values()
    found = []
    for node in cluster_nodes(only_free=True):
        there = _classes(actor for actor in actors if actor["Address"]["NodeID"] == node.node_id)
        names = ", ".join(f"{count} {name}" for name, count in there.items()) or "no actors"
        found.append(f"{node.name} has {node.cpus:g} CPU and {_gpus(node)} free beside {names}")
    more = f"; and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    return "; ".join(found[:_MAX_SHOWN]) + more
