"""Where each process of a run lies: what it asks of Ray, whether the cluster has a place for all, and the GPU of the
run's own process, which Ray does not know of by itself.

`rlvlm run TASK --plan` prints it. Called by the run, by sweeps' bundles and by `rlvlm slurm`.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.table import Table

from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.core.console.tables import plain_table
from rlvlm.core.errors import MachineError
from rlvlm.runs.config import Role, RunConfig
from rlvlm.runs.environment import usable_cores
from rlvlm.runs.preflight import learner_memory, networks_of
from rlvlm.vlms import devices

logger = logging.getLogger(__name__)

_BOOKING_S = 30.0
"""Longest wait for a GPU that Ray says is free."""


@dataclass(kw_only=True, slots=True)
class Node:
    """A machine of the cluster, and what of it is not given away yet."""

    name: str
    cpus: float
    gpus: list[float] = field(default_factory=list)
    """Free share of each card."""
    is_own: bool = False
    """Whether the run's own process is on it."""

    def take(self, role: Role) -> bool:
        """Gives one process of `role` its place, as Ray does: shares of a card on the fullest that has room."""
        # the small term: shares such as 0.1 do not add up exactly
        if role.cpus > self.cpus + 1e-9:
            return False
        if role.gpus >= 1:  # whole cards: Ray knows no 1.5
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


def roles_of(config: RunConfig) -> list[Role]:
    """The run's own process, and all that it starts."""
    algo = config.algo
    own = [section for section, (device, *_) in networks_of(config).items() if device != "cpu"]
    # a GPU that torch does not see may still be in Ray's books, as in a cluster's head that is shown none
    is_seen = torch.cuda.is_available() or any(node.gpus and node.is_own for node in nodes())
    learns = isinstance(algo, SACConfig) or not algo.num_learners
    mine = Role(
        name="the run's own process" + (" (learns)" if learns else ""),
        gpus=float(bool(own) and is_seen),
        is_own=True,
        setting=", ".join(f"--{section}.device cpu" for section in own),
        learns=learns,
    )
    return [mine, *config.roles]


def nodes() -> list[Node]:
    """The machines of the Ray cluster that this process is on; without one this machine, as a private Ray sees it."""
    if not ray.is_initialized():
        cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [Node(name="this machine", cpus=float(max(2, usable_cores())), gpus=[1.0] * cards, is_own=True)]
    own = ray.get_runtime_context().get_node_id()
    return [
        Node(
            name=one["NodeManagerAddress"] + (" (here)" if one["NodeID"] == own else f" ({one['NodeID'][:6]})"),
            cpus=one["Resources"].get("CPU", 0.0), gpus=[1.0] * int(one["Resources"].get("GPU", 0)),
            is_own=one["NodeID"] == own,
        )
        for one in ray.nodes()
        if one["Alive"]
    ]  # fmt: skip


def place(roles: Sequence[Role], machines: Sequence[Node]) -> dict[str, list[str]]:
    """Names of the nodes on which each role's processes find a place, one for each process.

    Those that ask for most are placed first, as one does who does not want to be left with what fits nowhere.

    Raises:
        MachineError: one of them has no place, with what is left of each node and the settings to change.
    """
    found: dict[str, list[str]] = {role.name: [] for role in roles}
    for role in sorted(roles, key=lambda role: (not role.is_own, -role.gpus, -role.cpus)):
        for number in range(role.count):
            taken = next((one for one in machines if (one.is_own or not role.is_own) and one.take(role)), None)
            if taken is None:
                which = f" {number + 1} of {role.count}" if role.count > 1 else ""
                left = "; ".join(f"{one.name} {one.cpus:g} CPU, {sum(one.gpus):g} GPU" for one in machines)
                raise MachineError(
                    f"{role.name}{which} asks for {role.cpus:g} CPU and {role.gpus:g} GPU, and has no place: after the "
                    f"others are left {left}",
                    f"{role.setting}, or use a cluster that has them",
                )
            found[role.name].append(taken.name)
    return found


def check_placed(config: RunConfig) -> None:
    """Passes where the cluster can hold every process of the run; Ray and RLlib would wait without a word.

    What others hold at the moment is not asked: it may become free.

    Raises:
        MachineError: one has no place.
    """
    roles = config.roles  # the GPU of the run's own process is booked by `own_gpu`
    place(roles, _with_cores_for(roles, nodes()))


def _with_cores_for(roles: Sequence[Role], machines: Sequence[Node]) -> Sequence[Node]:
    """`machines`; a private Ray, which is one, has a core for every process that asks for one: few cores are shared."""
    if not os.environ.get("RAY_ADDRESS"):
        machines[0].cpus = max(machines[0].cpus, sum(role.count * role.cpus for role in roles))
    return machines


def plan_table(config: RunConfig) -> Table:
    """The roles of a run with what each asks for and the nodes that have a place for it, as a table.

    Raises:
        MachineError: one has no place.
    """
    roles, machines = roles_of(config), nodes()
    where = place(roles, _with_cores_for(roles, machines))
    rows, memory = [], learner_memory(config) or "-"  # of the GPU of whoever learns
    for role in roles:
        counts = {name: where[role.name].count(name) for name in dict.fromkeys(where[role.name])}
        spots = ", ".join(f"{count} on {name}" if role.count > 1 else name for name, count in counts.items())
        rows.append(
            (role.name, str(role.count), f"{role.cpus:g}", f"{role.gpus:g}", spots, memory if role.learns else "-")
        )
    heads = ("role", "processes", "CPU each", "GPU each", "where", "memory of its GPU")
    return plain_table(heads, rows, words=(heads[0], *heads[4:]), wraps=heads[4:])


class _Booking:
    """Holds a share of a GPU in Ray's books for a process that is no worker of Ray's."""

    def ids(self) -> list[str]:
        """The cards that Ray has given it, as CUDA_VISIBLE_DEVICES would have them."""
        return [str(one) for one in ray.get_gpu_ids()]


def book_gpu(share: float, wanted: str = "") -> tuple[Any, str]:
    """Sets a share of a GPU of this node aside, so that Ray gives it to nobody else.

    Args:
        share: of one card, in (0, 1].
        wanted: a card's id, where it must be that one.

    Returns:
        What holds it, to be ended with `ray.kill`, and the card's id.

    Raises:
        MachineError: Ray has none left here.
    """
    node = ray.get_runtime_context().get_node_id()
    # Ray chooses the card: the wrong ones are held until the wanted one comes, and given back then
    held: list[Any] = []
    try:
        while share > 0 and ray.available_resources().get("GPU", 0.0) + 1e-9 >= share:
            strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            booking: Any = (
                ray.remote(_Booking).options(num_cpus=0, num_gpus=share, scheduling_strategy=strategy).remote()
            )
            held.append(booking)
            (card,) = ray.get(booking.ids.remote(), timeout=_BOOKING_S)
            if wanted in ("", card):
                held.pop()
                return booking, card
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
    """While the context is open the run's own networks have a GPU of this node that is theirs in Ray's books too.

    Nothing is booked for a worker of Ray's, as the run of a sweep is: it has what Ray gave it. Neither for a process
    that is shown fewer cards than Ray has here, as under `ray job submit --entrypoint-num-gpus 1`: it was given those.

    Raises:
        MachineError: a network wants `cuda`, and the run's other processes, or other runs, leave nothing.
    """
    wants = {device for device, *_ in networks_of(config).values()} - {"cpu"}
    if not wants or not torch.cuda.is_available() or ray.get_runtime_context().get_actor_id() is not None:
        yield
        return
    seen = devices.visible_cards() or [str(number) for number in range(torch.cuda.device_count())]
    named = next((device.partition(":")[2] for device in wants if ":" in device), "")
    index: int | None = int(named or 0)
    booking = None
    # shown fewer than the node has: they were given to this process, and are in Ray's books already
    if len(seen) >= len(next(one.gpus for one in nodes() if one.is_own)):
        others = sum(role.count * role.gpus for role in config.roles)
        # what others of this run will want is left to them, and the run's own process gets by with the rest of a card
        share = min(1.0, ray.cluster_resources().get("GPU", 0.0) - others)
        try:
            booking, card = book_gpu(share, seen[int(named)] if named else "")
            index = seen.index(card)
        except MachineError:
            if wants != {"auto"}:
                raise
            index = None  # `auto` goes without, and says so
    try:
        with devices.own_gpu(index):
            yield
    finally:
        if booking is not None and ray.is_initialized():
            ray.kill(booking)
