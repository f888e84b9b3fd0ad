"""Extrapolates to 8 GPUs and 64 env runners: `python benchmarks/scaling_simulation.py --costs c.json --out s.json`.

`predict` turns the cost of each item into steps per second and names the bottleneck. `simulate` checks it: real Ray
actors on this machine pass real messages of the real sizes in the order in which rlvlm passes them, and sleep for what
they would compute. Sleeps are stretched until this machine's few cores do not count; Ray's own costs are not, and the
prediction that a simulation is compared with knows the stretch. `--costs` is written by `benchmarks/scaling.py`.
"""

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import numpy as np
import ray
import tyro

from rlvlm.runs.start.ray_session import ray_session

PLACES = 64
"""CPUs that the local Ray believes in."""
TURN_STEPS = 10
"""Steps of each env per turn, SACConfig's default."""
EPISODE_TURNS = 25
"""Turns per episode. The first is acted while nothing is learned, the last learned from while nothing is acted."""
SESSION_TURNS = 5
"""Turns between two sessions of questions in the simulation; their number follows from `pairs_per_step`."""
RUNNERS_PER_PROCESS = 16
"""Simulated runners sleep, so that several may share a process; each still has messages of its own."""
TURN_S = 0.2
"""Shortest simulated turn."""
GPU_UPDATE_S = 0.002
"""An update of SAC's 2x256 networks on a GPU: 1-3 ms of small kernels. Assumed; there was no GPU."""
PAIR_8B_S = 0.1
"""A pair asked in two stages of an 8B model in bf16 on one H100. Assumed; there was no GPU. Writing 150 tokens for 16
pairs at a time takes 1.2 s (17.5 GB of weights per token, two thirds of 3.35 TB/s), which is 74 ms a pair; reading 350
tokens twice takes 2 x 14 ms (5.6 TFLOP, 40 % of 989 TFLOPS)."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds per item, and what a step asks for."""

    step_s: float
    """One env step of one env, with its share of acting."""
    update_s: float
    """What the learner does per env step: label, store, update."""
    pair_s: float
    """One pair on one judge."""
    pairs_per_step: float = 100 / 2000
    """Feedback's default: 100 queries every 2,000 env steps."""
    message_s: float
    """The learner's time per runner and turn: ask, receive, join."""
    broadcast_s: float
    """The learner's time per turn: put the weights where runners fetch them."""

    def stretched(self, factor: float) -> "Costs":
        """Everything slower but Ray."""
        return replace(self, step_s=factor * self.step_s, update_s=factor * self.update_s, pair_s=factor * self.pair_s)


@dataclass(frozen=True, kw_only=True)
class Size:
    runners: int
    judges: int
    """Replicas, one GPU each."""

    @property
    def turn_steps(self) -> int:
        return TURN_STEPS * max(self.runners, 1)


SIZES = [Size(runners=runners, judges=judges) for runners, judges in ((0, 1), (2, 1), (8, 1), (16, 2), (64, 8))]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    steps_per_s: float
    bottleneck: str
    busy: dict[str, float]
    """Share of the time in which each part works."""


def predict(costs: Costs, size: Size) -> Prediction:
    """Throughput of a run with `--feedback.ahead`, from the time that a turn of every part takes.

    Runners act a turn while the learner learns the one before, but for the two ends of an episode; judges answer a
    session while the next is gathered. So the slowest sets the pace, and what Ray takes of the learner's time comes on
    top. Without runners, acting is the learner's work too.
    """
    steps = size.turn_steps
    acting, learning = TURN_STEPS * costs.step_s, steps * costs.update_s
    messages = (size.runners * costs.message_s + costs.broadcast_s) if size.runners else 0.0
    ends = min(acting, learning) / (EPISODE_TURNS if size.runners else 1)
    pace = max(acting, learning) + ends + messages
    judging = steps * costs.pairs_per_step * costs.pair_s / size.judges
    parts = {"acting" if not size.runners else "env runners": acting, "learner": learning, "messages": messages}
    turn_s, slowest = max(pace, judging), max(parts, key=lambda part: parts[part])
    return Prediction(
        steps_per_s=steps / turn_s,
        bottleneck="judges" if judging > pace else slowest,
        busy={part: seconds / turn_s for part, seconds in (parts | {"judges": judging}).items()},
    )


# --- the simulation ---------------------------------------------------------------------------------------------------


@ray.remote(max_concurrency=RUNNERS_PER_PROCESS)
class RunnerHost:
    """Some env runners that sleep for their steps."""

    def __init__(self, sample_bytes: int) -> None:
        self._sample = np.zeros(sample_bytes, np.uint8)

    async def act(self, weights: np.ndarray, seconds: float) -> np.ndarray:
        await asyncio.sleep(seconds)
        return self._sample


@ray.remote(max_concurrency=100)
class JudgeHost:
    """Judges that sleep for their answers, each for one request after the other."""

    def __init__(self, judges: int) -> None:
        self._free = [asyncio.Lock() for _ in range(judges)]

    async def ask(self, judge: int, images: np.ndarray, seconds: float) -> bool:
        async with self._free[judge]:
            await asyncio.sleep(seconds)
        return True


class Cluster:
    """Actors for the largest size; smaller ones use some of them."""

    def __init__(self, sample_bytes: int, weights_bytes: int, pair_bytes: int) -> None:
        most = max(size.runners for size in SIZES)
        self._hosts = [RunnerHost.remote(sample_bytes) for _ in range(math.ceil(most / RUNNERS_PER_PROCESS))]
        self._judges = JudgeHost.remote(max(size.judges for size in SIZES))
        self._weights = np.zeros(weights_bytes, np.uint8)
        self._pair_bytes = pair_bytes
        ray.get([host.act.remote(self._weights, 0.0) for host in self._hosts])
        ray.get(self._judges.ask.remote(0, self._weights, 0.0))

    def start_turn(self, costs: Costs, size: Size) -> list[Any]:
        """One message to every runner."""
        if not size.runners:
            time.sleep(TURN_STEPS * costs.step_s)
            return []
        weights = ray.put(self._weights)
        return [
            self._hosts[index % len(self._hosts)].act.remote(weights, TURN_STEPS * costs.step_s)
            for index in range(size.runners)
        ]

    def start_session(self, costs: Costs, size: Size) -> list[Any]:
        """One message to every judge, with its share of the session's pairs."""
        pairs = SESSION_TURNS * size.turn_steps * costs.pairs_per_step / size.judges
        images = ray.put(np.zeros(int(pairs * self._pair_bytes), np.uint8))
        return [self._judges.ask.remote(judge, images, pairs * costs.pair_s) for judge in range(size.judges)]


def episodes(cluster: Cluster, costs: Costs, size: Size) -> Iterator[None]:
    """The algorithm's loop, without end; yields after each episode."""
    asked: list[Any] = []
    while True:
        acting = cluster.start_turn(costs, size)
        for turn in range(1, EPISODE_TURNS + 1):
            ray.get(acting)
            acting = cluster.start_turn(costs, size) if turn < EPISODE_TURNS else []
            time.sleep(size.turn_steps * costs.update_s)
            if turn % SESSION_TURNS == 0:
                ray.get(asked)
                asked = cluster.start_session(costs, size)
        yield


def simulate(cluster: Cluster, costs: Costs, size: Size, count: int) -> float:
    """Env steps per second over `count` episodes, after one that fills the pipeline."""
    running = episodes(cluster, costs, size)
    next(running)
    start = time.perf_counter()
    for _ in range(count):
        next(running)
    return count * EPISODE_TURNS * size.turn_steps / (time.perf_counter() - start)


def check(cluster: Cluster, costs: Costs, size: Size, count: int) -> dict[str, Any]:
    """The prediction at this size, and how far the simulation is from it."""
    real = predict(costs, size)
    stretch = max(1.0, TURN_S * real.steps_per_s / size.turn_steps)  # so that a turn takes TURN_S
    slow = costs.stretched(stretch)
    expected, seen = predict(slow, size).steps_per_s, simulate(cluster, slow, size, count)
    print(f"{size}: {seen:.1f} of {expected:.1f} steps/s, {stretch:.1f} times slower", file=sys.stderr)
    return asdict(size) | {
        "steps_per_s": round(real.steps_per_s, 1),
        "bottleneck": real.bottleneck,
        "busy": {part: round(share, 2) for part, share in real.busy.items()},
        "stretch": round(stretch, 1),
        "predicted_stretched": round(expected, 2),
        "simulated_stretched": round(seen, 2),
        "simulated_over_predicted": round(seen / expected, 3),
    }


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Config:
    costs: Path
    """Written by benchmarks/scaling.py."""
    episodes: int = 2
    """Episodes simulated at each size."""
    out: Path | None = None
    figure: Path | None = None


def workloads(measured: dict[str, Any]) -> dict[str, Costs]:
    """The main job as it was measured here, and a slow env with a GPU's learner and an 8B judge as assumed above."""
    ray_costs = measured["messages"]
    message_ms = max(ray_costs["call_of_two_ms"] - ray_costs["call_ms"], 0.0) + max(ray_costs["sample_ms"], 0.0)
    ray_s = {"message_s": message_ms / 1000, "broadcast_s": ray_costs["weights_put_ms"] / 1000}

    def step_s(env: str, kind: str) -> float:
        return 1 / measured["env_steps_per_s"][env][kind]["0"]

    main_step_s = step_s("drawer_open", "0 updates per step")
    return {
        "drawer_open, learner and pocket judge on CPUs (measured)": Costs(
            step_s=main_step_s,
            update_s=step_s("drawer_open", "1 updates per step") - main_step_s,
            pair_s=1 / measured["judge_pairs_per_s"]["1"],
            **ray_s,
        ),
        "fold_cloth (measured), learner on a GPU, 8B judges (assumed)": Costs(
            step_s=step_s("fold_cloth", "0 updates per step"), update_s=GPU_UPDATE_S, pair_s=PAIR_8B_S, **ray_s
        ),
    }


def draw(checks: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Predicted bars and simulated points by size, one panel per workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(checks), figsize=(11, 4), layout="constrained")
    for panel, (name, rows) in zip(axes, checks.items(), strict=True):
        places = range(len(rows))
        speeds = [row["steps_per_s"] for row in rows]
        bars = panel.bar(places, speeds, width=0.6, color="tab:blue", alpha=0.6, label="formula")
        panel.bar_label(bars, [row["bottleneck"] for row in rows], padding=6, fontsize=8)
        simulated = [row["steps_per_s"] * row["simulated_over_predicted"] for row in rows]
        panel.plot(places, simulated, "o", color="black", label="simulated")
        names = [f"{row['runners']} runners\n{row['judges']} judge{'s' * (row['judges'] > 1)}" for row in rows]
        panel.set_xticks(places, names)
        panel.set(ylabel="env steps per second", title=name.replace(", ", ",\n", 1), ylim=(0, 1.25 * max(speeds)))
        panel.title.set_fontsize(9)
        panel.tick_params(axis="x", labelsize=8)
        panel.legend(fontsize=8, loc="upper left")
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    measured = json.loads(config.costs.read_text())
    costs = workloads(measured)
    sizes = measured["messages"] | measured["requests"]
    with ray_session(num_workers=PLACES):
        cluster = Cluster(sizes["sample_bytes"], sizes["weights_bytes"], sizes["pair_bytes"])
        checks = {name: [check(cluster, each, size, config.episodes) for size in SIZES] for name, each in costs.items()}
    result = {
        "costs": {name: asdict(each) for name, each in costs.items()},
        "sizes": checks,
        "load_at_end": [round(value, 1) for value in os.getloadavg()],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if config.out:
        config.out.write_text(text + "\n")
    if config.figure:
        draw(checks, config.figure)
    for name, rows in checks.items():
        print(f"\n{name}\n| env runners | GPUs for judges | env steps/s | bottleneck | simulated / predicted |")
        print("|---|---|---|---|---|")
        for row in rows:
            print(
                f"| {row['runners']} | {row['judges']} | {row['steps_per_s']:g} | {row['bottleneck']} | "
                f"{row['simulated_over_predicted']:.2f} |"
            )


if __name__ == "__main__":
    main()
