"""Env runners that crash, are killed and hang, over and over: the run does all of its steps, and each row is true."""

import os
import sys
import time
from collections import defaultdict
from typing import Any

import numpy as np
import psutil
import pytest
from chaos import Killer, pids_below

from rlvlm.algorithms.sac_pebble.algorithm import SACPebbleConfig
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.core import metrics
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.registry import Task
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.testing import TinyEnv

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1_800)]

P_CRASH = 0.01
"""Of an env at each of its steps: the process is gone at once."""
STEPS, EPISODE_STEPS = 800, 20
KILLS, KILL_EVERY_S, PATIENCE_S = 3, 10.0, 20.0


class CrashingEnv(TinyEnv):
    """A TinyEnv that shows which episode and which step it is in, and that takes its process down now and then."""

    def reset(self, *, seed=None, options=None):
        self._mark = -1.0
        super().reset(seed=seed, options=options)
        self._mark = int(self.np_random.integers(2**23)) / 2**23  # a float32 holds it
        return self._observe(), self._info()

    def step(self, action):
        if np.random.default_rng().random() < P_CRASH:
            os._exit(1)
        return super().step(action)

    def _observe(self):
        obs = super()._observe()
        obs[:2] = self._mark, self._steps / 32
        return obs


CRASHING = Task(name="crashing", goal="push", maker="tests.faults.test_crashing_runners:CrashingEnv")


def test_crashes_kills_and_a_hang_lose_no_step_and_damage_no_episode(local_ray):
    sac = SACConfig(
        hidden=(16, 16), batch_size=16, seed_steps=100, turn_steps=7, replay_capacity=10_000, env_runners=2,
        updates_per_step=0.1,
    )  # fmt: skip
    config = (
        SACPebbleConfig()
        .settings(
            task="tests.faults.test_crashing_runners:CRASHING",
            env_settings=StepEnvConfig(episode_steps=EPISODE_STEPS, num_envs=2),
        )
        .settings(sac=sac)
        .env_runners(sample_timeout_s=PATIENCE_S)
        # all are lost now and then, and a busy machine takes minutes
        .fault_tolerance(env_runner_restore_timeout_s=1_500.0)
        .settings(reward=StepRewardConfig(source="environment"))
        .debugging(seed=0)
    )
    algorithm: Any = config.build_algo()
    has_hung = False
    with Killer(2026, lambda: pids_below(psutil.Process(), "StepEnvRunner"), KILL_EVERY_S, at_most=KILLS) as killer:
        while algorithm.env_steps < STEPS:
            algorithm.train()
            if not has_hung and algorithm.env_steps > STEPS / 3:
                asked = algorithm.env_runner_group.foreach_env_runner(
                    lambda runner: setattr(runner, "act", lambda **_: time.sleep(3600)),
                    remote_worker_ids=[1], local_env_runner=False,
                )  # fmt: skip
                has_hung = bool(asked)
    replay, restarts = algorithm.learner.replay, algorithm.runners._restarts
    found = algorithm.report()
    rows = replay.transitions(slice(0, len(replay)))
    algorithm.stop()
    sys.stderr.write(f"{algorithm.env_steps} steps, {restarts} runners came back, {len(killer.killed)} were killed\n")
    assert len(replay) == algorithm.env_steps >= STEPS, "every step that counts is there"
    episodes = defaultdict(list)
    for obs, next_obs in zip(rows.obs, rows.next_obs, strict=True):
        episodes[float(obs[0])].append((obs, next_obs))
    for steps in episodes.values():
        for number, (obs, next_obs) in enumerate(steps):
            assert round(obs[1] * 32) == number and round(next_obs[1] * 32) == number + 1 and next_obs[0] == obs[0]
            assert not number or np.array_equal(steps[number - 1][1], obs), "a step begins where the last one ended"
    whole = sum(len(steps) == EPISODE_STEPS for steps in episodes.values())
    assert whole == found[metrics.EPISODES] and max(map(len, episodes.values())) == EPISODE_STEPS
    assert has_hung and restarts > KILLS / 2, "there was something to outlive"
