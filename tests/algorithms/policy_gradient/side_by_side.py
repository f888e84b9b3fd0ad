"""A function in several processes of one gloo group: what RLlib's learner actors are, in seconds and without Ray."""

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed

from rlvlm.algorithms.checkpoint import TreeWriter
from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.sharding import plain

_CONTEXT = multiprocessing.get_context("forkserver")  # forks of a process that has only imported
_CONTEXT.set_forkserver_preload(["rlvlm.algorithms.policy_gradient.algorithm", "transformers", "peft"])


def side_by_side(count: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 240.0) -> list[Any]:
    """What `function(*arguments)` returned in each of `count` processes, the first rank's first."""
    with TemporaryDirectory() as folder:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(count)]
        workers = [
            _CONTEXT.Process(target=_work, args=(rank, count, f"{folder}/store", pipe[1], function, arguments))
            for rank, pipe in enumerate(pipes)
        ]
        for worker, pipe in zip(workers, pipes, strict=True):
            worker.start()
            pipe[1].close()
        try:
            answers = []
            for number, (reader, _) in enumerate(pipes):
                assert reader.poll(timeout_s), f"rank {number} has not answered within {timeout_s} s"
                answers.append(torch.load(Path(reader.recv()), weights_only=False))
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
    for answer in answers:
        assert not (isinstance(answer, str) and answer.startswith("Traceback")), answer
    return answers


def save_together(learner: TokenLearner, folder: Path) -> None:
    """Writes a checkpoint of the `learner` of each process into `folder`, as an algorithm does."""
    is_several = distributed.is_initialized()
    writers, parts = [None if is_several and distributed.get_rank() else TreeWriter(folder)], [None]
    if is_several:
        distributed.broadcast_object_list(writers)
        parts *= distributed.get_world_size()
    tree = learner.begin_writing(str(writers[0].partial), has_start=False)
    parts[0] = own = learner.written(str(writers[0].partial), waits=True)
    if is_several:
        distributed.all_gather_object(parts, own)
    if not is_several or distributed.get_rank() == 0:
        assert not any(part.error for part in parts)
        writers[0].write({"learner": tree}, "vlm", {})
        writers[0].close({name: digest for part in parts for name, digest in part.digests.items()})
    if is_several:
        distributed.barrier()


def trained(learner: TokenLearner) -> dict[str, torch.Tensor]:
    """The whole trained weights, of the first of several processes; the others' are empty."""
    return {name: plain(value) for name, value in learner.policy.trained_state().items()}


def _work(rank: int, count: int, store: str, pipe: Any, function: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        if count > 1:
            distributed.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=60)
            )
        answer = function(*arguments)
    except BaseException:  # noqa: BLE001 - told to the test
        answer = traceback.format_exc()
    torch.save(answer, f"{store}.{rank}")
    pipe.send(f"{store}.{rank}")
    pipe.close()
