"""Rollouts, synchronous and asynchronous, with policies and envs that sleep.

In turns an engine sleeps for as long as published replies take: 32 envs and 16 turns come to 310 s row by row, where
the logarithm of a reply's time spreads by 0.5 (docs/scaling.md). In chunks 64 envs take as long to be stepped as the
policy takes to sample for them, or twice as long.

    python benchmarks/asynchronous_rollouts.py --rounds 3
"""

import argparse
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.chunks import ChunkRunner
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig, chunk_defaults
from rlvlm.algorithms.policy_gradient.turns import Actor, TurnRunner
from rlvlm.core.episodes import SampledReply
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.env import ChunkEnv
from rlvlm.envs.push_block import PushBlocks
from rlvlm.envs.registry import task_env
from rlvlm.policies.protocol import SeenImages
from rlvlm.policies.vla.policy import SampledChunks

ROLLOUT_S, ENVS, TURNS = 310.0, 32, 16
SCALE = 1 / 50
CHUNK_S, CHUNK_ENVS = 0.5, 64
"""Seconds in which the policy samples a chunk for each env."""


class SleepingEngine:
    """Answers every turn with `+` after a time of its own; as many at once as are asked, as vLLM does."""

    def __init__(self, spread: float) -> None:
        self._rng, self._spread = np.random.default_rng(0), spread
        rows = np.exp(spread * np.random.default_rng(1).normal(size=(10_000, ENVS)))
        self._median_s = ROLLOUT_S * SCALE / TURNS / float(rows.max(1).mean())
        self._pool = ThreadPoolExecutor(ENVS)

    def missing(self, images: Any) -> list[int]:
        return []

    def begin(self, obs: Any, seeds: Any, **settings: Any) -> list[Future[SampledReply]]:
        seconds = self._median_s * np.exp(self._spread * self._rng.normal(size=len(seeds)))
        return [self._pool.submit(self._answer, *each) for each in zip(obs.images, seconds.tolist(), strict=True)]

    def end(self, asked: list[Future[SampledReply]]) -> list[SampledReply]:
        return [future.result() for future in asked]

    def reply(self, obs: Any, seeds: Any, **settings: Any) -> list[SampledReply]:
        return self.end(self.begin(obs, seeds))

    def _answer(self, image: bytes, seconds: float) -> SampledReply:
        time.sleep(seconds)
        ids = np.zeros(1, np.int64)
        return SampledReply(answer={"ids": ids}, log_probs=np.zeros(1, np.float32), text='{"action": "+"}', image=image)


class SleepingVLA:
    """Answers every observation with a chunk that does nothing; the time goes with the number of them."""

    image_px = 16

    def __init__(self, env: ChunkEnv) -> None:
        self.env, self.images = env, SeenImages[Any](2**28)

    def draw(self, env: Any, snapshots: Any) -> Any:
        return np.zeros((len(snapshots), 1), np.uint8)

    def show(self, keys: Any, frames: Any) -> None:
        for key, frame in zip(keys, frames, strict=True):
            self.images.add(key, frame)

    def explored(self, env: Any, min_range: float) -> Any:
        return None

    def sample(self, obs: Any, sampling: Any) -> SampledChunks:
        time.sleep(CHUNK_S * len(obs) / CHUNK_ENVS)
        count, shape = len(obs), (self.env.chunk_steps, len(self.env.action_low))
        return SampledChunks(
            actions=np.zeros((count, *shape), np.float32), answers=({},) * count,
            log_probs=np.zeros((count, 1), np.float32), mask=np.ones((count, 1), bool), steps=np.zeros(1, np.int64),
            values=np.zeros(count, np.float32),
        )  # fmt: skip


class SleepingTables(PushBlocks):
    """Envs whose steps take `seconds` for all of them; workers that are busy with others are waited for."""

    workers = threading.Lock()
    seconds = 0.0

    def step(self, rows: Any, chunks: Any) -> Any:
        with self.workers:
            time.sleep(self.seconds * len(rows) / CHUNK_ENVS)
        return super().step(rows, chunks)


def chunks_a_second(rollout: Any, step_s: float) -> float:
    """Chunks a second of one rollout of 64 envs."""
    SleepingTables.seconds = step_s
    algo = chunk_defaults(rollout=rollout, env_workers=8, groups=8, group_size=8)
    config = PolicyGradientAlgorithmConfig(algo=algo)
    config.envs(task="push_block", env_settings=ChunkEnvConfig(episode_steps=64)).debugging(seed=0)
    runner: Any = ChunkRunner(config=config)
    runner.policy = SleepingVLA(runner.chunk_env)
    runner._envs_of = lambda *_: SleepingTables(64, False)
    began = time.perf_counter()
    episodes, _ = runner.sample(num_groups=algo.groups)
    return sum(len(episode) for episode in episodes) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spread", type=float, default=0.5)
    args = parser.parse_args()
    for rollout in ("synchronous", "asynchronous"):
        algo = PolicyGradientConfig(rollout=rollout, num_envs=ENVS, rollout_turns=ENVS * TURNS)
        settings = PolicyGradientAlgorithmConfig().envs(task="number_line", env_settings=task_env("number_line"))
        runner = TurnRunner(config=settings.learning(algo=algo).debugging(seed=0))
        engine: Any = SleepingEngine(args.spread)
        runner.actor = Actor(engine, 48, 1.0)
        began, replies = time.perf_counter(), 0
        for _ in range(args.rounds):
            replies += sum(len(episode) for episode in runner.sample(num_turns=TURNS))
        seconds = (time.perf_counter() - began) / SCALE / args.rounds
        print(f"{rollout:>12}: {seconds:.0f} s a rollout, {replies / args.rounds / seconds:.2f} replies a second")
        for share in (1, 2):
            rate = chunks_a_second(rollout, share * CHUNK_S)
            print(f"{rollout:>12}: {rate:.0f} chunks a second where stepping takes {share} times as long as sampling")


if __name__ == "__main__":
    main()
