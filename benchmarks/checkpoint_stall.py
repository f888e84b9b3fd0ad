"""Seconds that sharded learners stand still while a checkpoint is made, by turns, in medians:

    python benchmarks/checkpoint_stall.py
    python benchmarks/checkpoint_stall.py --mib 256 --ranks 2 4 --rounds 5

Random float32 weights and Adam's averages on ranks of a gloo group, each of which has its share (FSDP2).

gathered: as before 0.2.0: the first rank gathers weights, averages and the start, then `np.savez`, the policy as
    safetensors, SHA-256 of the files; without the way through Ray's object store that this took besides.
shards: each rank copies its share and writes it in the background, with its SHA-256; the start is there already.
torch: `torch.distributed.checkpoint.async_save` to safetensors, the same tensors, without digests.

`still` is until training may go on, `on disk` until all is there, `processor` of all ranks together.
"""

import hashlib
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import tyro
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.sharding import local, optimizer_tree, plain, rejoined
from rlvlm.core.disk import sync_tree

WIDTH = 4096
"""Of square weights of 64 MiB."""


@dataclass(frozen=True, kw_only=True)
class Config:
    mib: int = 1024
    """Size of the weights."""
    ranks: tuple[int, ...] = (1, 2, 4)
    rounds: int = 3
    folder: Path | None = None
    """Where checkpoints go, and are removed; None: a temporary folder."""


def learner_of(mib: int) -> Any:
    """What a checkpoint takes of a learner, with random weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(mib // 64)))
    if distributed.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for weight in model.parameters():
        averages = {name: rejoined(local(weight.detach()).clone(), weight) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.tensor(1.0), **averages}
    own = {name: weight.detach() for name, weight in model.named_parameters()}
    return SimpleNamespace(
        policy=SimpleNamespace(trained_state=lambda: own),
        batches=SimpleNamespace(start={name: local(weight).clone() for name, weight in own.items()}),
        parameters=[*model.parameters()],
        _optimizer=optimizer, _generator=torch.Generator(), _order=np.random.default_rng(0), num_updates=1,
        _lr_scale=1.0, _latest={}, _writing=None, other_group=distributed.new_group(backend="gloo"),
    )  # fmt: skip


def gathered(learner: Any, folder: Path) -> Callable[[], None]:
    own = learner.policy.trained_state()
    tree = {
        "trained": {name: plain(value) for name, value in own.items()},
        "start": {name: plain(rejoined(value, own[name])) for name, value in learner.batches.start.items()},
        **optimizer_tree(learner._optimizer),
    }
    if distributed.get_rank() == 0:
        arrays = {f"{kind}/{name}": value.numpy() for kind, values in tree.items() for name, value in values.items()}
        np.savez(folder / "arrays.npz", allow_pickle=False, **arrays)
        save_file(tree["trained"], folder / "policy.safetensors")
        for file in folder.iterdir():
            with open(file, "rb") as stream:
                hashlib.file_digest(stream, "sha256")
        sync_tree(folder)
    return lambda: None


def shards(learner: Any, folder: Path) -> Callable[[], None]:
    TokenLearner.begin_writing(learner, str(folder), has_start=True)
    return learner._writing.result


def with_torch(learner: Any, folder: Path) -> Callable[[], None]:
    states = learner._optimizer.state_dict()["state"]
    adam = {f"adam.{number}.{name}": value for number, state in states.items() for name, value in state.items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    state = {**learner.policy.trained_state(), **adam}
    # it plans by collective calls in a thread, which in the learners' own group would meet those of an update
    return dcp.async_save(state, storage_writer=writer, process_group=learner.other_group).result


WAYS = {"gathered": gathered, "shards": shards, "torch": with_torch}


@contextmanager
def group_of(rank: int, count: int, store: str) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def work(rank: int, count: int, config: Config, folder: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    with group_of(rank, count, f"{folder}/group"):
        learner = learner_of(config.mib)
        for number in range(config.rounds):
            for name, way in WAYS.items():
                place = folder / f"{name}-{number}"
                place.mkdir(exist_ok=True)
                distributed.barrier()
                spent, began = time.process_time(), time.monotonic()
                finish = way(learner, place)
                distributed.barrier()  # the next update takes all of them
                still = time.monotonic() - began
                finish()
                distributed.barrier()
                pipe.send((name, still, time.monotonic() - began, time.process_time() - spent))
                distributed.barrier()
                if rank == 0:
                    shutil.rmtree(place)


def measure(count: int, config: Config, folder: Path) -> None:
    context = multiprocessing.get_context("fork")  # this process has imported all, and computed nothing
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [
        context.Process(target=work, args=(rank, count, config, folder, pipe[1])) for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    rows: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    for _ in range(config.rounds * len(WAYS)):
        name, *numbers = zip(*(reader.recv() for reader, _ in pipes), strict=True)
        still, total, spent = numbers
        rows[name[0]].append([max(still), max(total), sum(spent)])
    for process in processes:
        process.join()
    for name, found in rows.items():
        still, total, spent = (statistics.median(column) for column in zip(*found, strict=True))
        load = os.getloadavg()[0]
        print(f"| {count} | {name} | {still:.2f} | {total:.1f} | {spent:.1f} | {load:.0f} |", flush=True)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    print(f"{config.mib} MiB of weights, medians of {config.rounds}")
    print("| ranks | way | still, s | on disk | processor | load |\n|---|---|---|---|---|---|", flush=True)
    for count in config.ranks:
        with tempfile.TemporaryDirectory(dir=config.folder) as folder:
            measure(count, config, Path(folder))


if __name__ == "__main__":
    main()
