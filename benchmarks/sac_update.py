"""One update of `rlvlm.algorithms.sac_pebble` beside a plain single-file SAC: `python benchmarks/sac_update.py`.

Both run in one process on one thread, in turns, so that a busy machine slows both. The peer is
`examples/sac_in_one_file.py`, written like the well-known single-file implementations. Prints milliseconds per update
and the ratio as JSON.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from sac_in_one_file import SAC

from rlvlm.algorithms.sac_pebble.algorithm import SACPebbleConfig
from rlvlm.algorithms.sac_pebble.learner import SACLearner
from rlvlm.core.steps import Transitions
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.rewards.source import EnvironmentReward

OBS, ACTIONS, ROWS, BATCH = 39, 4, 20_000, 256
ROUNDS, UPDATES = 20, 25


def make_learner():
    config = SACPebbleConfig().settings(task="drawer_open", reward=StepRewardConfig(source="environment"))
    spaces = (gym.spaces.Box(-1.0, 1.0, (OBS,), np.float32), gym.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32))
    spec = config.get_multi_rl_module_spec(spaces={DEFAULT_MODULE_ID: spaces})
    learner = SACLearner(config=config, module_spec=spec)
    learner.build()
    return learner


def make_rows():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    zeros = np.zeros(ROWS, np.float32)
    return Transitions(
        obs=normal(ROWS, OBS),
        actions=np.tanh(normal(ROWS, ACTIONS)),
        next_obs=normal(ROWS, OBS),
        terminated=zeros,
        env_rewards=normal(ROWS),
        success=zeros,
        snapshots=normal(ROWS, 20),
    )


def peer_updates(peer, columns):
    for _ in range(UPDATES):
        rows = np.random.default_rng(0).integers(ROWS, size=BATCH)
        batch = [torch.as_tensor(column[rows]) for column in columns]
        peer.update(*batch, torch.randn(BATCH, ACTIONS), torch.randn(BATCH, ACTIONS))


def main():
    torch.set_num_threads(1)
    learner, peer, rows, source = make_learner(), SAC(OBS, ACTIONS), make_rows(), EnvironmentReward()
    learner.replay.add(rows, rows.env_rewards)
    columns = (rows.obs, rows.actions, rows.next_obs, rows.terminated, rows.env_rewards)
    contestants = {"rlvlm": lambda: learner.learn(UPDATES, source), "peer": lambda: peer_updates(peer, columns)}
    times = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, run in contestants.items():
            started = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - started) / UPDATES * 1e3)
    result = {f"{name}_ms": round(statistics.median(values), 2) for name, values in times.items()}
    ratios = [theirs / ours for ours, theirs in zip(times["rlvlm"], times["peer"], strict=True)]
    print(
        json.dumps(
            {
                **result,
                "peer_over_rlvlm": round(statistics.median(ratios), 3),
                "best_ms": {name: round(min(values), 2) for name, values in times.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
