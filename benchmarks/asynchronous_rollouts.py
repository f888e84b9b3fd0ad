"""Rollouts, synchronous and asynchronous, with policies and envs that sleep.

In turns an engine sleeps for as long as published replies take: 32 envs and 16 turns come to 310 s row by row, where
the logarithm of a reply's time spreads by 0.5 (docs/scaling.md). A learner sleeps meanwhile, and is one update behind.
By themselves envs wait for what is unfinished when a rollout ends, or carry it over into the next one. In chunks 64
envs take as long to be stepped as the policy takes to sample for them, or twice as long.

    python benchmarks/asynchronous_rollouts.py --update-s 60

Replicas behind Ray Serve whose model sleeps for each reply: replies a second of an asynchronous rollout as a share of
what the replicas could give, and the processor time that one takes in the run's process (beside that of the same
rollout where every reply is there at once, without Serve) and in Ray's. `--batch 1` has each reply come by itself.

    python benchmarks/asynchronous_rollouts.py --served 1 2 4 8
"""

import argparse
import os
import statistics
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import numpy as np
import psutil

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig, check_versions
from rlvlm.algorithms.policy_gradient.chunks import ChunkRunner
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig, chunk_defaults
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller
from rlvlm.algorithms.policy_gradient.source import EpisodeSource
from rlvlm.algorithms.policy_gradient.turns import Actor, TurnRunner
from rlvlm.algorithms.training_stats import TrainingStats
from rlvlm.core import metrics
from rlvlm.core.episodes import SampledReply
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.env import ChunkEnv
from rlvlm.envs.push_block import PushBlocks
from rlvlm.envs.registry import task_env
from rlvlm.policies.protocol import SeenImages
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vla.policy import SampledChunks
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.rewards.config import TurnRewardConfig
from rlvlm.runs.start.ray_session import ray_session
from rlvlm.serving.apps import running_policy
from rlvlm.serving.config import ServedEngineConfig
from rlvlm.serving.engine import ServedEngine

ROLLOUT_S, UPDATE_S, ENVS, TURNS = 310.0, 161.0, 32, 16
SCALE = 1 / 50
NUM_TOKENS = 48
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
        return a_reply(image, version)


def a_reply(image: bytes = b"", version: int = 0) -> SampledReply:
    ids, log_probs = np.zeros(NUM_TOKENS, np.int64), np.zeros(NUM_TOKENS, np.float32)
    return SampledReply(answer={"ids": ids}, log_probs=log_probs, text='{"action": "+"}', image=image, version=version)


class InstantEngine:
    """Answers every turn at once, in this process."""

    version = 0

    def __init__(self) -> None:
        self._frames = SeenImages[Any](2**28)
        self.missing = self._frames.missing

    def show(self, images: Any, frames: Any) -> None:
        for key, frame in zip(images, frames, strict=True):
            self._frames.add(key, frame)

    def begin(self, obs: Any, seeds: Any, sampling: Any = None) -> list[Future[SampledReply]]:
        asked = [Future[SampledReply]() for _ in obs.images]
        for future, image in zip(asked, obs.images, strict=True):
            future.set_result(a_reply(image))
        return asked

    def end(self, asked: list[Future[SampledReply]]) -> list[SampledReply]:
        return [future.result() for future in asked]


class SleepingPolicy:
    """The model of a replica: sleeps for each reply of a batch."""

    def __init__(self, config: PolicyConfig, num_actions: int, reply_s: float) -> None:
        self.images, self._reply_s = SeenImages[Any](2**28), reply_s

    def show(self, images: Any, frames: Any) -> None:
        for key, frame in zip(images, frames, strict=True):
            self.images.add(key, frame)

    def sample(self, obs: Any, seeds: Any, sampling: Any) -> list[SampledReply]:
        time.sleep(self._reply_s * len(seeds))
        return [a_reply() for _ in seeds]


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


def played(engine: Any, num_envs: int, turns: int) -> tuple[float, float]:
    """Seconds, and processor seconds of this process, of an asynchronous rollout with `turns` turns of every env."""
    algo = PolicyGradientConfig(rollout="asynchronous", num_envs=num_envs, rollout_turns=num_envs)
    config = PolicyGradientAlgorithmConfig().settings(task="number_line", env_settings=task_env("number_line"))
    runner = TurnRunner(config=config.settings(algo=algo).debugging(seed=0))
    runner.actor = Actor(engine, ReplySampling(max_new_tokens=NUM_TOKENS))
    runner.sample(num_turns=1)  # connects
    began, cpu = time.perf_counter(), time.process_time()
    runner.sample(num_turns=turns)
    return time.perf_counter() - began, time.process_time() - cpu


def served(replicas: int, args: argparse.Namespace) -> str:
    """Row of a table: an asynchronous rollout in front of so many sleeping replicas."""
    num_envs = args.envs * replicas
    turns = max(1, round(args.seconds / args.reply_s / args.envs))
    config = ServedEngineConfig(num_replicas=replicas, num_cpus=0.01)
    policy: Any = SimpleNamespace(config=PolicyConfig())
    make: Any = partial(SleepingPolicy, reply_s=args.reply_s)
    with running_policy(PolicyConfig(device="cpu"), 0, config.placement, "sleeping", args.batch, make) as app:
        engine = ServedEngine(app, policy, *[None] * 3, config=config)  # pyright: ignore[reportArgumentType]
        before = rays_cpu_s()
        seconds, cpu_s = played(engine, num_envs, turns)
        rays_s = rays_cpu_s() - before
        retries = engine.report()[metrics.ENGINE_RETRIES]
        engine.close()
    envs_s = played(InstantEngine(), num_envs, turns)[1]
    count, ideal = num_envs * turns, replicas / args.reply_s
    rate, each_ms = count / seconds, [1000 * spent / count for spent in (cpu_s, envs_s, rays_s)]
    spent = " | ".join(f"{ms:.2f}" for ms in each_ms)
    return f"| {replicas} | {count:,} | {rate:,.0f} | {rate / ideal:.2f} | {spent} | {retries:.0f} |"


def rays_cpu_s() -> float:
    """Processor seconds of Ray's processes, replicas among them, so far."""
    return sum(sum(process.cpu_times()[:2]) for process in psutil.Process().children(recursive=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--group-size", type=int, default=0, help="whole episodes in groups of so many; 0: turns")
    parser.add_argument("--update-s", type=float, default=UPDATE_S)
    parser.add_argument(
        "--served", type=int, nargs="+", default=[], help="numbers of sleeping replicas, in place of the rest"
    )
    parser.add_argument("--reply-s", type=float, default=0.01, help="seconds that such a replica sleeps for each reply")
    parser.add_argument("--batch", type=int, default=32, help="replies that it gives together at most")
    parser.add_argument("--envs", type=int, default=32, help="for each such replica")
    parser.add_argument("--seconds", type=float, default=10.0, help="that the replicas sleep")
    args = parser.parse_args()
    if args.served:
        head = (
            "| replicas | replies | a second | of the ideal | processor ms a reply | envs alone | Ray | tries again |"
        )
        print(f"\n{head}\n{'|---' * 8}|", flush=True)
        with ray_session(num_workers=2):
            for replicas in args.served:
                print(served(replicas, args), flush=True)
        return
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
