"""Env steps per second of envs in chunks by the number of their workers: a simulator's, drawn as a policy looks at it,
or those of an env that sleeps, on a simulated cluster of two nodes.

    python benchmarks/env_workers.py --task libero_10/0 --workers 1 2
    python benchmarks/env_workers.py --task sleeping --workers 1 2 4 8 16 --nodes 2

A row of JSON for each number of workers: medians over rounds, which take turns.
"""

import json
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import ray
import tyro
from ray.cluster_utils import Cluster

from rlvlm.algorithms.policy_gradient.env_workers import WorkerEnvs, start_workers
from rlvlm.core.episodes import ChunkStep
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.push_block import PushBlock, PushBlocks
from rlvlm.envs.registry import Task, make_env, task_env

CHUNK_S = 0.15


class SleepingTables(PushBlocks):
    """They take their time for every chunk, and no core."""

    def step(self, rows: Any, chunks: Any) -> ChunkStep:
        """Steps `rows`, one after the other."""
        time.sleep(CHUNK_S * len(rows))
        return super().step(rows, chunks)


class SleepingPushBlock(PushBlock):
    """An env of such tables."""

    def many(self) -> PushBlocks:
        """Asleep most of the time."""
        return SleepingTables(self.episode_steps, False)


SLEEPING = Task(name="sleeping", goal="push", maker="env_workers:SleepingPushBlock", kind="chunks")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is measured."""

    task: str = "libero_10/0"
    """In chunks; `sleeping`: tables that take 150 ms a chunk, as LIBERO's 8 steps do, without a core."""
    workers: tuple[int, ...] = (1, 2)
    envs: int = 16
    """Episodes side by side."""
    chunks: int = 4
    """Chunks of each, in a round."""
    rounds: int = 3
    image_px: int = 128
    nodes: int = 1
    """Nodes of the simulated cluster, on this machine."""


def main(trial: Trial) -> None:
    """Prints one JSON line per number of workers."""
    cores = max(trial.workers) + 1
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cores, "include_dashboard": False})
    for _ in range(trial.nodes - 1):
        cluster.add_node(num_cpus=cores)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    task = "env_workers:SLEEPING" if trial.task == "sleeping" else trial.task
    settings = ChunkEnvConfig(episode_steps=600) if trial.task == "sleeping" else task_env(task)
    local = make_env(task, settings, 0)
    pools = {count: start_workers(count, task, 0, trial.image_px) for count in trial.workers}
    rng, rates = np.random.default_rng(0), {count: [] for count in trial.workers}
    for number in range(trial.rounds + 1):  # the first loads the envs
        for count, workers in pools.items():
            envs = WorkerEnvs(workers, settings, local, 1, lambda keys, images: None)
            envs.begin(np.arange(trial.envs) + 100 * number)
            rows, steps, began = np.arange(trial.envs), 0, time.monotonic()
            for _ in range(trial.chunks):
                low, high = local.action_low, local.action_high
                chunks = rng.uniform(low, high, (len(rows), local.chunk_steps, len(low))).astype(np.float32)
                came = envs.step(rows, chunks)
                steps += int(came.steps.sum())
                rows = rows[~came.ended]
            if number:
                rates[count].append(steps / (time.monotonic() - began))
    for count, workers in pools.items():
        places = {
            ray.get(worker.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()))
            for worker in workers
        }
        rate = median(rates[count])
        row = {"task": trial.task, "workers": count, "nodes": len(places), "env_steps_per_s": round(rate, 1)}
        print(json.dumps(row | {"ratio": round(rate / median(rates[trial.workers[0]]), 2)}), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Trial))
