"""Rollouts, synchronous and asynchronous, with policies and envs that sleep.

In turns an engine sleeps for as long as published replies take: 32 envs and 16 turns come to 310 s row by row, where
the logarithm of a reply's time spreads by 0.5 (docs/scaling.md). A learner sleeps meanwhile, and is one update behind.
By themselves envs wait for what is unfinished when a rollout ends, or carry it over into the next one. In chunks 64
envs take as long to be stepped as the policy takes to sample for them, or twice as long.

    python benchmarks/asynchronous_rollouts.py --update-s 60
"""

import argparse
import statistics
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig, check_versions
from rlvlm.algorithms.policy_gradient.chunks import ChunkRunner
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig, chunk_defaults
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller
from rlvlm.algorithms.policy_gradient.source import EpisodeSource
from rlvlm.algorithms.policy_gradient.turns import Actor, TurnRunner
from rlvlm.algorithms.training_stats import TrainingStats
from rlvlm.core.episodes import SampledReply
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.env import ChunkEnv
from rlvlm.envs.push_block import PushBlocks
from rlvlm.envs.registry import task_env
from rlvlm.policies.protocol import SeenImages
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vla.policy import SampledChunks
from rlvlm.rewards.config import TurnRewardConfig

ROLLOUT_S, UPDATE_S, ENVS, TURNS = 310.0, 161.0, 32, 16
SCALE = 1 / 50
CHUNK_S, CHUNK_ENVS = 0.5, 64
"""Seconds in which the policy samples a chunk for each env."""


class SleepingEngine:
    """Answers every turn with `+` after a time of its own; as many at once as are asked, as vLLM does."""

    def __init__(self, spread: float) -> None:
        self.version = 0
        self._rng, self._spread = np.random.default_rng(0), spread
        rows = np.exp(spread * np.random.default_rng(1).normal(size=(10_000, ENVS)))
        self._median_s = ROLLOUT_S * SCALE / TURNS / float(rows.max(1).mean())
        self._pool = ThreadPoolExecutor(ENVS)

    def missing(self, images: Any) -> list[int]:
        return []

    def begin(self, obs: Any, seeds: Any, sampling: Any = None) -> list[Future[SampledReply]]:
        seconds = self._median_s * np.exp(self._spread * self._rng.normal(size=len(seeds)))
        asked = zip(obs.images, seconds.tolist(), strict=True)
        return [self._pool.submit(self._answer, *each, self.version) for each in asked]

    def end(self, asked: list[Future[SampledReply]]) -> list[SampledReply]:
        return [future.result() for future in asked]

    def reply(self, obs: Any, seeds: Any, sampling: Any = None) -> list[SampledReply]:
        return self.end(self.begin(obs, seeds))

    def _answer(self, image: bytes, seconds: float, version: int) -> SampledReply:
        time.sleep(seconds)
        ids = np.zeros(1, np.int64)
        log_probs, text = np.zeros(1, np.float32), '{"action": "+"}'
        return SampledReply(answer={"ids": ids}, log_probs=log_probs, text=text, image=image, version=version)


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
    config = PolicyGradientAlgorithmConfig().debugging(seed=0)
    config.settings(task="push_block", env_settings=ChunkEnvConfig(episode_steps=64), algo=algo)
    runner: Any = ChunkRunner(config=config)
    runner.policy = SleepingVLA(runner.chunk_env)
    runner._envs_of = lambda *_: SleepingTables(64, False)
    began = time.perf_counter()
    episodes, _ = runner.sample(num_groups=algo.groups)
    return sum(len(episode) for episode in episodes) / (time.perf_counter() - began)


def replies_a_second(way: str, args: argparse.Namespace) -> float:
    """Replies a second of a run's schedule, whose learner sleeps for what an update takes; the first rollouts, which
    wait for no update, are not counted.
    """
    rollout: Any = "synchronous" if way == "row by row" else "asynchronous"
    algo = PolicyGradientConfig(rollout=rollout, num_envs=ENVS, rollout_turns=ENVS * TURNS, staleness=1)
    config = PolicyGradientAlgorithmConfig().settings(task="number_line", env_settings=task_env("number_line"))
    runner = TurnRunner(config=config.settings(algo=algo).debugging(seed=0))
    engine: Any = SleepingEngine(args.spread)
    runner.actor = Actor(engine, ReplySampling(max_new_tokens=48))
    newest = 0

    def use_newest() -> None:
        engine.version = newest

    def play(version: int) -> Any:
        engine.version = version
        return runner.sample_groups(group_size=args.group_size) if args.group_size else runner.sample(
            num_turns=TURNS
        ), []

    if way == "carried over":  # without newer weights an asynchronous rollout waits for all that it has begun
        runner.use_newest = use_newest
    labeller = RewardLabeller(TurnRewardConfig(), None)
    source = EpisodeSource(algo, play, lambda: newest, labeller, False, TrainingStats(), plays_elsewhere=True)
    replies, began = 0, 0.0
    for update in range(2 + args.rounds):
        episodes = source.next()
        began = time.perf_counter() if update == 1 else began
        replies += sum(map(len, episodes)) if update > 1 else 0
        check_versions(episodes, newest, algo.staleness)
        if update == 1 + args.rounds:
            break
        time.sleep(args.update_s * SCALE)
        newest += 1
    seconds = time.perf_counter() - began
    source.forget()
    source.close()
    return replies / seconds * SCALE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--group-size", type=int, default=0, help="whole episodes in groups of so many; 0: turns")
    parser.add_argument("--update-s", type=float, default=UPDATE_S)
    args = parser.parse_args()
    ways = ("row by row", "each env by itself", "carried over")
    rates = {way: [] for way in ways}
    for _ in range(args.repeats):  # by turns, so that a busy machine slows all of them
        for way in ways:
            rates[way].append(replies_a_second(way, args))
    for way in ways:
        rate = statistics.median(rates[way])
        print(f"{way:>18}: {rate:.2f} replies a second, {ENVS * TURNS / rate:.0f} s for {ENVS * TURNS}", flush=True)
    for rollout in ("synchronous", "asynchronous"):
        for share in (1, 2):
            rate = chunks_a_second(rollout, share * CHUNK_S)
            print(f"{rollout:>12}: {rate:.0f} chunks a second where stepping takes {share} times as long as sampling")


if __name__ == "__main__":
    main()
