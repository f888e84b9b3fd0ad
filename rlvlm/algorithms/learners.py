"""Who takes an algorithm's steps: a learner in its own process, or several actors of RLlib that take each together.

Several learners hold equal weights and the same rollout. Each goes through its share of a minibatch, weighted by what
it counts in the whole; the gradients are summed over all of them, and each takes the same step. So several learners
have the gradient of one, however uneven their shares are.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from torch import Tensor, distributed, nn

from rlvlm.algorithms.rllib import configure_torch, only_learner
from rlvlm.core.errors import MachineError
from rlvlm.core.finite import check_finite

Learner = TypeVar("Learner")
Row = TypeVar("Row")
Answer = TypeVar("Answer")


class Learners(Generic[Learner]):
    """All learners of an algorithm, as its own process sees them.

    Args:
        algorithm: set up by RLlib.
        threads: CPU threads of torch in each learner's process.
    """

    def __init__(self, algorithm: Algorithm, threads: int) -> None:
        assert algorithm.learner_group is not None, "RLlib has set it up"
        self._group: Any = algorithm.learner_group
        self.local: Learner | None = None
        """The one in this process; None where there are actors."""
        if self._group.is_local:
            self.local = only_learner(algorithm, threads)
        else:
            torch.set_num_threads(threads)
            self._ask(_settle, threads=threads)

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """What `method` returned to each learner, the first's first.

        Raises:
            MachineError: a learner is gone.
            Exception: whatever a learner raised.
        """
        if self.local is not None:
            return [getattr(self.local, method)(*arguments)]
        sent = [ray.put(argument) for argument in arguments]  # once, however many learners read it
        return self._ask(_call, method=method, arguments=sent)

    def call(self, method: str, *arguments: Any) -> Any:
        """What `method` returned to the first learner; all of them run it."""
        return self.call_all(method, *arguments)[0]

    def _ask(self, function: Callable[..., "_Answer"], **named: Any) -> list[Any]:
        answers = [answer.get() for answer in self._group.foreach_learner(function, healthy_only=False, **named)]
        if lost := [answer for answer in answers if not isinstance(answer, _Answer)]:
            raise MachineError(
                f"{len(lost)} of {len(answers)} learners are gone: {type(lost[0]).__name__}",
                "look for what ends them (memory?), then `rlvlm resume`",
            )
        if raised := [answer for answer in answers if isinstance(answer.outcome, Exception)]:
            raise min(raised, key=lambda answer: answer.time_s).outcome  # the others only missed this one in a sum
        return [answer.outcome for answer in sorted(answers, key=lambda answer: answer.rank)]


def check_learners(config: AlgorithmConfig, wanted: int, gpus_each: float, env_runners: int = 0) -> None:
    """Passes where the config's number of learners is `wanted` and the cluster has a place for each.

    Args:
        config: what RLlib was told.
        wanted: learners, by the hyperparameters.
        gpus_each: GPUs for each of them.
        env_runners: likewise, processes that play.

    Raises:
        ValueError: RLlib was told another number.
        MachineError: the cluster has too few cores or GPUs; RLlib would wait for them without a word.
    """
    if (config.num_env_runners, config.num_learners) != (env_runners, wanted):
        raise ValueError(
            f"num_env_runners must be {env_runners} and num_learners what the hyperparameters say, {wanted}; got "
            f"{config.num_env_runners} and {config.num_learners}: set them by .learning(...)"
        )
    if not (wanted and ray.is_initialized()):
        return
    has = ray.cluster_resources()
    for resource, each in (("GPU", gpus_each), ("CPU", 0.0 if gpus_each else 1.0)):
        total, there = wanted * each, has.get(resource, 0.0)
        if total > there:
            raise MachineError(
                f"{wanted} learners ask for {total:g} {resource}, the Ray cluster has {there:g}",
                "lower --algo.num-learners or --algo.gpus-per-learner, or use a cluster that has them",
            )


def local_shard(rows: Tensor) -> Tensor:
    """The part of `rows` [B] that this process's learner goes through: all of them where it is the only one.

    Shares differ by a row at most; with fewer rows than learners some are empty.
    """
    if not _are_several():
        return rows
    return rows.tensor_split(distributed.get_world_size())[distributed.get_rank()]


def all_reduce(numbers: Tensor) -> Tensor:
    """`numbers` summed over all learners, the same to the bit in each; themselves where there is one."""
    if not _are_several():
        return numbers
    summed = numbers.clone()
    distributed.all_reduce(summed)
    return summed


def add_up_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sums the gradients of `parameters` over all learners, in place; where nobody has one there is 0."""
    if not _are_several():
        return
    parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    summed = all_reduce(torch.cat([part.float().reshape(-1) for part in parts]))
    sizes = [part.numel() for part in parts]
    for parameter, values in zip(parameters, summed.split(sizes), strict=True):
        parameter.grad = values.reshape(parameter.shape).to(parameter.dtype)


def check_weights(parameters: Sequence[nn.Parameter], fix: str) -> None:
    """Passes where all of `parameters` are finite after a step; one may be broken that no loss of this step has seen.

    Raises:
        NumericsError: says how many are not.
    """
    sums = torch.stack([parameter.detach().float().sum() for parameter in parameters])
    check_finite("after an update", fix, {"parameters' sums": sums})


def map_sharded(rows: Sequence[Row], compute: Callable[[Sequence[Row]], list[Answer]]) -> list[Answer]:
    """`compute`'s answers for all of `rows`, in their order; each learner computes a share and is told the rest."""
    if not _are_several():
        return compute(rows)
    count, rank = distributed.get_world_size(), distributed.get_rank()
    bounds = [len(rows) * place // count for place in range(count + 1)]
    own = compute(rows[bounds[rank] : bounds[rank + 1]]) if bounds[rank] < bounds[rank + 1] else []
    parts: list[Any] = [None] * count
    distributed.all_gather_object(parts, own)
    return [answer for part in parts for answer in part]


def _are_several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _rank() -> int:
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _settle(learner: Any, threads: int) -> "_Answer":
    """Runs in a learner's actor, first of all."""
    configure_torch(threads)
    return _Answer(rank=_rank(), time_s=time.time(), outcome=None)


def _call(learner: Any, method: str, arguments: Sequence[Any]) -> "_Answer":
    """Runs in a learner's actor: what the method returned or raised.

    Raised there, an exception would end the actor without saying why. The others may be waiting for this learner in the
    middle of a sum; without its process group they stop waiting.
    """
    rank = _rank()
    outcome: Any
    try:
        outcome = getattr(learner, method)(*ray.get(list(arguments)))
    except Exception as error:
        error.add_note(f"in learner {rank}:\n{traceback.format_exc()}")
        outcome = error
        if distributed.is_initialized():
            distributed.destroy_process_group()
    return _Answer(rank=rank, time_s=time.time(), outcome=outcome)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What became of a call to one learner."""

    rank: int
    time_s: float
    """When it was over, by the wall clock."""
    outcome: Any
    """What was returned, or the exception."""
