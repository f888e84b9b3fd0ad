"""Tiny envs in turns and in chunks, with a stub of an algorithm each: what a run of any pipeline is put through."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import gymnasium as gym
import numpy as np
import torch

from rlvlm.algorithms.checkpoint import PolicyFile, load_policy_file, load_tree, save_tree
from rlvlm.algorithms.evaluation import Evaluation, PlayedEpisode, evaluate
from rlvlm.core.chunks import ChunkObs
from rlvlm.core.console.panel import DEFAULT
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.chunk_env import ChunkEnv, ChunkEnvs, SyncChunkEnvs
from rlvlm.envs.registry import make_env
from rlvlm.envs.task import Task
from rlvlm.envs.turn_env import TurnEnv
from rlvlm.runs.config import EvalConfig, RunConfig, TrackConfig
from rlvlm.runs.pipeline import Players

LENGTH = 5
"""Turns or chunks of an episode."""


def paint(values: FloatArray, size_px: int) -> Frames:
    """A white column at each value in [0, 1]."""
    frames = np.zeros((len(values), size_px, size_px, 3), np.uint8)
    frames[np.arange(len(values)), :, np.clip(values * (size_px - 1), 0, size_px - 1).astype(int)] = 255
    return frames


class TinyTurns(TurnEnv):
    """Say which half of the image is lit; five turns."""

    goal, snapshot_size, action_names, picture_px = "name the lit half", 1, ("left", "right"), (16, 16)

    def __init__(self, config: Any, seed: int) -> None:
        self.lit, self.turns, self.right = 0.0, 0, 0
        super(TurnEnv, self).reset(seed=seed)

    def begin(self) -> None:
        self.turns = self.right = 0
        self.lit = float(self.np_random.random())

    def act(self, action: int | None) -> tuple[float, bool, bool]:
        self.turns += 1
        if action is None:
            return -1.0, False, self.turns >= LENGTH
        is_right = action == self.expert_action()
        self.right, self.lit = self.right + is_right, float(self.np_random.random())
        return float(is_right), False, self.turns >= LENGTH

    def prompt(self) -> str:
        return "Which half is lit?"

    def is_success(self) -> bool:
        return self.right >= LENGTH - 1

    def progress(self) -> float:
        return self.right / LENGTH

    def snapshot(self) -> FloatArray:
        return np.array([self.lit], np.float32)

    def draw(self, snapshots: FloatArray) -> Frames:
        return paint(snapshots[:, 0], 16)

    def image_key(self, snapshots: FloatArray) -> np.ndarray:
        return np.rint(snapshots[:, :1] * 1_000).astype(np.int64)

    def get_state(self) -> dict[str, Any]:
        return {"lit": self.lit, "turns": self.turns, "right": self.right, "generator": self.generator_text()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.lit, self.turns, self.right = state["lit"], state["turns"], state["right"]
        self.set_generator(state["generator"])

    def expert_action(self) -> int:
        return int(self.lit > 0.5)

    def expert_thought(self) -> str:
        return f"It is the {self.action_names[self.expert_action()]} one."


class TinyChunks(ChunkEnv):
    """Bring a point to the right end of a line; five chunks of two steps."""

    goal, cameras, chunk_steps, snapshot_size, proprio_size = "go to the right", ("front",), 2, 1, 1
    action_low, action_high = -np.ones(1, np.float32), np.ones(1, np.float32)
    scaled_actions, episode_steps = (True,), 2 * LENGTH

    def __init__(self, config: Any, seed: int) -> None:
        self.place, self.steps = 0.0, 0
        super().reset(seed=seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ChunkObs, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(1_000))
        state = int((options or {}).get("state_id", drawn))
        self.place, self.steps = 0.3 * np.random.default_rng(state).random(), 0
        return self.observe(), {"state_id": state, "progress": self.place, "success": False}

    def step(self, chunk: FloatArray) -> tuple[ChunkObs, float, bool, bool, dict[str, Any]]:
        snapshots, rewards = [], []
        for action in np.clip(chunk[:, 0], -1, 1).tolist():
            self.place, self.steps = min(max(self.place + 0.1 * action, 0.0), 1.0), self.steps + 1
            snapshots.append(self.snapshot())
            rewards.append(float(self.place > 0.9))
            if self.place > 0.9 or self.steps >= self.episode_steps:
                break
        is_there = self.place > 0.9
        info = {
            "state_id": 0,
            "progress": self.place,
            "success": is_there,
            "steps": len(rewards),
            "env_rewards": np.float32(rewards),
            "snapshots": np.stack(snapshots),
        }
        return self.observe(), sum(rewards), is_there, self.steps >= self.episode_steps, info

    def observe(self) -> ChunkObs:
        return ChunkObs(snapshots=self.snapshot()[None], instructions=(self.goal,), proprio=self.snapshot()[None])

    def snapshot(self) -> FloatArray:
        return np.array([self.place], np.float32)

    def draw(self, snapshots: FloatArray, size_px: int, camera: str = "") -> Frames:
        return paint(snapshots[:, 0], size_px)

    def image_key(self, snapshots: FloatArray) -> np.ndarray:
        return np.rint(snapshots * 1_000).astype(np.int64)

    def get_state(self) -> dict[str, Any]:
        return {"place": self.place, "steps": self.steps, "generator": json.dumps(self.np_random.bit_generator.state)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.place, self.steps = state["place"], state["steps"]
        self.np_random.bit_generator.state = json.loads(state["generator"])

    def scripted_chunk(self, noise: float, rng: np.random.Generator) -> FloatArray:
        return np.float32(1 + noise * rng.standard_normal((self.chunk_steps, 1)))

    def many(self) -> ChunkEnvs:
        return SyncChunkEnvs([TinyChunks(None, 0) for _ in range(16)])


@dataclass(frozen=True)
class Moves:
    """How a player with some skill acts in one kind of env."""

    act: Callable[[Any, float, np.random.Generator], Any]
    """StepEnv, skill in [0, 1] and noise in, what `step` takes out."""
    steps: Callable[[dict[str, Any]], int]
    """Env steps that an answer of `step` stands for."""
    draw: Callable[[Any, FloatArray, int], Frames]


def reply(world: TinyTurns, skill: float, rng: np.random.Generator) -> str:
    action = world.expert_action()
    return world.action_text(action if rng.random() < skill else 1 - action)


def chunk(world: TinyChunks, skill: float, rng: np.random.Generator) -> FloatArray:
    return np.float32(2 * skill - 1 + 0.5 * rng.standard_normal((world.chunk_steps, 1)))


IN_TURNS = Moves(act=reply, steps=lambda info: 1, draw=lambda world, rows, size_px: world.draw(rows))
IN_CHUNKS = Moves(
    act=chunk, steps=lambda info: info["steps"], draw=lambda world, rows, size_px: world.draw(rows, size_px)
)


class StubPlayer:
    """Plays with a fixed skill."""

    def __init__(self, world: Any, moves: Moves, skill: float) -> None:
        self.env, self.moves, self.skill = world, moves, skill

    def play(self, seeds: Sequence[int]) -> list[PlayedEpisode]:
        return [self.play_one(seed) for seed in seeds]

    def play_one(self, seed: int) -> PlayedEpisode:
        rng, is_over, kept = np.random.default_rng(seed), False, []
        self.env.reset(seed=seed)
        while not is_over:
            move = self.moves.act(self.env, self.skill, rng)
            _, reward, terminated, truncated, info = self.env.step(move)
            kept.append((self.env.snapshot(), reward, info["success"], info["progress"], str(move)))
            is_over = terminated or truncated
        snapshots, rewards, success, progress, said = zip(*kept, strict=True)
        return PlayedEpisode(
            snapshots=np.stack(snapshots),
            env_rewards=np.float32(rewards),
            success=np.array(success, bool),
            learned_rewards=np.full(len(kept), np.nan, np.float32),
            progress=np.float32(progress),
            captions=said,
        )


class StubAlgorithm:
    """Plays an episode a round, and gets a little better for each success."""

    def __init__(self, config: "StubRunConfig", moves: Moves) -> None:
        self.moves, self.skill, self.env_steps, self.prepared = moves, 0.5, 0, 0
        self.env = make_env(config.task, config.env, config.seed)
        self.viewer = make_env(config.task, config.env, config.seed)
        self.rng = np.random.default_rng(config.seed)
        self.last = {"train/episode_return": 0.0}
        self.env.reset(seed=config.seed)

    def prepare(self, log: Callable[[str], None]) -> bool:
        log("a stub needs no demonstrations")
        self.prepared += 1
        return True

    def train(self) -> None:
        self.env.reset()
        total, is_over, info = 0.0, False, {}
        while not is_over:
            _, reward, terminated, truncated, info = self.env.step(self.moves.act(self.env, self.skill, self.rng))
            total, is_over = total + reward, terminated or truncated
            self.env_steps += self.moves.steps(info)
        self.skill = min(1.0, self.skill + 0.02 * info["success"] + 0.001 * self.rng.random())
        self.last = {"train/episode_return": total, "train/episode_success": float(info["success"])}

    def finish(self) -> None:
        pass

    def report(self) -> dict[str, float]:
        return {**self.last, "stub/skill": self.skill, "stub/prepared": float(self.prepared)}

    def evaluate_policy(self, num_episodes: int) -> Evaluation:
        episodes = evaluate(StubPlayer(self.viewer, self.moves, self.skill), num_episodes)
        return Evaluation(episodes=episodes, metrics={"stub/evaluated": float(len(episodes))})

    def rewarded(self, episodes: Sequence[PlayedEpisode]) -> list[PlayedEpisode]:
        return list(episodes)

    def drain_records(self) -> list[Any]:
        return []

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        return self.moves.draw(self.viewer, snapshots, size_px)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        tree = {
            "world": self.env.get_state(),
            "rng": self.rng.bit_generator.state,
            "env_steps": self.env_steps,
            "last": self.last,
            "prepared": self.prepared,
            "skill": np.array(self.skill),
        }
        save_tree(Path(checkpoint_dir), tree, PolicyFile(kind="stub", weights={"skill": torch.tensor(self.skill)}))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        tree = load_tree(Path(checkpoint_dir))
        self.env.set_state(tree["world"])
        self.rng.bit_generator.state = tree["rng"]
        self.env_steps, self.last, self.prepared = tree["env_steps"], tree["last"], tree["prepared"]
        self.skill = float(tree["skill"])

    def stop(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class StubRunConfig(RunConfig):
    """A run of a stub."""

    luck: float = 0.0
    """A setting for a sweep to vary."""
    pipeline: ClassVar[str] = "stub_pipelines:TurnsPipeline"

    @property
    def asks_judge(self) -> bool:
        return False

    @property
    def max_queries(self) -> int:
        return 0

    @property
    def num_workers(self) -> int:
        return 0

    @property
    def reward_name(self) -> str:
        return f"stub reward {self.luck:g}"

    def smoke(self) -> Self:
        return replace(self, steps=min(self.steps, 40))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunksRunConfig(StubRunConfig):
    """A run of a stub in chunks."""

    pipeline: ClassVar[str] = "stub_pipelines:ChunksPipeline"


class Nothing:
    """Records of nothing."""

    def keep(self, records: Iterable[Any]) -> None:
        assert not list(records)


class TurnsPipeline:
    """Runs of the stub in turns."""

    config_class: type[RunConfig] = StubRunConfig
    moves = IN_TURNS
    rows = DEFAULT

    @contextmanager
    def open_algorithm(self, config: StubRunConfig, make_judge: Any) -> Iterator[StubAlgorithm]:
        yield StubAlgorithm(config, self.moves)

    def open_recorder(self, folder: Any, config: Any, draw: Any) -> Nothing:
        return Nothing()

    def write_pages(self, folder: Any, config: Any) -> None:
        pass

    def open_players(self, config: StubRunConfig, checkpoint: Path) -> Players:
        world = make_env(config.task, config.env, config.seed)
        skill = float(load_policy_file(checkpoint).weights["skill"])
        return Players(
            own=StubPlayer(world, self.moves, skill), draw=lambda rows, size_px: self.moves.draw(world, rows, size_px)
        )


class ChunksPipeline(TurnsPipeline):
    """Runs of the stub in chunks."""

    config_class = ChunksRunConfig
    moves = IN_CHUNKS


OFTEN = {
    "eval": EvalConfig(every_steps=50, episodes=2),
    "track": TrackConfig(log_every_steps=10, checkpoint_every_steps=20),
}


def turns_recipe() -> RunConfig:
    return StubRunConfig(task="", steps=400, **OFTEN)


def chunks_recipe() -> RunConfig:
    return ChunksRunConfig(task="", steps=400, **OFTEN)


TURNS = Task(
    name="tiny_turns",
    goal=TinyTurns.goal,
    maker="stub_pipelines:TinyTurns",
    kind="turns",
    recipe="stub_pipelines:turns_recipe",
)
CHUNKS = Task(
    name="tiny_chunks",
    goal=TinyChunks.goal,
    maker="stub_pipelines:TinyChunks",
    kind="chunks",
    recipe="stub_pipelines:chunks_recipe",
)
assert issubclass(TinyTurns, gym.Env) and issubclass(TinyChunks, gym.Env)
