"""Where the envs are stepped: in the learner's process, or in env-runner actors while the learner learns.

The algorithm starts a turn, does what it has to do, and collects what the turn brought. Its own process acts when the
turn is collected. Actors act from the moment it is started, with the policy as it was then: what is learned meanwhile
shows one turn later. Results do not depend on which is faster, so runs at a fixed seed repeat.
"""

import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rlvlm.algorithms.heartbeat import Lost, Replacements, ended
from rlvlm.core.errors import MachineError
from rlvlm.envs.pixels import PIXELS

logger = logging.getLogger(__name__)

_MAX_EMPTY_TURNS = 5
"""Turns in a row that lose every runner before it is believed that they cannot live."""

Sample = TypeVar("Sample")
"""Result of a turn; each algorithm has its own type."""
Sampled = TypeVar("Sampled", covariant=True)


class Runner(Protocol[Sampled]):
    """Methods that a runner group needs of an env runner, besides RLlib's."""

    worker_index: int
    """0 in the learner's process, from 1 on elsewhere."""

    def sample(self, **turn: Any) -> Sampled:
        """Acts a turn with the policy that it has."""
        ...

    def act(self, *, values: NDArray[Any], **turn: Any) -> Sampled:
        """`sample` with the policy whose weights are `values`; for actors."""
        ...

    def begin(self, restart: int) -> None:
        """New envs at their first episodes, with random numbers that no other runner or restart has."""
        ...

    def save_tree(self) -> dict[str, Any]:
        """Envs, running episodes and generators. Not `get_state`: RLlib calls its runners' `set_state` with weights."""
        ...

    def load_tree(self, tree: dict[str, Any]) -> None: ...


class LocalRunnerGroup(Generic[Sample]):
    """The runner of this process, acting with the very policy that the learner trains: nothing is sent.

    Args:
        runner: RLlib's local one, which has the learner's policy.
    """

    def __init__(self, runner: Runner[Sample]) -> None:
        self._runner = runner
        self._turn: Mapping[str, Any] = {}

    def start(self, turn: Mapping[str, Any], values: Any = None) -> None:  # noqa: ARG002 - it has the policy itself
        """Remembers the turn that `collect` will act."""
        self._turn = turn

    def collect(self) -> Sample:
        """Acts the turn that was started."""
        return self._runner.sample(**self._turn)

    def alive(self) -> tuple[int, ...]:
        """Numbers of the runners that a turn may be shared out to; none where there is one alone."""
        return ()

    def revive(self) -> list[int]:
        """No runner here can be lost without the rest."""
        return []

    def get_state(self) -> dict[str, Any]:
        """The runner's state tree."""
        return self._runner.save_tree()

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; of a group of actors, what the first of them did."""
        runners = state.get("runners", {"1": state})  # a tree of one runner's own has no list of runners
        if runners:
            self._runner.load_tree(runners[min(runners, key=int)])
        else:  # all were lost at that moment
            self._runner.begin(state["restarts"] + 1)


class RemoteRunnerGroup(Generic[Sample]):
    """RLlib's env-runner actors. Each turn costs one message to every runner and one, of plain arrays, from it.

    A runner whose process dies is started again by Ray and taken back in by `revive`; until then a turn brings less.
    One that is stopped or hangs, as `heartbeat` has it, is ended first; a turn has no time limit.

    Args:
        group: with at least one remote runner and no local one.
        weights: gives the policy's present weights, as `Runner.act` takes them.
        join: makes one sample of those of several runners, in their order.
        max_still_s: a runner without a step or a chunk for so long hangs; None: such a one is waited for.
        revival_s: longest wait for a runner when all are lost.
    """

    def __init__(
        self,
        group: EnvRunnerGroup,
        weights: Callable[[], NDArray[Any]],
        join: Callable[[Sequence[Sample]], Sample],
        max_still_s: float | None,
        revival_s: float,
    ) -> None:
        self._max_still_s, self._revival_s = max_still_s, revival_s
        self._group: Any = group  # RLlib's types leave out that what is called may take arguments
        self._weights = weights
        self._join = join
        self._turn: Mapping[str, Any] = {}
        self._values: Any = None
        self._calls: dict[ray.ObjectRef, int] = {}
        """The runner that each call of the turn went to."""
        self._restarts = self._num_empty = 0
        self._replacements = Replacements("env runner", "--algo.env-runners")

    def start(self, turn: Mapping[str, Any], values: Any = None) -> None:
        """Has every runner act the turn; returns at once.

        Args:
            turn: what `Runner.act` takes.
            values: of the policy that acts, in Ray's object store; None: as it is now.
        """
        # copied: the learner changes the weights while the turn is acted
        self._turn, self._values = turn, ray.put(np.array(self._weights())) if values is None else values
        self._calls = self._send(self.alive(), "act", values=self._values, **turn)

    def collect(self) -> Sample:
        """The turn's samples, in the order of the runners. If all are lost, the first one back acts it again.

        Raises:
            MachineError: no runner comes back, all are lost turn after turn, or one that was replaced because it was
                stopped or hung does it again.
            Exception: whatever an env raised.
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
        """Numbers of the runners that a turn may be shared out to, as far as is known: one may just have died."""
        return tuple(sorted(self._group.healthy_env_runner_ids()))

    def revive(self) -> list[int]:
        """Takes runners that were lost and started again back in; returns their numbers.

        They begin new episodes, with random numbers that were not used before. One that is lost again at once is tried
        the next time.
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
        """The state trees of all runners between two turns; one that is lost at this moment has none."""
        trees = self._answers(self._send(self.alive(), "save_tree"))
        return {"restarts": self._restarts, "runners": {str(index): tree for index, tree in trees.items()}}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; the first actor goes on where a runner in the learner's process was.

        Raises:
            MachineError: a runner is lost meanwhile.
        """
        if "runners" not in state:  # saved by a run whose own process acted
            state = {"restarts": 0, "runners": {"1": state}}
        self._restarts = state["restarts"]
        for index in self.alive():
            if str(index) in state["runners"]:
                is_there = self._call_runner(index, "load_tree", tree=state["runners"][str(index)])
            else:
                is_there = self._begin_anew(index)
            if not is_there:
                raise MachineError(f"env runner {index} was lost as soon as it had started", "rlvlm doctor  (memory)")

    def _send(self, indices: Sequence[int], method: str, **arguments: Any) -> dict[ray.ObjectRef, int]:
        """Calls a method of some runners; returns the calls, and the runner that each went to."""
        # RLlib's own calls wait without checking on the actors that they wait for
        actors = self._group._worker_manager.actors()
        return {actors[index].apply.remote(_call, method=method, **arguments): index for index in indices}

    def _answers(self, calls: Mapping[ray.ObjectRef, int]) -> dict[int, Any]:
        """Results of runners, by their numbers; those that are lost are left out, and not healthy from then on."""
        answers, manager = {}, self._group._worker_manager
        for call, answer in ended(calls, self._max_still_s):
            index = calls[call]
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, Lost):
                manager.set_actor_state(index, False)
                self._replacements.replace(index, manager.actors()[index], answer)
            else:
                answers[index], packed = answer
                PIXELS.unpack(packed)
        return answers

    def _begin_anew(self, index: int) -> bool:
        self._restarts += 1  # counted even where it fails: no two attempts may have the same random numbers
        return self._call_runner(index, "begin", restart=self._restarts)

    def _call_runner(self, index: int, method: str, **arguments: Any) -> bool:
        """Calls a method of one runner; returns whether it is still there."""
        return index in self._answers(self._send([index], method, **arguments))

    def _await_revival(self) -> None:
        """Returns when at least one runner is back.

        Raises:
            MachineError: that takes too long.
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


def _call(runner: Any, method: str, **arguments: Any) -> Any:
    """Runs in the actor: what the method returned and the images that were kept meanwhile, for the caller to keep, or
    the exception that it raised.

    Raised there, an exception would end the actor, and RLlib would start it again without saying why.
    """
    try:
        if method == "load_tree":  # weights, which are large and only read, are not copied
            arguments = _writable(arguments)
        return getattr(runner, method)(**arguments), PIXELS.take_all()
    except Exception as error:
        error.add_note(f"in env runner {runner.worker_index}:\n{traceback.format_exc()}")
        return error


def _writable(tree: Any) -> Any:
    """`tree` with copies of its arrays: those that come through Ray are read-only, and envs go on from theirs."""
    if isinstance(tree, dict):
        return {key: _writable(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_writable(value) for value in tree]
    return tree.copy() if isinstance(tree, np.ndarray) else tree
