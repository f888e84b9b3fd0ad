"""The learners of an algorithm: RLlib's, given their data by us, in this process or as actors that step together.

Several learners hold equal weights and the same rollout. Each processes its share of a minibatch, weighted by its part
of the whole; gradients are summed over all of them, and each takes the same step. So several learners have the gradient
of one, however uneven their shares. `sharding` is for a policy too large for any single GPU.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

import numpy as np
import ray
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from torch import Tensor, distributed, nn
from torch.distributed import DistError

from rlvlm.algorithms.heartbeat import Lost, ended, process_of, start_heartbeat
from rlvlm.algorithms.sharding import fetch_bucket, is_sharded, local, put_buckets
from rlvlm.core.errors import MachineError, RunError, first_line, is_out_of_memory
from rlvlm.core.finite import check_finite
from rlvlm.envs.pixels import PIXELS
from rlvlm.policies.buckets import Bucket, fill_from_buckets
from rlvlm.policies.protocol import Policy
from rlvlm.vlms.devices import follow_ray, pick_device

Learner = TypeVar("Learner")
Row = TypeVar("Row")
Answer = TypeVar("Answer")

_LAST_WORDS_S = 5.0
"""Seconds that the other learners have to report their errors, once one has failed."""


class ManualLearner(TorchLearner):
    """A learner that gets its data from the algorithm, and takes its own steps."""

    def configure_optimizers_for_module(self, module_id: str, config: object = None) -> None:
        """Registers nothing: the learner's own optimiser takes the steps."""

    def _make_modules_ddp_if_necessary(self) -> None:
        """Does nothing: `add_up_gradients` sums gradients, so that shares may be uneven; RLlib's wrapper averages."""

    def compute_loss_for_module(self, *, module_id: str, config: object, batch: object, fwd_out: object) -> Tensor:
        """Refuses RLlib's own path from episodes to a loss, which our learners do not use.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{type(self).__name__} is handed what it learns from; call `learn`")

    def configure_torch(self, threads: int) -> None:
        """Configures torch: `threads` CPU threads, no filling of fresh memory; also starts heartbeats."""
        start_heartbeat()
        torch.set_num_threads(threads)
        # RLlib requests determinism from torch, which also writes NaN to all fresh memory, at once for a replay.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def own_learner_gpu(device: str) -> dict[str, Any]:
    """Returns RLlib's settings for the GPU of the learner in this process: none, or the one that `device` (auto, cpu or
    cuda) means. With it a Tuner's trial reserves a GPU for the learner, its replay and its batches.

    Raises:
        ModelUnavailable: `cuda` is requested and there is none here.
    """
    chosen = pick_device(device, "algo")
    return {"num_gpus_per_learner": int(chosen.type != "cpu"), "local_gpu_idx": chosen.index or 0}


def use_assigned_gpu() -> None:
    """Places the networks of this process on the GPU that Ray assigned to it; called before any is made. The run's own
    process decides for itself.
    """
    if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
        follow_ray([str(gpu) for gpu in ray.get_gpu_ids()])


class Learners(Generic[Learner]):
    """All learners of an algorithm, seen from its own process.

    Args:
        group: RLlib's learner group.
        threads: CPU threads of torch in each learner's process.
    """

    def __init__(self, group: Any, threads: int) -> None:
        self._group = group
        self.local: Learner | None = None
        """Learner in this process; None if the learners are actors."""
        if self._group.is_local:
            self.local = next(iter(self._group.foreach_learner(lambda learner: learner))).get()
        else:
            torch.set_num_threads(threads)
        self._failure: Exception | None = None
        """Error for which the learners were ended."""
        self.call_all("configure_torch", threads)

    def call_all(self, method: str, *arguments: Any, first_alone: bool = False) -> list[Any]:
        """Calls `method` (or a part's, as `imitator.train`) on all learners and returns the results, the first
        learner's first; with `first_alone` None for all others.

        Raises:
            MachineError: a learner is gone or stopped, or its GPU or its connection to the others failed; the others
                were ended, because they would wait for it.
            Exception: the error that a learner raised.
        """
        if self.local is not None:
            return [attrgetter(method)(self.local)(*arguments)]
        if self._failure is not None:  # raised again, so that later calls during cleanup do not hide it
            raise self._failure
        sent = [ray.put(argument) for argument in arguments]  # stored once, however many learners read it
        # images for an env that cannot draw its past again: they travel with episodes and demonstrations
        shown = [each for argument in arguments for each in (argument if isinstance(argument, list) else [argument])]
        # an episode's own, because its observations may contain several moments in a row
        packed = PIXELS.pack(getattr(each, "snapshots", each.obs.snapshots) for each in shown if hasattr(each, "obs"))
        actors = self._group._worker_manager.actors()  # RLlib's own calls wait for all, whatever happens to one
        pixels = ray.put(packed) if packed else None
        call = partial(_call, method=method, arguments=sent, pixels=pixels, first_alone=first_alone)
        calls = {actor.apply.remote(call): number for number, actor in actors.items()}
        answers: dict[int, Any] = {}
        for ref, answer in ended(calls):
            answers[calls[ref]] = answer
            if isinstance(answer, (Lost, Exception)):
                # The others are in a sum that never ends, or after NCCL's half an hour: they are not waited for. But
                # one that failed on its own reports it now, and its failure may be the cause of this one.
                rest = [ref for ref, number in calls.items() if number not in answers]
                failed, _ = ray.wait(rest, num_returns=len(rest), timeout=_LAST_WORDS_S) if rest else ([], [])
                answers |= {calls[ref]: answer for ref, answer in ended(failed)}
                for actor in actors.values():
                    ray.kill(actor)
                self._failure = self._cause(answers, {number: process_of(ref) for ref, number in calls.items()})
                raise self._failure
        return [answers[number] for number in sorted(answers)]

    def _cause(self, answers: Mapping[int, object], processes: Mapping[int, str]) -> Exception:
        """Returns the error of failed learners: that of one that is gone, else of the first that raised."""
        others = "; the others were ended" if len(processes) > 1 else ""
        for number, answer in answers.items():
            if isinstance(answer, Lost):
                return MachineError(
                    f"learner {number} {answer.what}{others}",
                    f"{answer.fix}, then `rlvlm resume`, with another --algo.num-learners where it may not come back; "
                    "start it again where nothing was saved",
                )
        number, error = next((number, answer) for number, answer in answers.items() if isinstance(answer, Exception))
        error.add_note(f"learner {number} {processes[number]} raised this{others}")
        is_full = is_out_of_memory(error)
        if isinstance(error, RunError) or not (is_full or isinstance(error, (torch.AcceleratorError, DistError))):
            return error
        failure = MachineError(
            f"learner {number} {processes[number]} failed: {first_line(error)}",
            "give it less at once (--algo.microbatch-tokens lower) or share the weights out (--algo.shard), then "
            "`rlvlm resume`" if is_full else
            "look at that GPU (nvidia-smi, Xid lines of dmesg), then `rlvlm resume`, elsewhere where it is broken",
        )  # fmt: skip
        failure.__cause__ = error
        return failure

    def call(self, method: str, *arguments: object) -> Any:
        """Calls `method` on all learners and returns the result of the first."""
        return self.call_all(method, *arguments, first_alone=True)[0]

    def begin_as(self, policy: Policy, bucket_bytes: int) -> None:
        """Gives actors the weights of `policy`, including fresh adapters; the local learner has them already."""
        if self.local is None:
            self.call_all("take_weights", put_buckets(policy.trained_state(), bucket_bytes), policy.meta())

    def sync_to(self, policy: Policy, bucket_bytes: int) -> list[Bucket]:
        """Gives `policy` the weights of learners that are actors, bucket by bucket, and returns the buckets, which
        engines may read too.
        """
        if self.local is not None:
            return []
        buckets = self.call("put_weights", bucket_bytes)
        fill_from_buckets(policy.trained_state(), buckets, fetch_bucket)
        policy.forget_stale_images()
        return buckets


def _call(
    learner: ManualLearner, method: str, arguments: Sequence[ray.ObjectRef], pixels: ray.ObjectRef | None,
    first_alone: bool = False,
) -> object:  # fmt: skip
    """Runs in a learner's actor: returns the method's result, or the exception that it raised. It keeps only the newest
    images of `PixelStore.pack`.

    If raised there, an exception would end the actor without its cause.
    """
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    try:
        if pixels is not None:
            PIXELS.clear()
            PIXELS.unpack(ray.get(pixels))
        outcome = attrgetter(method)(learner)(*ray.get(list(arguments)))
        return None if first_alone and rank else outcome  # billions of weights would be sent once for each learner
    except Exception as error:
        error.add_note(f"in learner {rank}:\n{traceback.format_exc()}")
        return error


def check_learners(config: AlgorithmConfig, wanted: int, gpus_each: float, env_runners: int = 0) -> None:
    """Raises unless the config has the `wanted` number of learners and the cluster the resources for each.

    Args:
        config: config with RLlib's numbers.
        wanted: number of learners requested by the hyperparameters.
        gpus_each: GPUs for each of them.
        env_runners: number of env runner processes.

    Raises:
        ValueError: RLlib has another number.
        MachineError: the cluster has too few cores or GPUs; RLlib would wait for them silently.
    """
    if (config.num_env_runners, config.num_learners) != (env_runners, wanted):
        raise ValueError(
            f"num_env_runners must be {env_runners} and num_learners what the hyperparameters say, {wanted}; got "
            f"{config.num_env_runners} and {config.num_learners}: set them by .settings(algo=...)"
        )
    if not (wanted and ray.is_initialized()):  # a config may be checked without a cluster
        return
    has = ray.cluster_resources()
    for resource, each in (("GPU", gpus_each), ("CPU", 0.0 if gpus_each else 1.0)):
        total, there = wanted * each, has.get(resource, 0.0)
        if total > there:
            raise MachineError(
                f"{wanted} learners ask for {total:g} {resource}, the Ray cluster has {there:g}",
                "lower --algo.num-learners or --algo.gpus-per-learner, or use a cluster that has them",
            )


def _are_several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def local_shard(rows: Tensor) -> Tensor:
    """Returns this learner's share of `rows` [B]: all of them if it is the only one.

    Shares differ by a row at most; with fewer rows than learners some are empty.
    """
    if not _are_several():
        return rows
    return rows.tensor_split(distributed.get_world_size())[distributed.get_rank()]


def own_stream(rng: np.random.Generator) -> np.random.Generator:
    """Returns a generator of this learner's own, derived from the common `rng`; with one learner `rng` itself."""
    if not _are_several():
        return rng
    (seed,) = rng.bit_generator.random_raw(1).tolist()  # equal in all learners, and their `rng` advances equally
    return np.random.default_rng([seed, distributed.get_rank()])


def all_reduce(numbers: Tensor) -> Tensor:
    """Returns `numbers` summed over all learners, bit-identical in each; unchanged if there is only one."""
    if not _are_several():
        return numbers
    summed = numbers.clone()
    distributed.all_reduce(summed)
    return summed


def add_up_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sums the gradients of `parameters` over all learners, in place; 0 if no learner has one.

    Gradients of slices were already summed in the backward pass.
    """
    parameters = [parameter for parameter in parameters if not is_sharded([parameter])]
    if not (_are_several() and parameters):
        return
    # one message for all gradients; a learner with an empty share contributes zeros
    parts = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    summed = all_reduce(torch.cat([part.float().reshape(-1) for part in parts]))
    sizes = [part.numel() for part in parts]
    for parameter, values in zip(parameters, summed.split(sizes), strict=True):
        parameter.grad = values.reshape(parameter.shape).to(parameter.dtype)


def check_weights(parameters: Sequence[nn.Parameter], fix: str) -> None:
    """Raises unless all `parameters` are finite after a step; the step's loss need not reveal a broken one.

    Raises:
        NumericsError: some are not; the message gives their number.
    """
    # one number per parameter, and one transfer from the GPU for all of them
    sums = torch.stack([local(parameter.detach()).float().sum() for parameter in parameters])
    check_finite("after an update", fix, {"parameters' sums": sums})


def largest(count: int) -> int:
    """Returns the maximum of all learners' `count`."""
    if not _are_several():
        return count
    counts = [count] * distributed.get_world_size()
    distributed.all_gather_object(counts, count)
    return max(counts)


def map_sharded(rows: Sequence[Row], compute: Callable[[Sequence[Row]], list[Answer]]) -> list[Answer]:
    """Computes answers for all of `rows`, in order; each learner computes a share and receives the rest."""
    if not _are_several():
        return compute(rows)
    count, rank = distributed.get_world_size(), distributed.get_rank()
    # shares are equally long, so that learners that gather weights together call the policy equally often: some rows
    # are computed twice, and the surplus of the last share is cut off
    size = -(-len(rows) // count)
    parts: list[list[Answer]] = [[]] * count
    distributed.all_gather_object(parts, compute([rows[(rank * size + k) % len(rows)] for k in range(size)]))
    return [answer for part in parts for answer in part][: len(rows)]
