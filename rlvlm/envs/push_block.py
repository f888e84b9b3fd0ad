"""`push_block`: push the block of the named colour onto the pad. A single env, and many side by side in one array.

A small stand-in for a manipulation benchmark: actions have seven dimensions as a robot arm's do (three of position,
three of rotation, the gripper), of which the table uses the first two. Every initial state is different, the colours
of the blocks included, so a policy must look and read.

The table itself is pure functions on N tables at once: a state is a row of 10 numbers, `[N, 10]` float32, which is also
its snapshot. Unit: half the table's width, so that the table spans [-1, 1] in x (to the right) and y (away from the
viewer).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.episodes import ChunkStep, Observations
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.env import ChunkEnv, ChunkEnvs

STATE_SIZE = 10
HAND, ASKED, OTHER, PAD = slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)
COLOURS = 8
"""Columns of a state: the hand, the asked block, the other block and the pad; then both blocks' colours."""
COLOUR_NAMES = ("red", "green", "blue", "yellow")
INSTRUCTIONS = tuple(f"push the {colour} block onto the pad" for colour in COLOUR_NAMES)
MAX_STEP = 0.09
"""Distance that the hand moves at action 1, per axis."""
HAND_RADIUS, BLOCK_HALF, PAD_HALF = 0.08, 0.14, 0.2
PAD_TOLERANCE = 0.12
"""Largest distance per axis, at success, between the middles of block and pad."""

_TABLE, _PAD, _HAND = (218, 208, 190), (250, 250, 250), (45, 45, 50)
_PALETTE = np.array([(204, 45, 40), (52, 150, 70), (48, 90, 200), (228, 186, 40)], np.float32)
_GRAIN = 1e-3  # rounding of drawn states: 0.1 of a pixel at 200 pixels
_NEAR = 1.6  # at this distance between block and pad progress is 0

CHUNK_STEPS = 8
ACTION_SIZE = 7
_GRIPPER = ACTION_SIZE - 1


def random_table(rng: np.random.Generator) -> FloatArray:
    """Returns a start `[10]`: hand on the left, two blocks of different colours in the middle, pad on the right."""
    rows = rng.permutation(2) * 2 - 1  # 1 is the far half of the table, -1 the near one: the asked block is in either
    hand = (rng.uniform(-0.8, -0.7), rng.uniform(-0.2, 0.2))
    blocks = [(rng.uniform(-0.2, 0.0), row * rng.uniform(0.28, 0.45)) for row in rows]
    pad = (rng.uniform(0.45, 0.65), rng.uniform(-0.45, 0.45))
    colours = rng.permutation(len(COLOUR_NAMES))[:2]
    return np.array([*hand, *blocks[0], *blocks[1], *pad, *colours], np.float32)


def moved(states: FloatArray, moves: FloatArray) -> FloatArray:
    """Returns states `[N, 10]` after the hand moved by `moves` `[N, 2]`; it pushes blocks along without slipping."""
    after = states.copy()
    after[:, HAND] = np.clip(states[:, HAND] + moves, -1.0, 1.0)
    step = after[:, HAND] - states[:, HAND]
    reach = HAND_RADIUS + BLOCK_HALF
    rows = np.arange(len(states))
    for block in (ASKED, OTHER):
        gap = states[:, block] - after[:, HAND]
        axis = np.abs(gap).argmax(axis=1)  # the side that is touched
        # a block is pushed only by the overlap along the touched side, and only if the hand moves into it, not past it
        depth = reach - np.abs(gap[rows, axis])
        is_pushed = (depth > 0) & (step[rows, axis] * gap[rows, axis] > 0)
        share = np.minimum(depth / np.maximum(np.abs(step[rows, axis]), 1e-6), 1.0)  # share of the step in contact
        limit = 1.0 - BLOCK_HALF
        after[:, block] = np.clip(after[:, block] + np.where(is_pushed, share, 0.0)[:, None] * step, -limit, limit)
    return after


def is_solved(states: FloatArray) -> NDArray[np.bool_]:
    """Returns `[N]`, whether the asked block lies on the pad."""
    return np.abs(states[:, ASKED] - states[:, PAD]).max(axis=1) < PAD_TOLERANCE


def progress_of(states: FloatArray) -> FloatArray:
    """Returns [N], the progress of the asked block, 1 on the pad."""
    distance = np.hypot(*(states[:, ASKED] - states[:, PAD]).T)
    nearness = 1.0 - np.clip(distance / _NEAR, 0.0, 1.0)
    return np.where(is_solved(states), 1.0, nearness).astype(np.float32)


def scripted_moves(states: FloatArray) -> FloatArray:
    """Returns `[N, 2]` in [-1, 1]: to the middle of the asked block's left side, then straight to the pad."""
    to_block = states[:, ASKED] - states[:, HAND]
    reach = HAND_RADIUS + BLOCK_HALF
    # keep away from the block until the hand is level with it, or it would push the block aside
    is_level = np.abs(to_block[:, 1]) < 0.06
    to_touch = to_block.copy()
    to_touch[:, 0] -= np.where(is_level, reach - 0.02, reach + 0.08)
    is_there = (np.abs(to_block[:, 1]) < 0.1) & (to_block[:, 0] < reach + 0.02)
    goal = np.where(is_there[:, None], states[:, PAD] - states[:, ASKED], to_touch) / MAX_STEP
    longest = np.maximum(np.abs(goal).max(axis=1, keepdims=True), 1.0)  # scale both axes alike: the path stays straight
    return (goal / longest).astype(np.float32)


def draw_tables(states: FloatArray, size_px: int) -> Frames:
    """Returns images `[N, size_px, size_px, 3]` from above, with smooth edges; the asked block is not marked."""
    states = np.rint(states / _GRAIN).astype(np.float32) * np.float32(_GRAIN)  # equal keys, equal images
    across = (np.arange(size_px, dtype=np.float32) + 0.5) * np.float32(2 / size_px) - 1
    up = across[::-1, None]
    channels = np.empty((3, len(states), size_px, size_px), np.float32)
    channels[:] = np.reshape(_TABLE, (3, 1, 1, 1))

    def paint(outside: FloatArray, colours: NDArray[np.floating]) -> None:
        """Covers the area less than half a pixel `outside` [N, H, W] with `colours` [3, N or 1]."""
        cover = np.clip(0.5 - outside * np.float32(size_px / 2), 0.0, 1.0)
        for channel, colour in zip(channels, colours.astype(np.float32), strict=True):
            channel += cover * (colour[:, None, None] - channel)

    def square(middle: FloatArray, half: float) -> FloatArray:
        """Returns [N, H, W], each pixel's distance outside of a square, negative inside."""
        beside = np.abs(across - middle[:, 0, None, None]) - np.float32(half)
        above = np.abs(up - middle[:, 1, None, None]) - np.float32(half)
        return np.maximum(beside, above)

    paint(square(states[:, PAD], PAD_HALF), np.reshape(_PAD, (3, 1)))
    blocks = np.stack([states[:, ASKED], states[:, OTHER]])
    colours = np.rint(states[:, COLOURS : COLOURS + 2]).astype(np.int64)
    # painted in the order of colours: otherwise the upper of two overlapping blocks would reveal the asked one
    order, rows = np.argsort(colours, axis=1), np.arange(len(states))
    for index in (0, 1):
        chosen = order[:, index]
        paint(square(blocks[chosen, rows], BLOCK_HALF), _PALETTE[colours[rows, chosen]].T)
    hand = states[:, HAND]
    paint(
        np.hypot(across - hand[:, 0, None, None], up - hand[:, 1, None, None]) - np.float32(HAND_RADIUS),
        np.reshape(_HAND, (3, 1)),
    )
    return np.rint(channels).astype(np.uint8).transpose(1, 2, 3, 0).copy()


def instruction_of(state: FloatArray) -> str:
    """Returns the instruction at `state` [10]."""
    return INSTRUCTIONS[int(state[COLOURS])]


def observed(states: FloatArray) -> Observations:
    """Returns a policy's observations at `states` [N, 10]."""
    return Observations(
        snapshots=states.copy(),
        texts=tuple(map(instruction_of, states)),
        proprio=states[:, HAND].copy(),
    )


class PushBlocks(ChunkEnvs):
    """Tables side by side, all stepped at once.

    Args:
        episode_steps: time limit, env steps.
        continue_after_success: whether episodes continue after success.
    """

    def __init__(self, episode_steps: int, continue_after_success: bool = False) -> None:
        self._episode_steps, self._continue_after_success = episode_steps, continue_after_success
        self.states = np.empty((0, STATE_SIZE), np.float32)
        self.ages = np.empty(0, np.int64)
        self.solved = np.empty(0, bool)
        """[N] whether the success was already rewarded."""

    def begin(self, state_ids: NDArray[np.int64]) -> Observations:
        """Returns the first observations of N new episodes."""
        # each number seeds a generator of its own, for the same start in every run; equal numbers are drawn once
        distinct, inverse = np.unique(state_ids, return_inverse=True)
        generators = [np.random.default_rng((state_id, 0x707573)) for state_id in distinct.tolist()]
        self.states = np.stack([random_table(rng) for rng in generators])[inverse]
        self.ages = np.zeros(len(state_ids), np.int64)
        self.solved = np.zeros(len(state_ids), bool)
        return observed(self.states)

    def step(self, rows: NDArray[np.intp], chunks: FloatArray) -> ChunkStep:
        """Moves the tables `rows` [n] by `chunks` [n, L, 7]."""
        states, ages, solved = self.states[rows], self.ages[rows], self.solved[rows]
        # finished tables stay as they are while the others finish their chunk
        done = (is_solved(states) & (not self._continue_after_success)) | (ages >= self._episode_steps)
        success = np.zeros(len(rows), bool)
        trail = np.empty((*chunks.shape[:2], STATE_SIZE), np.float32)
        rewards = np.zeros(chunks.shape[:2], np.float32)
        steps = np.zeros(len(rows), np.int64)
        for index in range(chunks.shape[1]):
            moves = np.clip(chunks[:, index, :2], -1.0, 1.0) * np.float32(MAX_STEP)
            states = np.where(done[:, None], states, moved(states, moves))
            steps += ~done
            now = is_solved(states)
            rewards[:, index] = now & ~done & ~solved  # 1 once, however long the block stays on the pad
            success |= now
            solved |= now
            done |= (now & (not self._continue_after_success)) | (ages + steps >= self._episode_steps)
            trail[:, index] = states
        self.states[rows], self.ages[rows], self.solved[rows] = states, ages + steps, solved
        ended = success & (not self._continue_after_success)
        return ChunkStep(
            obs=observed(states),
            snapshots=trail,
            steps=steps,
            env_rewards=rewards,
            success=success,
            success_at_end=is_solved(states),
            progress=progress_of(states),
            terminated=ended,
            truncated=~ended & (self.ages[rows] >= self._episode_steps),
        )


class PushBlock(ChunkEnv):
    """One table as an env.

    Args:
        config: episode length; there is no robot to hide.
        seed: of the initial states, until `reset` is given another seed.
    """

    goal = "push the block of the named colour onto the pad"
    is_symmetric = True
    instructions = INSTRUCTIONS
    cameras = ("above",)
    chunk_steps = CHUNK_STEPS
    action_low = np.array([-1.0] * _GRIPPER + [0.0], np.float32)
    action_high = np.ones(ACTION_SIZE, np.float32)
    scaled_actions = (True,) * _GRIPPER + (False,)
    proprio_size = 2
    snapshot_size = STATE_SIZE
    robot_columns = (HAND.start, HAND.start + 1)
    grain = _GRAIN
    num_offsets = 4

    def __init__(self, config: ChunkEnvConfig, seed: int) -> None:
        self.episode_steps = config.episode_steps
        self._tables = PushBlocks(config.episode_steps, config.continue_after_success)
        self._continue_after_success = config.continue_after_success
        self._state_id = 0
        self.reset(seed=seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Returns the first observation and info of a new episode; `options["state_id"]` chooses the initial state."""
        self._state_id = self.drawn_state(seed, options)
        obs = self._tables.begin(np.array([self._state_id]))
        states = self._tables.states
        success, progress = bool(is_solved(states)[0]), float(progress_of(states)[0])
        return obs, {"state_id": self._state_id, "progress": progress, "success": success}

    def step(self, chunk: FloatArray) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """Returns observation, 1 if the block has just reached the pad, terminated, truncated, info."""
        came = self._tables.step(np.array([0]), np.asarray(chunk, np.float32)[None])
        return self.answer_alone(came, self._state_id)

    def snapshot(self) -> FloatArray:
        """Returns [10]: hand, both blocks, pad, and the blocks' colours."""
        return self._tables.states[0].copy()

    def draw(self, snapshots: FloatArray, size_px: int, camera: str = "") -> Frames:
        """Returns images [N, size_px, size_px, 3] from above."""
        return draw_tables(snapshots, size_px)

    def hand_path(self, snapshots: FloatArray, camera: str = "") -> FloatArray:
        """Returns [N, 2]; the camera looks straight down, and up in the image is away from the viewer."""
        return 0.5 + snapshots[:, HAND] * np.array([0.5, -0.5], np.float32)

    def goals_in_view(self, snapshot: FloatArray) -> tuple[str, ...]:
        """Returns the instructions about the two blocks on this table."""
        return tuple(INSTRUCTIONS[int(colour)] for colour in snapshot[COLOURS : COLOURS + 2])

    def landmarks(self, snapshots: FloatArray) -> FloatArray:
        """Returns [N, 3, 2]: the hand, the block that is asked for, and the pad."""
        return np.stack([snapshots[:, part] for part in (HAND, ASKED, PAD)], axis=1)

    def augment_scenes(self, snapshots: FloatArray, starts: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Returns [N, 10]: hands of `snapshots` on tables of `starts`, with blocks and pad moved by up to 0.1."""
        scenes = starts.copy()
        columns = slice(ASKED.start, PAD.stop)  # both blocks and the pad, adjacent in a state
        scenes[:, columns] += rng.uniform(-0.1, 0.1, scenes[:, columns].shape).astype(np.float32)
        scenes[:, HAND] = snapshots[:, HAND]
        return scenes

    def scripted_chunk(self, noise: float, rng: np.random.Generator) -> FloatArray:
        """Returns [L, 7]: around the block to its left side, then straight to the pad; the gripper stays open."""
        # a copy of the table is stepped along, so that each action answers the outcome of those before it
        state, chunk = self._tables.states.copy(), np.zeros((CHUNK_STEPS, ACTION_SIZE), np.float32)
        for action in chunk:
            action[:2] = np.clip(scripted_moves(state)[0] + noise * rng.normal(size=2), -1.0, 1.0)
            action[_GRIPPER] = 1.0
            state = moved(state, action[None, :2] * np.float32(MAX_STEP))
        return chunk

    def many(self) -> PushBlocks:
        """Tables with the same time limit and end."""
        return PushBlocks(self.episode_steps, self._continue_after_success)

    def get_state(self) -> dict[str, Any]:
        """Returns the table, the episode's step count, and the generator."""
        return {
            "state": self._tables.states[0].copy(),
            "age": int(self._tables.ages[0]),
            "solved": bool(self._tables.solved[0]),
            "state_id": self._state_id,
            "generator": self.generator_text(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._tables.states = np.array(state["state"], np.float32)[None]
        self._tables.ages = np.array([state["age"]], np.int64)
        self._tables.solved = np.array([state["solved"]], bool)
        self._state_id = int(state["state_id"])
        self.set_generator(state["generator"])
