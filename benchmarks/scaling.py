"""Gain from env runners and judge replicas, and Ray's cost per item: `python benchmarks/scaling.py --out c.json`.

(a) acting: env steps per second with 0, 1 and 2 env runners, without updates and with one update per step.
(b) judge: pairs per second of the pocket judge with 1 and 2 replicas.
(c) messages, requests: what Ray takes per turn and runner, per broadcast of the weights, per request to a judge.

Contestants of a table take turns within each round, so that a busy machine slows all; medians over the rounds count.
`benchmarks/scaling_simulation.py` reads what this writes. Takes some minutes on two quiet cores; `--parts` chooses.
"""

import itertools
import json
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import numpy as np
import ray
import tyro
from judge_throughput import Config as JudgeBenchmark
from judge_throughput import make_pairs
from sac_peers import machine

from rlvlm.algorithms.sac_pebble.algorithm import SACPebble, SACPebbleConfig
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.core.judging import Label, Query, Status, Verdict
from rlvlm.envs.config import StepEnvConfig
from rlvlm.judges.config import JudgeConfig
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.runs.start.ray_session import ray_session
from rlvlm.serving.apps import start_judge
from rlvlm.serving.client import Request
from rlvlm.serving.config import PlacementConfig
from rlvlm.testing import FakeJudge

NEVER = 1e-9
"""Updates per step that never add up to one."""
REPEATS = 200
"""Calls behind each figure of the overhead."""


@dataclass(frozen=True, kw_only=True)
class Config:
    parts: tuple[Literal["acting", "judge", "messages", "requests"], ...] = ("acting", "judge", "messages", "requests")
    envs: tuple[str, ...] = ("drawer_open", "fold_cloth")
    """Tasks that are stepped: the main one and a slower simulator."""
    runners: tuple[int, ...] = (0, 1, 2)
    replicas: tuple[int, ...] = (1, 2)
    updates_per_step: tuple[float, ...] = (0.0, 1.0)
    episode_steps: int = 100
    """Steps of each env per round."""
    rounds: int = 5
    pairs: int = 48
    """Pairs per round and number of replicas."""
    out: Path | None = None
    """Written at the end; what it held of other parts and envs stays."""


# --- acting -----------------------------------------------------------------------------------------------------------


def build(env: str, config: Config, runners: int, updates_per_step: float) -> SACPebble:
    """SAC on the env's own reward, past its random steps."""
    sac = SACConfig(seed_steps=1, updates_per_step=updates_per_step or NEVER, env_runners=runners)
    trained = SACPebbleConfig().settings(task=env, env_settings=StepEnvConfig(episode_steps=config.episode_steps))
    algorithm = trained.settings(sac=sac, reward=StepRewardConfig(source="environment")).build_algo()
    algorithm.train()
    return algorithm


def measure_acting(env: str, config: Config, updates_per_step: float) -> dict[str, float]:
    """Env steps per second by number of runners."""
    runner_groups = {runners: build(env, config, runners, updates_per_step) for runners in config.runners}
    speeds: dict[int, list[float]] = {runners: [] for runners in config.runners}
    for _ in range(config.rounds):
        for runners, algorithm in runner_groups.items():
            before, start = algorithm.env_steps, time.perf_counter()
            algorithm.train()
            speeds[runners].append((algorithm.env_steps - before) / (time.perf_counter() - start))
    for algorithm in runner_groups.values():
        algorithm.stop()
    return {str(runners): round(statistics.median(values), 2) for runners, values in speeds.items()}


# --- judge ------------------------------------------------------------------------------------------------------------


def measure_judge(config: Config) -> dict[str, float]:
    """Pairs per second of the pocket judge by number of replicas, asked for all of them at once."""
    queries, _ = make_pairs(JudgeBenchmark(pairs=config.pairs))
    speeds: dict[int, list[float]] = {replicas: [] for replicas in config.replicas}
    with ExitStack() as stack:
        judges = {}
        for replicas in config.replicas:
            placement = PlacementConfig(num_replicas=replicas, timeout_s=600)
            judge = replace(JudgeConfig(), batch_size=config.pairs // 6)
            judges[replicas] = stack.enter_context(start_judge(judge, placement, f"replicas-{replicas}"))
            judges[replicas].compare(queries)  # warm, every replica of it
        for _ in range(config.rounds):
            for replicas, judge in judges.items():
                start = time.perf_counter()
                judge.compare(queries)
                speeds[replicas].append(len(queries) / (time.perf_counter() - start))
    return {str(replicas): round(statistics.median(values), 2) for replicas, values in speeds.items()}


# --- overhead ---------------------------------------------------------------------------------------------------------


class InstantJudge(FakeJudge):
    """Answers without looking: what is left of the time is the way there and back."""

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        return [Verdict(status=Status.OK, label=Label.LEFT, stamp=self.stamp)] * len(queries)


def build_instant(config: JudgeConfig) -> InstantJudge:
    return InstantJudge()


def median_ms(do: Callable[[], Any]) -> float:
    do()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        do()
        times.append(time.perf_counter() - start)
    return round(1000 * statistics.median(times), 3)


def keep(runner: Any, sample: Any) -> None:
    runner.kept = sample


def measure_messages(env: str, config: Config) -> dict[str, float]:
    """What a turn of ten steps costs beside the steps: calls, the sample's way here, the weights' way there."""
    algorithm = build(env, config, 2, 0.0)
    group, learner, runner_group = algorithm.env_runner_group, algorithm.learner, algorithm.runners

    def ask(do: Callable[..., Any], ids: Sequence[int] = (1,), **arguments: Any) -> list[Any]:
        return group.foreach_env_runner(
            do, kwargs=arguments or None, remote_worker_ids=list(ids), local_env_runner=False
        )

    runner_group.start({"num_steps": algorithm.config.sac.turn_steps, "random_actions": False})
    sample = runner_group.collect()
    half = replace(sample, transitions=sample.transitions.part(np.arange(len(sample.transitions.obs)) % 2 == 0))
    ask(keep, (1, 2), sample=half)
    call_ms = median_ms(lambda: ask(lambda runner: None))
    result = {
        "sample_bytes": len(pickle.dumps(half, 5)),
        "weights_bytes": learner.policy_values.numpy().nbytes,
        "call_ms": call_ms,
        "call_of_two_ms": median_ms(lambda: ask(lambda runner: None, (1, 2))),
        "sample_ms": round(median_ms(lambda: ask(lambda runner: runner.kept)) - call_ms, 3),
        "weights_put_ms": median_ms(lambda: ray.put(learner.policy_values.numpy())),
        "weights_sent_ms": round(
            median_ms(lambda: ask(lambda runner, values: None, values=ray.put(learner.policy_values.numpy())))
            - call_ms,
            3,
        ),
    }
    algorithm.stop()
    return result


def measure_requests() -> dict[str, float]:
    """What a request to a served judge costs that answers at once, with images of 300 pixels."""
    rng = np.random.default_rng(0)
    queries = [
        Query(
            goal="open the drawer",
            left=rng.integers(0, 255, (1, 300, 300, 3), np.uint8),
            right=rng.integers(0, 255, (1, 300, 300, 3), np.uint8),
        )
        for _ in range(16)
    ]
    with start_judge(JudgeConfig(), PlacementConfig(), "instant", build=build_instant) as running:
        one_ms = median_ms(lambda: running.compare(queries[:1]))
        batch_ms = median_ms(lambda: running.compare(queries))
    size = len(pickle.dumps(Request(key="", run="", kind="compare", items=queries), 5))
    return {
        "pair_bytes": size // len(queries),
        "request_of_1_ms": one_ms,
        "request_of_16_ms": batch_ms,
        "per_pair_of_16_ms": round(batch_ms / len(queries), 3),
    }


# --- the run ----------------------------------------------------------------------------------------------------------


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    result: dict[str, Any] = json.loads(config.out.read_text()) if config.out and config.out.exists() else {}
    result["machine"] = machine()
    with ray_session(num_workers=16):  # places for everybody: the processes share the cores there are
        if "acting" in config.parts:
            speeds = result.setdefault("env_steps_per_s", {})
            for env, updates in itertools.product(config.envs, config.updates_per_step):
                speeds.setdefault(env, {})[f"{updates:g} updates per step"] = measure_acting(env, config, updates)
        if "judge" in config.parts:
            result["judge_pairs_per_s"] = measure_judge(config)
        if "messages" in config.parts:
            result["messages"] = measure_messages(config.envs[0], config)
        if "requests" in config.parts:
            result["requests"] = measure_requests()
    result["load_at_end"] = [round(value, 1) for value in os.getloadavg()]
    text = json.dumps(result, indent=1)
    print(text)
    if config.out:
        config.out.write_text(text + "\n")
    print(table(result), file=sys.stderr)


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = []
    for env, kinds in result.get("env_steps_per_s", {}).items():
        lines += [
            f"| {env}, {kind}, {runners} env runners | {speed:g} steps/s |"
            for kind, speeds in kinds.items()
            for runners, speed in speeds.items()
        ]
    for replicas, speed in result.get("judge_pairs_per_s", {}).items():
        lines.append(f"| pocket judge, {replicas} replicas | {speed:g} pairs/s |")
    for part in ("messages", "requests"):
        lines += [f"| {part}: {name} | {value:g} |" for name, value in result.get(part, {}).items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
