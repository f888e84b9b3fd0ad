"""The envs of `push_block`: one by itself, and many side by side in one array. Made by the registry.

A small stand-in for a manipulation benchmark: actions have seven dimensions as a robot arm's do (three of position,
three of rotation, the gripper), of which the table uses the first two. Every initial state is different, the colours
of the blocks included, so a policy must look and read.
"""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.chunks import ChunkObs, ChunkStep
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.chunk_env import FIRST_HELD_OUT_STATE, ChunkEnv, ChunkEnvs
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.push_block import table

CHUNK_STEPS = 8
ACTION_SIZE = 7
_GRIPPER = ACTION_SIZE - 1
_NEAR = 1.6
"""Distance between block and pad that counts as no progress at all."""


def start_of(state_id: int) -> FloatArray:
    """The initial state `[10]` of a number: always the same one."""
    return table.random_tables(np.random.default_rng((state_id, 0x707573)))


def instruction_of(state: FloatArray) -> str:
    """What is asked of `state` [10]."""
    return _told(table.COLOUR_NAMES[int(state[table.COLOURS])])


def _told(colour: str) -> str:
    return f"push the {colour} block onto the pad"


class PushBlocks(ChunkEnvs):
    """Tables side by side, all moved at once.

    Args:
        episode_steps: time limit, env steps.
        plays_on: whether episodes go on after success.
    """

    def __init__(self, episode_steps: int, plays_on: bool = False) -> None:
        self._episode_steps, self._plays_on = episode_steps, plays_on
        self.states = np.empty((0, table.STATE_SIZE), np.float32)
        self.ages = np.empty(0, np.int64)
        self.solved = np.empty(0, bool)
        """[N] whether success has been rewarded."""

    def begin(self, state_ids: NDArray[np.int64]) -> ChunkObs:
        """First observations of N new episodes."""
        distinct, inverse = np.unique(state_ids, return_inverse=True)
        self.states = np.stack([start_of(state_id) for state_id in distinct.tolist()])[inverse]
        self.ages = np.zeros(len(state_ids), np.int64)
        self.solved = np.zeros(len(state_ids), bool)
        return observed(self.states)

    def step(self, rows: NDArray[np.intp], chunks: FloatArray) -> ChunkStep:
        """Moves the tables `rows` [n] by `chunks` [n, L, 7]."""
        states, ages, solved = self.states[rows], self.ages[rows], self.solved[rows]
        done = (table.is_solved(states) & (not self._plays_on)) | (ages >= self._episode_steps)
        success = np.zeros(len(rows), bool)
        trail = np.empty((*chunks.shape[:2], table.STATE_SIZE), np.float32)
        rewards = np.zeros(chunks.shape[:2], np.float32)
        steps = np.zeros(len(rows), np.int64)
        for index in range(chunks.shape[1]):
            moves = np.clip(chunks[:, index, :2], -1.0, 1.0) * np.float32(table.MAX_STEP)
            states = np.where(done[:, None], states, table.moved(states, moves))
            steps += ~done
            is_solved = table.is_solved(states)
            rewards[:, index] = is_solved & ~done & ~solved
            success |= is_solved
            solved |= is_solved
            done |= (is_solved & (not self._plays_on)) | (ages + steps >= self._episode_steps)
            trail[:, index] = states
        self.states[rows], self.ages[rows], self.solved[rows] = states, ages + steps, solved
        ended = success & (not self._plays_on)
        return ChunkStep(
            obs=observed(states),
            snapshots=trail,
            steps=steps,
            env_rewards=rewards,
            success=success,
            success_at_end=table.is_solved(states),
            progress=progress_of(states),
            terminated=ended,
            truncated=~ended & (self.ages[rows] >= self._episode_steps),
        )


class PushBlock(ChunkEnv):
    """One table.

    Args:
        config: episode length; there is no robot to show.
        seed: of the initial states, until `reset` is given another.
    """

    metadata = {"render_modes": []}
    goal = "push the block of the named colour onto the pad"
    instructions = tuple(map(_told, table.COLOUR_NAMES))
    cameras = ("above",)
    chunk_steps = CHUNK_STEPS
    action_low = np.array([-1.0] * _GRIPPER + [0.0], np.float32)
    action_high = np.ones(ACTION_SIZE, np.float32)
    scaled_actions = (True,) * _GRIPPER + (False,)
    proprio_size = 2
    snapshot_size = table.STATE_SIZE
    num_ways = 4

    def __init__(self, config: EnvConfig, seed: int) -> None:
        self.render_mode = None
        self.episode_steps = config.episode_steps
        self._tables = PushBlocks(config.episode_steps, config.plays_on)
        self._plays_on = config.plays_on
        self._state_id = 0
        self.reset(seed=seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ChunkObs, dict[str, Any]]:
        """First observation and info of a new episode; `options["state_id"]` chooses the initial state."""
        super().reset(seed=seed, options=options)
        drawn = int(self.np_random.integers(FIRST_HELD_OUT_STATE))
        self._state_id = drawn if options is None else int(options.get("state_id", drawn))
        obs = self._tables.begin(np.array([self._state_id]))
        return obs, self._info(self._tables.states)

    def step(self, chunk: FloatArray) -> tuple[ChunkObs, float, bool, bool, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride] - the action of an env in chunks is a chunk
        """Observation, 1 if the block has come to lie on the pad, terminated, truncated, info."""
        came = self._tables.step(np.array([0]), np.asarray(chunk, np.float32)[None])
        steps = int(came.steps[0])
        info = self._info(came.obs.snapshots) | {
            "success": bool(came.success[0]),
            "success_at_end": bool(came.success_at_end[0]),
            "steps": steps,
            "env_rewards": came.env_rewards[0, :steps],
            "snapshots": came.snapshots[0, :steps],
        }
        return came.obs, float(came.env_rewards.sum()), bool(came.terminated[0]), bool(came.truncated[0]), info

    def snapshot(self) -> FloatArray:
        """[10]: hand, both blocks, pad, and the blocks' colours."""
        return self._tables.states[0].copy()

    def draw(self, snapshots: FloatArray, size_px: int, camera: str = "") -> Frames:
        """Images [N, size_px, size_px, 3] from above."""
        return table.draw(snapshots, size_px)

    def image_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """[N, 10]."""
        return table.image_key(snapshots)

    def landmarks(self, snapshots: FloatArray) -> FloatArray:
        """[N, 3, 2]: the hand, the block that is asked for, and the pad."""
        return np.stack([snapshots[:, part] for part in (table.HAND, table.ASKED, table.PAD)], axis=1)

    def augment_scenes(self, snapshots: FloatArray, starts: FloatArray, rng: np.random.Generator) -> FloatArray:
        """[N, 10] hands of `snapshots` on tables of `starts`, blocks and pad moved by up to 0.1."""
        scenes = starts.copy()
        places = slice(table.ASKED.start, table.PAD.stop)
        scenes[:, places] += rng.uniform(-0.1, 0.1, scenes[:, places].shape).astype(np.float32)
        scenes[:, table.HAND] = snapshots[:, table.HAND]
        return scenes

    def scripted_chunk(self, noise: float, rng: np.random.Generator) -> FloatArray:
        """[L, 7]: round the block to its left side, then straight to the pad; the gripper stays open."""
        state, chunk = self._tables.states.copy(), np.zeros((CHUNK_STEPS, ACTION_SIZE), np.float32)
        for action in chunk:
            action[:2] = np.clip(table.scripted_moves(state)[0] + noise * rng.normal(size=2), -1.0, 1.0)
            action[_GRIPPER] = 1.0
            state = table.moved(state, action[None, :2] * np.float32(table.MAX_STEP))
        return chunk

    def many(self) -> PushBlocks:
        """Tables with the same time limit and end."""
        return PushBlocks(self.episode_steps, self._plays_on)

    def get_state(self) -> dict[str, Any]:
        """The table, how long the episode has lasted, and the generator."""
        return {
            "state": self._tables.states[0].copy(),
            "age": int(self._tables.ages[0]),
            "solved": bool(self._tables.solved[0]),
            "state_id": self._state_id,
            "generator": json.dumps(self.np_random.bit_generator.state),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self._tables.states = np.array(state["state"], np.float32)[None]
        self._tables.ages = np.array([state["age"]], np.int64)
        self._tables.solved = np.array([state["solved"]], bool)
        self._state_id = int(state["state_id"])
        self.np_random.bit_generator.state = json.loads(state["generator"])

    def _info(self, states: FloatArray) -> dict[str, Any]:
        return {
            "state_id": self._state_id,
            "progress": float(progress_of(states)[0]),
            "success": bool(table.is_solved(states)[0]),
        }


def observed(states: FloatArray) -> ChunkObs:
    """What a policy is given at `states` [N, 10]."""
    return ChunkObs(
        snapshots=states.copy(),
        instructions=tuple(map(instruction_of, states)),
        proprio=states[:, table.HAND].copy(),
    )


def progress_of(states: FloatArray) -> FloatArray:
    """[N] how far the asked block has come, 1 on the pad."""
    nearness = 1.0 - np.clip(table.distance(states) / _NEAR, 0.0, 1.0)
    return np.where(table.is_solved(states), 1.0, nearness).astype(np.float32)
