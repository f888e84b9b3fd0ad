"""Stepping of envs: in the learner's process, or in env-runner actors while the learner learns.

The algorithm starts a turn, does its own work, and collects the turn's result. Its own process acts when the turn is
collected. Actors act from the start, with the policy at that time: updates made meanwhile take effect one turn later.
Results do not depend on timing, so runs at a fixed seed repeat.
"""

import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import ray
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rlvlm.algorithms.heartbeat import Lost, Replacements, ended
from rlvlm.core.errors import MachineError
from rlvlm.core.steps import FloatArray
from rlvlm.envs.pixels import PIXELS

logger = logging.getLogger(__name__)

_MAX_EMPTY_TURNS = 5
"""Number of consecutive turns that lose every runner after which the runners count as unable to live."""

Sample = TypeVar("Sample")
"""Result of a turn; each algorithm has its own type."""


class LocalRunnerGroup(Generic[Sample]):
    """The runner of this process, which acts with the policy in training: nothing is sent.

    Args:
        runner: RLlib's local runner, a `BaseRunner` that has the learner's policy.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._turn: Mapping[str, Any] = {}

    def start(self, turn: Mapping[str, Any], values: ray.ObjectRef | None = None) -> None:  # noqa: ARG002 - it has the policy itself
        """Stores the turn that `collect` will act."""
        self._turn = turn

    def collect(self) -> Sample:
        """Acts the turn that was started and returns its result."""
        return self._runner.sample(**self._turn)

    def alive(self) -> tuple[int, ...]:
        """Returns numbers of the runners among which a turn may be divided; empty if there is only one."""
        return ()

    def revive(self) -> list[int]:
        """Revives none: a runner in this process is never lost on its own."""
        return []

    def get_state(self) -> dict[str, Any]:
        """Returns the runner's state tree."""
        return self._runner.save_tree()

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; for a group of actors, the state of the first."""
        runners = state.get("runners", {"1": state})  # the tree of a single runner has no list of runners
        if runners:
            self._runner.load_tree(runners[min(runners, key=int)])
        else:  # all were lost at that moment
            self._runner.begin(state["restarts"] + 1)


class RemoteRunnerGroup(Generic[Sample]):
    """RLlib's env-runner actors. Each turn costs one message to every runner, and one of plain arrays from it.

    Ray restarts a runner whose process dies, and `revive` takes it back; until then a turn yields less. One that is
    stopped or hangs, according to `heartbeat`, is ended first; a turn has no time limit.

    Args:
        group: RLlib's group with at least one remote runner and no local one.
        weights: returns the policy's present weights, in the form of the runners' `act`.
        join: joins the samples of several runners, in order.
        max_still_s: time without a step or a chunk after which a runner counts as hung; None: no limit.
        revival_s: maximum wait for a runner when all are lost, seconds.
    """

    def __init__(
        self,
        group: EnvRunnerGroup,
        weights: Callable[[], FloatArray],
        join: Callable[[Sequence[Sample]], Sample],
        max_still_s: float | None,
        revival_s: float,
    ) -> None:
        self._max_still_s, self._revival_s = max_still_s, revival_s
        self._group: Any = group  # RLlib's types do not allow arguments of called functions
        self._weights = weights
        self._join = join
        self._turn: Mapping[str, Any] = {}
        self._values: ray.ObjectRef | None = None
        self._calls: dict[ray.ObjectRef, int] = {}
        """Runner that each of the turn's calls went to."""
        self._processes: dict[int, str] = {}
        """Process in which each runner began; Ray may start another before anybody misses it."""
        self._restarts = self._num_empty = 0
        self._replacements = Replacements("env runner", "--algo.env-runners")

    def start(self, turn: Mapping[str, Any], values: ray.ObjectRef | None = None) -> None:
        """Makes every runner act the turn; returns at once.

        Args:
            turn: arguments of the runners' `act`.
            values: weights of the acting policy, in Ray's object store; None: the present ones.
        """
        # copied, because the learner changes the weights while the turn is acted
        self._turn, self._values = turn, ray.put(np.array(self._weights())) if values is None else values
        self._calls = self._send(self.alive(), "act", values=self._values, **turn)

    def collect(self) -> Sample:
        """Returns the turn's samples, in the order of the runners. If all are lost, the first one back repeats it.

        Raises:
            MachineError: no runner comes back, all are lost turn after turn, or a replaced one is stopped or hangs
            again.
            Exception: the error raised by an env.
        """
        samples = self._answers(self._calls)
        for index in samples:
            self._replacements.note_result(index)
        self._num_empty = 0 if samples else self._num_empty + 1
        if self._num_empty == _MAX_EMPTY_TURNS:
            raise MachineError(
                f"all env runners were lost, {_MAX_EMPTY_TURNS} times in a row",
                "look for what ends them (memory?), then `rlvlm resume` with fewer of them (--algo.env-runners)",
            )
        if not samples:
            self._await_revival()
            self.start(self._turn, self._values)
            return self.collect()
        return self._join([samples[index] for index in sorted(samples)])

    def alive(self) -> tuple[int, ...]:
        """Returns numbers of the runners among which a turn may be divided, as far as known: one may just have died."""
        return tuple(sorted(self._group.healthy_env_runner_ids()))

    def revive(self) -> list[int]:
        """Takes back runners that were lost and restarted; returns their numbers.

        They begin new episodes, with random numbers not used before. One that is lost again at once is tried the next
        time.
        """
        back = []
        for index in sorted(set(self._group.probe_unhealthy_env_runners())):
            if self._begin_anew(index):
                back.append(index)
                logger.warning("env runner %d was lost, with its episodes under way, and is back with new ones", index)
            else:
                logger.warning("env runner %d was lost again as soon as it had started", index)
        return back

    def get_state(self) -> dict[str, Any]:
        """Returns the state trees of all runners between two turns; a runner lost at this moment has none."""
        trees = self._answers(self._send(self.alive(), "save_tree"))
        return {"restarts": self._restarts, "runners": {str(index): tree for index, tree in trees.items()}}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; the first actor continues where a runner in the learner's process was.

        Raises:
            MachineError: a runner was lost meanwhile.
        """
        if "runners" not in state:  # saved by a run whose own process acted
            state = {"restarts": 0, "runners": {"1": state}}
        self._restarts = state["restarts"]
        for index in self.alive():
            if str(index) in state["runners"]:
                is_there = self._begin(index, "load_tree", tree=state["runners"][str(index)])
            else:
                is_there = self._begin_anew(index)
            if not is_there:
                raise MachineError(f"env runner {index} was lost as soon as it had started", "rlvlm doctor  (memory)")

    def _send(self, indices: Sequence[int], method: str, **arguments: object) -> dict[ray.ObjectRef, int]:
        """Calls a method of some runners; returns the calls, with the runner that each went to."""
        # RLlib's own calls wait without checking the actors
        actors = self._group._worker_manager.actors()
        return {actors[index].apply.remote(_call, method=method, **arguments): index for index in indices}

    def _answers(self, calls: Mapping[ray.ObjectRef, int]) -> dict[int, Any]:
        """Returns results by runner number; lost runners are left out, and marked as unhealthy."""
        answers, manager = {}, self._group._worker_manager
        for call, answer in ended(calls, self._max_still_s):
            index = calls[call]
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, Lost):
                manager.set_actor_state(index, False)
                self._replacements.replace(index, manager.actors()[index], answer)
            elif self._processes.setdefault(index, answer[-1]) == answer[-1]:
                answers[index], packed, _ = answer
                PIXELS.unpack(packed)
            else:  # it was lost between two calls, and would repeat its first episodes
                manager.set_actor_state(index, False)
        return answers

    def _begin_anew(self, index: int) -> bool:
        self._restarts += 1  # counted even if it fails: no two attempts may have the same random numbers
        return self._begin(index, "begin", restart=self._restarts)

    def _begin(self, index: int, method: str, **arguments: object) -> bool:
        """Calls a method by which a runner begins, in whatever process it now is; returns whether it still exists."""
        self._processes.pop(index, None)
        return index in self._answers(self._send([index], method, **arguments))

    def _await_revival(self) -> None:
        """Returns when at least one runner is back.

        Raises:
            MachineError: it takes too long.
        """
        give_up = time.monotonic() + self._revival_s
        while not self.revive():
            if time.monotonic() > give_up:
                raise MachineError(
                    f"all env runners are lost and none is back after {self._revival_s:g} s "
                    "(`env_runner_restore_timeout_s`)",
                    "look for what ends them (memory?), then `rlvlm resume` with fewer of them",
                )
            time.sleep(0.2)


def check_places(num_runners: int, cpus_each: float) -> None:
    """Raises unless the cluster has CPUs for every env runner; RLlib would wait for ever.

    Raises:
        MachineError: it has too few.
    """
    wanted, has = num_runners * cpus_each, ray.cluster_resources().get("CPU", 0.0)
    if wanted > has:
        raise MachineError(
            f"{num_runners} env runners ask for {wanted:g} CPU, the Ray cluster has {has:g}",
            "lower --algo.env-runners, or use a cluster that has them",
        )


def _call(runner: Any, method: str, **arguments: object) -> object:
    """Runs in the actor: returns the method's result, the images stored meanwhile, for the caller to store, and the
    process, or the exception that it raised.

    If raised there, an exception would end the actor, and RLlib would restart it without its cause.
    """
    try:
        if method == "load_tree":  # weights are large and only read, so not copied
            arguments = _writable(arguments)
        return getattr(runner, method)(**arguments), PIXELS.take_all(), ray.get_runtime_context().get_worker_id()
    except Exception as error:
        error.add_note(f"in env runner {runner.worker_index}:\n{traceback.format_exc()}")
        return error


def _writable(tree: object) -> Any:
    """Returns `tree` with copies of its arrays: arrays from Ray are read-only, and envs continue from theirs."""
    if isinstance(tree, dict):
        return {key: _writable(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_writable(value) for value in tree]
    return tree.copy() if isinstance(tree, np.ndarray) else tree
