"""The room that a sweep's runs take: Tune's reservation for each, the engines beside it, and how many runs fit at once.

Ray places the workers of a run within its reservation. Serve places judges and engines itself, outside of it, so Tune
would start so many runs that none of them gets its engine.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from rlvlm.core.errors import MachineError, UsageError
from rlvlm.runs.settings.config import JUDGE_ROLE, Role, RunConfig
from rlvlm.runs.start.placement import Node, place
from rlvlm.sweeps.config import ResourceConfig


def max_places(runs: Sequence[Sequence[dict[str, float]]]) -> list[dict[str, float]]:
    """Returns placement bundles that suffice for the workers of each of `runs`: of each kind the largest number."""
    # one size of reservation fits all runs of a sweep, as Tune gives every trial the same
    kinds = {tuple(place.items()): dict(place) for places in runs for place in places}
    return [kind for kind in kinds.values() for _ in range(max(list(places).count(kind) for places in runs))]


def roles_of_a_run(resources: ResourceConfig, runs: Sequence[RunConfig]) -> list[Role]:
    """Returns the processes of any one of `runs`: those in a reservation for the largest, and the most engines.

    Raises:
        UsageError: learners are to have a kind of GPU, of which Tune's reservations know nothing.
    """
    if kinds := {role.gpu_type for run in runs for role in run.kind.own_roles(run) if not role.is_served} - {""}:
        raise UsageError(
            f"algo.gpu_type {', '.join(sorted(kinds))} is for a run by itself; a sweep's learners go where they fit",
            "leave it out; engine.gpu_type and serve.gpu_type hold in sweeps too",
        )
    own = Role(name="a run", cpus=resources.cpus, gpus=resources.gpus, setting="resources.cpus, resources.gpus")
    workers = [
        Role(
            name="a worker of a run", cpus=bundle.get("CPU", 0.0), gpus=bundle.get("GPU", 0.0),
            setting="algo.env_runners, algo.env_workers, algo.num_learners, algo.gpus_per_learner",
        )
        for bundle in max_places([run.worker_places for run in runs])
    ]  # fmt: skip
    engines = [role for run in runs for role in run.kind.own_roles(run) if role.is_served and role.count]
    if not engines:
        return [own, *workers]
    largest = {name: max(getattr(role, name) for role in engines) for name in ("count", "cpus", "gpus")}
    return [own, *workers, replace(engines[0], **largest)]


def roles_of_judges(judges: Sequence[RunConfig]) -> list[Role]:
    """Returns the replicas of the judges that a sweep starts for its runs, given one run for each."""
    return [role for run in judges for role in run.roles if role.name == JUDGE_ROLE]


def num_slots(judges: Sequence[Role], run: Sequence[Role]) -> int:
    """Returns the cores that a Ray of our own must offer so that one run at least has room beside the judges."""
    return math.ceil(sum(role.count * role.cpus for role in (*judges, *run)))


def num_at_once(judges: Sequence[Role], run: Sequence[Role], limit: int, machines: Sequence[Node]) -> int:
    """Returns the number of runs, at most `limit`, whose processes have room side by side.

    Args:
        judges: processes of the judges that all runs share.
        run: processes of one run.
        limit: >= 1.
        machines: nodes with all their resources free.

    Raises:
        MachineError: not even one run has room.
    """
    for count in range(1, limit + 1):
        try:
            place([*judges, *(replace(role, count=count * role.count) for role in run)], deepcopy(list(machines)))
        except MachineError:
            if count == 1:
                raise
            return count - 1
    return limit
