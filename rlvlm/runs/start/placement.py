"""Placement of a run's processes: their resources in Ray, whether the cluster can hold them all, and the GPU of the
run's own process, which Ray does not know about by itself.

`rlvlm run TASK --plan` prints it. Used by the run, by sweeps' bundles and by `rlvlm slurm`.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.table import Table

from rlvlm.core.console.tables import plain_table
from rlvlm.core.errors import MachineError
from rlvlm.runs.files.environment import usable_cores
from rlvlm.runs.settings.config import Role, RunConfig
from rlvlm.runs.settings.kinds import TurnsRun
from rlvlm.runs.start.networks import learner_memory
from rlvlm.serving.config import LEARNER_ROLE
from rlvlm.serving.places import Node, Placing, bounded_start, cluster_nodes, place, reserve_places
from rlvlm.vlms import devices

logger = logging.getLogger(__name__)

_BOOKING_S = 30.0
"""Maximum wait for a GPU that Ray reports as free, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Node of each process of a run."""

    roles: tuple[Role, ...]
    """The run's own process, with its share of a GPU, and all that it starts."""
    where: dict[str, list[str]]
    """Names of nodes by role, one for each process."""

    @property
    def own_share(self) -> float:
        """Share of a GPU for the run's own process; 0 on a CPU."""
        return self.roles[0].gpus


def layout_of(config: RunConfig, machines: Sequence[Node], *, is_here: bool = True) -> Layout:
    """Returns where the processes of a run go on `machines`, as printed by `--plan` and used by the run.

    The run's own process takes a whole GPU of its node if the others leave one, else the rest of one, and computes on
    the CPU if nothing is left, unless a `device` setting requires a GPU.

    Args:
        config: config of the run.
        machines: nodes with all their resources free.
        is_here: whether this process is on one of them; else they are a future job's, and torch can use their GPUs.

    Raises:
        MachineError: a process cannot be placed.
    """
    sections = config.kind.networks(config)
    wanted = [section for section, (device, *_) in sections.items() if device != "cpu"]
    learns = not config.algo.num_learners
    # a private Ray, on one machine, has a core for every process that asks for one: few cores are shared
    is_private = not os.environ.get("RAY_ADDRESS") if is_here else len(machines) == 1
    others = deepcopy(list(machines))
    if is_private:
        others[0].cpus = max(others[0].cpus, sum(role.count * role.cpus for role in config.roles))

    def with_share(share: float) -> Layout:
        mine = Role(
            name="the run's own process" + (" (learns)" if learns else ""),
            gpus=share, is_own=True, learns=learns,
            setting=", ".join(f"--{section}.device cpu" for section in wanted),
        )  # fmt: skip
        roles = (mine, *config.roles)
        return Layout(roles=roles, where=place(roles, deepcopy(others)))

    if is_here and (given := _given_share()) is not None:  # already assigned, whatever it wants
        return with_share(given)
    alone = deepcopy(others)
    where = place(config.roles, alone)
    _check_colocated(config, where, machines)
    if not wanted or (is_here and not torch.cuda.is_available()):
        return with_share(0.0)
    left = max((free for node in alone if node.is_own for free in node.gpus), default=0.0)
    can_do_without = {device for device, *_ in sections.values()} <= {"auto", "cpu"}
    for share in (1.0, left):
        if share:
            with suppress(MachineError):
                return with_share(share)
    return with_share(0.0 if can_do_without else 1.0)


def present_layout(config: RunConfig) -> Layout:
    """Returns `layout_of` on what is free now; if that does not suffice, on all that the machines have.

    Raises:
        MachineError: a process cannot be placed.
    """
    if ray.is_initialized():
        with suppress(MachineError):
            return layout_of(config, cluster_nodes(only_free=True))
    return layout_of(config, nodes())


def _given_share() -> float | None:
    """Returns the GPUs assigned to this process from outside; None if it may choose one itself.

    A Ray worker, such as a sweep's run, has what Ray assigned. A process that sees fewer GPUs than Ray has here, as
    under `ray job submit --entrypoint-num-gpus 1`, was assigned those.
    """
    if not ray.is_initialized():
        return None
    if ray.get_runtime_context().get_actor_id() is not None:
        return ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0)
    here = next((node.gpus for node in nodes() if node.is_own), [])
    seen = len(devices.visible_gpus()) or torch.cuda.device_count()
    return float(seen) if torch.cuda.is_available() and 0 < seen < len(here) else None


def _check_colocated(config: RunConfig, where: Mapping[str, list[str]], machines: Sequence[Node]) -> None:
    """Raises MachineError if Serve might start an engine on a node without a learner whose GPU it is to use."""
    if not isinstance(config, TurnsRun) or not (config.engine.colocated and config.algo.gpus_per_learner):
        return
    engine = config.engine
    open_to_all = [node.name for node in machines if node.cpus >= engine.num_cpus]
    if len({*where[LEARNER_ROLE], *open_to_all}) > 1:
        raise MachineError(
            f"engine.colocated needs all learners and engines on one node, and there are {', '.join(open_to_all)}",
            "leave out --engine.colocated and give engines GPUs of their own: --engine.num-gpus 1",
        )


def nodes() -> list[Node]:
    """Returns the machines of the present Ray cluster; without one this machine, as a private Ray sees it."""
    if not ray.is_initialized():
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [Node(name="this machine", cpus=float(max(2, usable_cores())), gpus=[1.0] * count, is_own=True)]
    return cluster_nodes()


def plan_table(config: RunConfig) -> Table:
    """Returns a table of a run's roles with their requests and the nodes that can hold them.

    Raises:
        MachineError: one cannot be placed.
    """
    layout = present_layout(config)
    rows, memory = [], learner_memory(config) or "-"  # of the learner's GPU
    for role in layout.roles:
        spots = Counter(layout.where[role.name])
        words = ", ".join(f"{count} on {name}" if role.count > 1 else name for name, count in spots.items())
        gpus = f"{role.gpus:g} {role.gpu_type}".strip()
        rows.append((role.name, str(role.count), f"{role.cpus:g}", gpus, words, memory if role.learns else "-"))
    heads = ("role", "processes", "CPU each", "GPU each", "where", "memory of its GPU")
    return plain_table(heads, rows, words=(heads[0], *heads[4:]), wraps=heads[4:])


class _Booking:
    """Actor that reserves a share of a GPU in Ray for a process that is not a Ray worker."""

    def ids(self) -> list[str]:
        """Returns the GPUs that Ray assigned to it, as in CUDA_VISIBLE_DEVICES."""
        return [str(gpu_id) for gpu_id in ray.get_gpu_ids()]


def book_gpu(share: float, wanted: str = "") -> tuple[Any, str]:
    """Reserves a share of a GPU of this node, so that Ray assigns it to no other process.

    Args:
        share: share of one GPU, in (0, 1].
        wanted: id of a GPU, if it must be that one.

    Returns:
        The actor that holds it, to be ended with `ray.kill`, and the GPU's id.

    Raises:
        MachineError: Ray has no free GPU here.
    """
    node = ray.get_runtime_context().get_node_id()
    # Ray chooses the GPU: wrong ones are held until the wanted one comes, and released then
    held: list[Any] = []
    try:
        while share > 0 and ray.available_resources().get("GPU", 0.0) + 1e-9 >= share:
            strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            booking: Any = (
                ray.remote(_Booking).options(num_cpus=0, num_gpus=share, scheduling_strategy=strategy).remote()
            )
            held.append(booking)
            (gpu,) = ray.get(booking.ids.remote(), timeout=_BOOKING_S)
            if wanted in ("", gpu):
                held.pop()
                return booking, gpu
    except RayError as error:
        logger.debug("no GPU was booked: %s", error)
    finally:
        for other in held:
            ray.kill(other)
    which = f"GPU {wanted}" if wanted else "a GPU"
    raise MachineError(
        f"the run's own process needs {which} of this machine, which Ray has given to others",
        "leave one free (--serve.num-gpus 0.5 shares one), or learn in a process that Ray places: "
        "--algo.num-learners 1 --algo.gpus-per-learner 1",
    )


@contextmanager
def own_gpu(config: RunConfig) -> Iterator[None]:
    """Ensures while the context is open that every process of the run can be placed, and that the run's own networks
    have the GPU share that `layout_of` assigns to them, reserved in Ray too; without one they compute on the CPU. Ray
    and RLlib would wait for resources silently.

    Resources held by others at the moment do not count against processes that Ray starts: they may become free.

    Raises:
        MachineError: a process cannot be placed, or a network needs `cuda` but other runs leave no GPU.
    """
    share = present_layout(config).own_share
    wants = {device for device, *_ in config.kind.networks(config).values()} - {"cpu"}
    named = next((device.partition(":")[2] for device in wants if ":" in device), "")
    index: int | None = int(named or 0) if share else None
    booking = None
    if share and _given_share() is None:
        seen = devices.visible_gpus() or [str(number) for number in range(torch.cuda.device_count())]
        try:
            booking, gpu = book_gpu(share, seen[int(named)] if named else "")
            index = seen.index(gpu)
        except MachineError as error:
            if wants != {"auto"}:
                raise
            index = None
            logger.warning("%s; it computes on the CPU", error)
    if index is not None:
        devices.use_expandable_segments()
    try:
        with devices.own_gpu(index):
            yield
    finally:
        if booking is not None and ray.is_initialized():
            ray.kill(booking)


class HeldPlaces:
    """Places of a run's processes that Ray holds for it until they start.

    Args:
        groups: node ids and placement group by role; a role that has none starts wherever there is room.
        placing: how long replicas wait for a place.
    """

    def __init__(self, groups: Mapping[str, tuple[tuple[str, ...], PlacementGroup]], placing: Placing) -> None:
        self._groups, self._placing = groups, placing

    @property
    def of_learners(self) -> PlacementGroup | None:
        """The placement group that holds the places of the learners; None if none does."""
        return self._groups[LEARNER_ROLE][1] if LEARNER_ROLE in self._groups else None

    def placing(self, role: str) -> Placing:
        """Returns where the replicas of `role` go, and how long they wait for that."""
        return replace(self._placing, node_ids=self._groups[role][0]) if role in self._groups else self._placing

    def bounded_start(self) -> AbstractContextManager[None]:
        """See `places.bounded_start`; does nothing on a private Ray, which has a place for all."""
        return bounded_start(self._placing) if self._groups else nullcontext()

    def release(self, roles: Iterable[str]) -> None:
        """Gives up the places of these roles, which are about to start: all others have a place, or theirs is held."""
        for role in self._groups.keys() & set(roles):
            remove_placement_group(self._groups[role][1])


@contextmanager
def placed(config: RunConfig, log: Callable[[str], None]) -> Iterator[HeldPlaces]:
    """Yields the places of a run's processes besides its own, once the machines that there are can hold all: a cluster
    that grows is asked for those that are missing. While the context is open Ray holds them, and a GPU for the run's
    own process. The arguments are those of `held_places`.

    Raises:
        MachineError: a process cannot be placed, or others hold a place for too long.
    """
    try:
        layout_of(config, nodes())
    except MachineError:
        if not _is_on_cluster():
            raise
        with held_places(config, log):
            pass
    # booked before the others are placed, to whom Ray may give the very card that a setting names
    with own_gpu(config), held_places(config, log) as places:
        yield places


@contextmanager
def held_places(config: RunConfig, log: Callable[[str], None]) -> Iterator[HeldPlaces]:
    """Yields the places of a run's processes besides its own, which Ray holds while the context is open.

    Nothing is held on a private Ray, which has room for all, nor in a sweep's run, for which Tune holds everything.

    Args:
        config: config of the run; `place_timeout_s` bounds the wait.
        log: called every 10 s with what is waited for; it may raise.

    Raises:
        MachineError: a process cannot be placed, or others hold a place for too long.
    """
    placing = Placing(timeout_s=config.place_timeout_s, setting="--place-timeout-s", log=log)
    if not _is_on_cluster():
        yield HeldPlaces({}, placing)
        return
    with reserve_places(config.roles, lambda: layout_of(config, nodes()), placing) as groups:
        yield HeldPlaces(groups, placing)


def _is_on_cluster() -> bool:
    """Whether this process drives a run on somebody's cluster: neither on a private Ray, nor as a sweep's trial."""
    return bool(os.environ.get("RAY_ADDRESS")) and ray.get_runtime_context().get_actor_id() is None
