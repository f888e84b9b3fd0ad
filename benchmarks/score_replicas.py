"""Questions a second of `rlvlm score` with 1 to 64 replicas of a served judge, beside what the replicas could answer:

    python benchmarks/score_replicas.py --replicas 1 2 4 8 16 64 --batches 40
    python benchmarks/score_replicas.py --turns alone --no-served --batch-s 0.05 --replicas 1 2 4 8

The judge sleeps half a second for each batch of sixteen questions, as one on other machines would leave this one idle:
what is measured is reading, asking and keeping. `--clips growing` shows clips of up to eight images, `--noise` images
that do not compress. `--turns` asks as rollouts with a judge per turn do: about `rows` of 32, or each `alone`, as an
asynchronous one does. Every setting keeps its answers in a new label store. A table of Markdown comes out at the end.

    python benchmarks/score_replicas.py --lost-node 100000 --size-px 8 --batch-s 0.05 --replicas 4

scores so many images on two nodes in name, one of which is killed when a third is answered, and says how many questions
the judges were asked, how often one again, and how many when the same is scored once more.
"""

import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import numpy as np
import psutil
import ray
import tyro
from ray.cluster_utils import Cluster

from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller
from rlvlm.core.episodes import SampledReply
from rlvlm.core.errors import UnsupportedQuestion
from rlvlm.core.judging import Clip, Query, Score, Stamp, Status, Verdict
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.envs.registry import make_env, task_env
from rlvlm.envs.slots import EnvSlot
from rlvlm.judge_bench.scoring import Asked, ScoredEpisode, score_episodes
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.config import JudgeConfig
from rlvlm.labels.store import LabelStore
from rlvlm.reports.score_readers import score_on_nodes
from rlvlm.rewards.config import MonitorConfig, TurnRewardConfig
from rlvlm.rewards.scorers import JudgeScorer
from rlvlm.runs.start.ray_session import ray_session
from rlvlm.serving.apps import start_judge
from rlvlm.serving.client import IN_FLIGHT, digest
from rlvlm.serving.config import PlacementConfig

ROW = 32


@dataclass(frozen=True, kw_only=True)
class Config:
    replicas: tuple[int, ...] = (1, 2, 4, 8, 16)
    batches: float = 40.0
    """Batches of questions for each replica."""
    batch: int = 16
    """Questions of a batch."""
    batch_s: float = 0.5
    """Seconds that the judge sleeps for a batch."""
    slow: float = 1.0
    """How many times as long one of the replicas takes."""
    turns: Literal["no", "rows", "alone"] = "no"
    frames: int = 64
    """Frames of an episode, all of which are asked about."""
    size_px: int = 96
    clips: Literal["last", "growing"] = "last"
    store: bool = True
    """Whether answers and images are kept, as `rlvlm score` does; else the judge is asked alone."""
    noise: bool = False
    readers: int = 0
    """Tasks of Ray that each read a part, as with `rlvlm score --readers`; 0: this process."""
    served: bool = True
    """Whether the replicas are processes on Ray Serve; else sleeping threads of this one, which leaves out Serve's own
    cost."""
    lost_node: int = 0
    """Images that are scored on two nodes, one of which is killed meanwhile, in place of all else; 0: none."""


class Threads:
    """So many replicas of the judge in this process, asked as `ServedJudge` asks."""

    def __init__(self, replicas: int, batch: int, batch_s: float, slow: float) -> None:
        self.at_once, self._batch = max(IN_FLIGHT, 2 * replicas) * batch, batch
        self._free = SimpleQueue[SleepingJudge]()
        for number in range(replicas):
            self._free.put(SleepingJudge(batch, batch_s * (1 if number else slow)))
        self._pool = ThreadPoolExecutor(max(IN_FLIGHT, 2 * replicas))
        self.stamp = SleepingJudge.stamp

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        raise UnsupportedQuestion("it only scores", "")

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        pieces = [clips[begin : begin + self._batch] for begin in range(0, len(clips), self._batch)]
        return [answer for part in self._pool.map(self._ask, pieces) for answer in part]

    def _ask(self, piece: Sequence[Clip]) -> list[Score]:
        judge = self._free.get()
        try:
            return judge.score(piece)
        finally:
            self._free.put(judge)


class SleepingJudge:
    """Scores by the brightness of one pixel, after `batch_s` seconds for each batch."""

    def __init__(self, batch: int, batch_s: float) -> None:
        self._batch, self._batch_s = batch, batch_s

    stamp = Stamp(judge="sleeping", revision="", prompt="none", decoding="")

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        raise UnsupportedQuestion("it only scores", "")

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        time.sleep(self._batch_s * -(-len(clips) // self._batch))
        return [
            Score(status=Status.OK, value=float(clip.frames[-1, 0, 0, 0]) / 255, stamp=self.stamp) for clip in clips
        ]


def build(config: JudgeConfig, batch_s: float, slow: float, folder: Path) -> SleepingJudge:
    with suppress(FileExistsError):
        (folder / "slow").touch(exist_ok=False)
        return SleepingJudge(config.batch_size, batch_s * slow)
    return SleepingJudge(config.batch_size, batch_s)


class NotingJudge(SleepingJudge):
    """Writes down what it is asked, before it answers, in a file of its process."""

    def __init__(self, batch: int, batch_s: float, folder: Path) -> None:
        super().__init__(batch, batch_s)
        self._file = folder / str(os.getpid())

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        with self._file.open("ab") as file:
            file.write(b"".join(digest(clip) for clip in clips))
        return super().score(clips)


def asked_in(folder: Path) -> Counter[bytes]:
    """How often the judges of a folder were asked each question, but for the grey one that shows that they live."""
    content = b"".join(file.read_bytes() for file in folder.iterdir())
    counts = Counter(content[begin : begin + 32] for begin in range(0, len(content), 32))
    grey = np.full((2, 32, 32, 3), 128, np.uint8)
    del counts[digest(Clip(goal="open the drawer", frames=grey, action="pull"))]
    return counts


def lose_a_node(config: Config) -> None:
    questions = config.lost_node // config.frames * config.frames
    asked = Asked(questions=frozenset(["progress"]), every=1, grows=False, size_px=config.size_px)
    placement = PlacementConfig(num_replicas=config.replicas[0], num_cpus=1, timeout_s=60)
    node: Any = {"num_cpus": -(-config.replicas[0] // 2), "object_store_memory": 200 << 20}
    with ExitStack() as stack:
        store, notes = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
        stack.callback(cluster.shutdown)
        other = cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        stack.callback(ray.shutdown)
        make: Any = partial(NotingJudge, config.batch, config.batch_s, notes)
        judge = stack.enter_context(
            start_judge(JudgeConfig(batch_size=config.batch), placement, "lost", lambda _: make())
        )
        for way in ("a node killed", "once more"):
            began, answered, before, is_lost = time.perf_counter(), 0, asked_in(notes), way == "once more"
            for episode in score_episodes(CachedJudge(judge, LabelStore(store)), Films(config, questions), asked):
                answered += sum(answer.status == "ok" for _, _, answer in episode.rows)
                if not is_lost and answered > questions / 3:
                    cluster.remove_node(other, allow_graceful=False)
                    is_lost = True
            seconds, counts = time.perf_counter() - began, asked_in(notes) - before
            times, distinct = counts.total(), len(counts)
            print(
                f"{way}: {answered:,} of {questions:,} answered in {seconds:.0f} s; judges were asked "
                f"{times:,} times about {distinct:,} of them, so {times - distinct:,} times again",
                flush=True,
            )


@dataclass(frozen=True)
class Films:
    """Episodes in memory, so that nothing is decoded; no two images are equal."""

    config: Config
    questions: int

    def __iter__(self) -> Iterator[RobotTrajectory]:
        config, ground = self.config, np.linspace(0, 255, self.config.size_px)
        scene = (np.add.outer(ground, ground)[..., None] / np.array([2, 3, 4])).astype(np.uint8)
        for number in range(self.questions // config.frames):

            def look(steps: Any, number: int = number) -> Any:
                rng = np.random.default_rng([number, *steps])
                shown = np.repeat(scene[None, None], len(steps), 0)
                shown[:, 0, :, :4] = rng.integers(0, 256, (len(steps), config.size_px, 4, 3), np.uint8)
                return rng.integers(0, 256, shown.shape, np.uint8) if config.noise else shown

            zeros = np.zeros((config.frames, 1), np.float32)
            yield RobotTrajectory(
                name=str(number),
                file=Path("memory"),
                instruction="open the drawer",
                actions=zeros,
                proprio=zeros,
                look=look,
            )


def played(judge: Any, config: Config, questions: int) -> int:
    """Has a rollout's turns scored, all of them different, and returns the number of scores."""
    slot = EnvSlot(make_env("number_line", task_env("number_line"), 0), "number_line")
    slot.begin(0)
    slot.begin_piece(0)
    text = slot.env.action_text(slot.env.expert_action())
    slot.play(SampledReply(answer={"ids": np.zeros(1, np.int64)}, log_probs=np.zeros(1, np.float32), text=text))
    turn = slot.episode(only_newest=True)
    turns = [replace(turn, group=number, snapshots=turn.snapshots + number) for number in range(questions)]
    rng = np.random.default_rng(questions)

    def draw(snapshots: Any) -> Any:
        shown = np.zeros((len(snapshots), config.size_px, config.size_px, 3), np.uint8)
        shown[:, 0] = rng.integers(0, 256, shown[:, 0].shape)
        return shown

    rewards = TurnRewardConfig(source="judged", monitor=MonitorConfig(controls=0))
    labeller = RewardLabeller(rewards, JudgeScorer(judge, draw, remembers=False))
    alone = config.turns == "alone"
    for begin in range(0, questions, 1 if alone else ROW):
        labeller.show(turns[begin : begin + (1 if alone else ROW)], gathers=alone)
    labeller.label(turns, 0)
    return sum(record.score.status == "ok" for record in labeller.judged.drain_records())


def cpu_s() -> float:
    """Processor seconds of this process and all that it started, so far."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(config: Config, replicas: int) -> str:
    questions = max(1, round(config.batches * config.batch * replicas / config.frames)) * config.frames
    asked = Asked(questions=frozenset(["progress"]), every=1, grows=config.clips == "growing", size_px=config.size_px)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served: Any = Threads(replicas, config.batch, config.batch_s, config.slow)
        if config.served:
            placement = PlacementConfig(num_replicas=replicas, num_cpus=0.01, timeout_s=600)
            judge_config, app = JudgeConfig(batch_size=config.batch), f"by-{replicas}"
            make = partial(build, batch_s=config.batch_s, slow=config.slow, folder=folder)
            stack.enter_context(start_judge(judge_config, placement, app, make, app=app))
            # as `rlvlm score --app` finds it
            served = stack.enter_context(start_judge(judge_config, PlacementConfig(app=app, timeout_s=600), app))
        judge: Any = CachedJudge(served, LabelStore(folder / "store")) if config.store else served

        def scored(number: int) -> Iterator[ScoredEpisode]:
            films = Films(config, number * config.frames)
            if config.readers:
                return score_on_nodes(judge, films, asked, folder, number, config.readers, print)
            return score_episodes(judge, films, asked)

        warm = max(1, config.readers)
        if config.turns == "no":
            list(scored(warm))  # connects, and starts the readers' processes
        else:
            played(judge, config, ROW)
        began, cpu, answered = time.perf_counter(), cpu_s(), 0
        if config.turns == "no":
            for episode in scored(warm + questions // config.frames):
                # the first were asked before
                answered += sum(answer.status == "ok" for _, _, answer in episode.rows) * (episode.number >= warm)
        else:
            answered = played(judge, config, questions)
        wall, cpu = time.perf_counter() - began, cpu_s() - cpu
    assert answered == questions, f"{answered} answers to {questions} questions"
    rate, ideal = questions / wall, (replicas - 1 + 1 / config.slow) * config.batch / config.batch_s
    memory = psutil.Process().memory_info().rss / 2**20
    return (
        f"| {replicas} | {questions:,} | {rate:,.0f} | {rate / ideal:.2f} | {1000 * cpu / questions:.2f} "
        f"| {max(0.0, 1 - rate / ideal):.0%} | {memory:,.0f} |"
    )


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    if config.lost_node:
        lose_a_node(config)
        return
    rows = []
    with ray_session(num_workers=2 + config.readers) if config.served else nullcontext():
        for replicas in config.replicas:
            rows.append(measure(config, replicas))
            print(rows[-1], flush=True)
    head = "| replicas | questions | a second | of the ideal | processor ms a question | idle | MiB here |"
    print("\n".join([f"\nload {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores\n", head, "|---" * 7 + "|", *rows]))


if __name__ == "__main__":
    main()
