"""Where the worlds are stepped: in the learner's process, or in env-runner actors while the learner learns.

The algorithm starts a turn, does what it has to do, and collects what the turn brought. Its own process acts when the
turn is collected. Actors act from the moment it is started, with the policy as it was then: what is learned meanwhile
shows one turn later. Nothing depends on who is faster, so runs at a fixed seed repeat.
"""

import logging
import time
import traceback
from typing import Any

import ray
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from torch import Tensor

from rlvlm.algorithms.sac_pebble.runner import Sample, WorldRunner, join
from rlvlm.envs.registry import make_world
from rlvlm.errors import MachineError
from rlvlm.policies.squashed_gaussian import SquashedGaussian

logger = logging.getLogger(__name__)

_TURN = "turn"
_REVIVAL_S = 300.0
"""Longest wait for a runner when all are lost."""


class LocalCrew:
    """The runner of this process, acting with the very policy that the learner trains: nothing is sent.

    Args:
        runner: RLlib's local one.
        policy: the learner's.
    """

    def __init__(self, runner: WorldRunner, policy: SquashedGaussian) -> None:
        self._runner = runner
        self._runner.policy = policy
        self._turn: dict[str, Any] = {}

    def start(self, num_steps: int, random_actions: bool) -> None:
        """Remembers the turn that `collect` will act."""
        self._turn = {"num_steps": num_steps, "random_actions": random_actions}

    def collect(self) -> Sample:
        """Acts the turn that was started."""
        return self._runner.sample(**self._turn)

    def revive(self) -> list[int]:
        """No runner here can be lost without the rest."""
        return []

    def save_tree(self) -> dict[str, Any]:
        """The runner's state tree."""
        return self._runner.save_tree()

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned."""
        self._runner.load_tree(tree)


class RemoteCrew:
    """RLlib's env-runner actors. Each turn costs one message to every runner and one, of plain arrays, from it.

    A runner whose process dies is started again by Ray and taken back in by `revive`; until then a turn brings less.

    Args:
        group: with at least one remote runner and no local one.
        policy_values: [P] the policy's weights, where the learner changes them.
    """

    def __init__(self, group: EnvRunnerGroup, policy_values: Tensor) -> None:
        self._group: Any = group  # RLlib's types leave out that what is called may take arguments
        self._policy_values = policy_values
        self._turn: dict[str, Any] = {}
        self._restarts = 0

    def start(self, num_steps: int, random_actions: bool) -> None:
        """Has every runner act the turn with the policy as it is now; returns at once."""
        self._turn = {"num_steps": num_steps, "random_actions": random_actions}
        values = ray.put(self._policy_values.cpu().numpy())  # put copies it: the learner may go on
        self._group.foreach_env_runner_async(_call, tag=_TURN, kwargs={"method": "act", "values": values, **self._turn})

    def collect(self) -> Sample:
        """What the turn brought, in the order of the runners. Should all be lost, it is acted again by the first back.

        Raises:
            MachineError: no runner comes back.
            Exception: whatever a world raised.
        """
        answers = self._group.fetch_ready_async_reqs(tags=_TURN, timeout_seconds=None)
        samples = _opened([answer for _, answer in answers])
        if not samples:
            self._await_revival()
            self.start(**self._turn)
            return self.collect()
        return join([samples[index] for index in sorted(samples)])

    def revive(self) -> list[int]:
        """Takes runners that were lost and started again back in; returns their numbers.

        They begin new episodes, with random numbers that were not used before.
        """
        back = sorted(set(self._group.probe_unhealthy_env_runners()))
        for index in back:
            self._begin_anew(index)
            logger.warning("env runner %d was lost, with its episodes under way, and is back with new ones", index)
        return back

    def save_tree(self) -> dict[str, Any]:
        """The state trees of all runners between two turns; one that is lost at this moment has none."""
        answers = self._group.foreach_env_runner(_call, kwargs={"method": "save_tree"}, local_env_runner=False)
        return {"restarts": self._restarts, "runners": {str(index): tree for index, tree in _opened(answers).items()}}

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned."""
        self._restarts = tree["restarts"]
        for index in self._group.healthy_env_runner_ids():
            if str(index) in tree["runners"]:
                self._tell(index, "load_tree", tree=tree["runners"][str(index)])
            else:
                self._begin_anew(index)

    def _begin_anew(self, index: int) -> None:
        self._restarts += 1
        self._tell(index, "begin", restart=self._restarts)

    def _tell(self, index: int, method: str, **arguments: Any) -> None:
        """Calls a method of one runner.

        Raises:
            MachineError: the runner is lost.
        """
        answers = self._group.foreach_env_runner(
            _call, kwargs={"method": method, **arguments}, remote_worker_ids=[index], local_env_runner=False
        )
        if index not in _opened(answers):
            raise MachineError(f"env runner {index} was lost as soon as it had started", "rlvlm doctor  (memory)")

    def _await_revival(self) -> None:
        """Returns when at least one runner is back.

        Raises:
            MachineError: that takes too long.
        """
        give_up = time.monotonic() + _REVIVAL_S
        while not self.revive():
            if time.monotonic() > give_up:
                raise MachineError(
                    f"all env runners are lost and none is back after {_REVIVAL_S:.0f} s",
                    "look for what ends them (memory?), then `rlvlm resume` with fewer of them",
                )
            time.sleep(0.2)


def check_crew(config: Any) -> None:
    """Checks that a crew as in a `SACPebbleConfig` can be started; RLlib would wait, or try again and again.

    Raises:
        MachineError: the cluster will never have a place for every runner.
        Exception: whatever making a world raises.
    """
    if not config.num_env_runners:
        return
    wanted, has = config.num_env_runners * config.num_cpus_per_env_runner, ray.cluster_resources().get("CPU", 0.0)
    if wanted > has:
        raise MachineError(
            f"{config.num_env_runners} env runners ask for {wanted:g} CPU, the Ray cluster has {has:g}",
            "lower --algo.env-runners, or use a cluster that has them",
        )
    make_world(config.task, config.world, config.seed).close()


def build_crew(group: EnvRunnerGroup, policy: SquashedGaussian, policy_values: Tensor) -> LocalCrew | RemoteCrew:
    """Whoever acts for a learner with this `policy`, whose weights are `policy_values` `[P]`."""
    local = group.local_env_runner
    return LocalCrew(local, policy) if isinstance(local, WorldRunner) else RemoteCrew(group, policy_values)


def _call(runner: WorldRunner, method: str, **arguments: Any) -> tuple[int, Any]:
    """Runs in the actor: its number, and what the method returned or raised.

    Raised there, an exception would end the actor, and RLlib would start it again without saying why.
    """
    try:
        return runner.worker_index, getattr(runner, method)(**arguments)
    except Exception as error:
        error.add_note(f"in env runner {runner.worker_index}:\n{traceback.format_exc()}")
        return runner.worker_index, error


def _opened(answers: list[tuple[int, Any]]) -> dict[int, Any]:
    """The answers by runner.

    Raises:
        Exception: the first that is one.
    """
    for _, outcome in answers:
        if isinstance(outcome, Exception):
            raise outcome
    return dict(answers)
