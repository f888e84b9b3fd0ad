"""A whole LIBERO suite as one task: the initial state's number decides which of its tasks an episode is of.

All tasks have the same robot, cameras and actions, so one policy learns them together and tells them apart by the
instruction and the image. Made by the registry.
"""

import gc
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.episodes import ChunkStep, Observations
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import FIRST_HELD_OUT_STATE, ChunkEnv, ChunkEnvs
from rlvlm.envs.libero.config import LiberoConfig
from rlvlm.envs.libero.env import CHUNK_STEPS, LiberoEnv
from rlvlm.envs.libero.perturbed import read_task
from rlvlm.envs.libero.tasks import SUITES

_MOST_POSITIONS = 72  # largest number of joint positions, with a margin: 66 would do for all 130 tasks
_KEPT = 12  # tasks kept compiled, 0.4 GB each: whole suites of ten, part of libero_90


_LANDMARKS = 5  # the hand, and the at most four things that a task's goals name


class LiberoSuite(ChunkEnv):
    """One env that plays the tasks of a suite in turn.

    Args:
        config: see `LiberoEnv`; one time limit for all tasks.
        seed: of the initial states, until `reset` is given another seed.
        suite: a key of `SUITES`.

    Raises:
        UsageError: LIBERO-PRO has no such perturbation of one of the tasks.
        MachineError: LIBERO is not installed, or no off-screen renderer works here.
    """

    goal = "do what the instruction says"
    cameras = LiberoEnv.cameras
    chunk_steps = CHUNK_STEPS
    action_low = LiberoEnv.action_low
    action_high = LiberoEnv.action_high
    scaled_actions = LiberoEnv.scaled_actions
    proprio_size = LiberoEnv.proprio_size
    snapshot_size = 1 + _MOST_POSITIONS
    num_offsets = 3 * (_LANDMARKS - 1)
    offset_unit = LiberoEnv.offset_unit

    def __init__(self, config: LiberoConfig, seed: int, suite: str) -> None:
        self._config, self._suite = config, suite
        self._num_tasks = len(SUITES[suite])
        tasks = (read_task(suite, number, config.perturbation) for number in range(self._num_tasks))
        self.instructions = tuple(task.instruction for task in tasks)
        self._members: OrderedDict[int, LiberoEnv] = OrderedDict()
        self.episode_steps = config.episode_steps
        self._task = 0
        self._state_id = 0
        self._turn = threading.RLock()  # judges' images are drawn while others are rolled out
        own = self.member(0).num_held_out  # per task; None if things are moved: no two starts are equal
        self.num_held_out = own and own * self._num_tasks
        # every task has the same robot, which its model begins with
        self.robot_columns = tuple(1 + column for column in self.member(0).robot_columns)
        self.reset(seed=seed)

    def member(self, task: int) -> LiberoEnv:
        """Returns the env of task number `task`. If too many are compiled, it drops the least recently used one, but
        never the env whose episode is running.
        """
        with self._turn:
            if task not in self._members:
                if len(self._members) >= _KEPT:
                    self._members.pop(next(number for number in self._members if number != self._task)).close()
                    gc.collect()  # a compiled task has reference cycles
                self._members[task] = LiberoEnv(self._config, 0, self._suite, str(task))
            self._members.move_to_end(task)
            return self._members[task]

    def place_of(self, state_id: int) -> tuple[int, int]:
        """Returns the task of a suite's initial state, and the number of the state within that task."""
        first = FIRST_HELD_OUT_STATE if state_id >= FIRST_HELD_OUT_STATE else 0
        # tasks alternate, so that any range of numbers covers all of them about equally
        own, task = divmod(state_id - first, self._num_tasks)
        return task, first + own

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Returns the first observation and info of a new episode; `options["state_id"]` selects task and start."""
        self._state_id = self.drawn_state(seed, options)
        self._task, own = self.place_of(self._state_id)
        obs, info = self.member(self._task).reset(options={"state_id": own})
        return numbered(obs, self._task), info | {"state_id": self._state_id}

    def step(self, chunk: FloatArray) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """Returns observation, 1 if the task has just been solved, terminated, truncated, info."""
        obs, reward, terminated, truncated, info = self.member(self._task).step(chunk)
        info |= {"state_id": self._state_id, "snapshots": wide(info["snapshots"], self._task)}
        return numbered(obs, self._task), reward, terminated, truncated, info

    def snapshot(self) -> FloatArray:
        """Returns [S]: the task's number, then joint positions, then zeros."""
        return wide(self.member(self._task).snapshot(), self._task)

    def draw(self, snapshots: FloatArray, size_px: int, camera: str = "") -> Frames:
        """Returns images [N, size_px, size_px, 3], each of its own task."""
        images = np.empty((len(snapshots), size_px, size_px, 3), np.uint8)
        for rows, member, positions in self._by_task(snapshots):
            images[rows] = member.draw(positions, size_px, camera)
        return images

    def image_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """Returns [N, S]: the task's number, then the key of the task's own env."""
        keys = np.zeros((len(snapshots), self.snapshot_size), np.int64)
        keys[:, 0] = snapshots[:, 0]
        for rows, member, positions in self._by_task(snapshots):
            keys[rows, 1 : 1 + member.snapshot_size] = member.image_key(positions)
        return keys

    def hand_path(self, snapshots: FloatArray, camera: str = "") -> FloatArray:
        """Returns [N, 2] for snapshots of one task."""
        [(_, member, positions)] = self._by_task(snapshots)
        return member.hand_path(positions, camera)

    def landmarks(self, snapshots: FloatArray) -> FloatArray:
        """Returns [N, 5, 3]: the hand, and up to four things that the task's goals name, the last one repeated."""
        landmarks = np.empty((len(snapshots), _LANDMARKS, 3), np.float32)
        for rows, member, positions in self._by_task(snapshots):
            own = member.landmarks(positions)
            landmarks[rows] = own[:, np.minimum(np.arange(_LANDMARKS), own.shape[1] - 1)]
        return landmarks

    def augment_scenes(self, snapshots: FloatArray, starts: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Returns [N, S]: the arm of `snapshots` among the things of `starts`, of the same task in each row."""
        scenes = starts.copy()
        for rows, member, things in self._by_task(starts):
            own = slice(1, 1 + member.snapshot_size)
            scenes[rows, own] = member.augment_scenes(snapshots[rows, own], things, rng)
        return scenes

    def _by_task(self, snapshots: FloatArray) -> Iterator[tuple[NDArray[np.intp], LiberoEnv, FloatArray]]:
        """Yields for each task in `snapshots` [N, S] its rows, its env, and these rows' joint positions."""
        numbers = snapshots[:, 0].astype(np.int64)
        for task in np.unique(numbers).tolist():
            with self._turn:  # so that it is not closed meanwhile
                rows, member = np.flatnonzero(numbers == task), self.member(task)
                yield rows, member, snapshots[rows, 1 : 1 + member.snapshot_size]

    def scripted_chunk(self, noise: float, rng: np.random.Generator) -> FloatArray | None:
        """Returns [L, 7] from the present task's script; None if it has none."""
        return self.member(self._task).scripted_chunk(noise, rng)

    def many(self) -> "LiberoSuiteEnvs":
        """Returns envs of the same config."""
        return LiberoSuiteEnvs(self)

    def get_state(self) -> dict[str, Any]:
        """Returns the present task's state under its own keys, the task's number, and the generator."""
        own = {f"task/{name}": value for name, value in self.member(self._task).get_state().items()}
        generator = self.generator_text()
        return own | {"number": self._task, "state_id": self._state_id, "generator": generator}

    def set_state(self, state: dict[str, Any]) -> None:
        self._task, self._state_id = int(state["number"]), int(state["state_id"])
        own = {name.removeprefix("task/"): value for name, value in state.items() if name.startswith("task/")}
        self.member(self._task).set_state(own)
        self.set_generator(state["generator"])

    def close(self) -> None:
        """Frees OpenGL; the next image opens it again."""
        for member in self._members.values():
            member.close()


class LiberoSuiteEnvs(ChunkEnvs):
    """Envs of several tasks stepped side by side; envs of one task share its scene in turn.

    Args:
        suite: suite that makes the tasks' envs.
    """

    def __init__(self, suite: LiberoSuite) -> None:
        self._suite = suite
        self._envs: dict[int, ChunkEnvs] = {}
        self._tasks = np.empty(0, np.int64)
        self._places = np.empty(0, np.intp)

    def batches(self, state_ids: NDArray[np.int64]) -> list[NDArray[np.intp]]:
        """Returns batches of as many tasks as stay compiled beside the suite's own episode; one batch if all fit."""
        tasks = np.array([self._suite.place_of(state_id)[0] for state_id in state_ids.tolist()], np.int64)
        distinct = np.unique(tasks)
        num = _KEPT - 1  # one slot belongs to the task of the running episode, which is never closed
        parts = [distinct[first : first + num] for first in range(0, len(distinct), num)]
        return [np.flatnonzero(np.isin(tasks, part)) for part in parts]

    def begin(self, state_ids: NDArray[np.int64]) -> Observations:
        """Returns the first observations of N new episodes."""
        pairs = [self._suite.place_of(state_id) for state_id in state_ids.tolist()]
        self._tasks, own = np.array([task for task, _ in pairs]), np.array([own for _, own in pairs])
        self._places = np.empty(len(state_ids), np.intp)
        self._envs = {}
        parts, groups = [], []
        for task in np.unique(self._tasks).tolist():
            groups.append(np.flatnonzero(self._tasks == task))
            self._places[groups[-1]] = np.arange(len(groups[-1]))  # position of each row within its own task
            self._envs[task] = self._suite.member(task).many()
            parts.append(numbered(self._envs[task].begin(own[groups[-1]]), task))
        return Observations.joined(parts).at(np.argsort(np.concatenate(groups)))  # restores the order of `state_ids`

    def step(self, rows: NDArray[np.intp], chunks: FloatArray) -> ChunkStep:
        """Drives the envs `rows` [n] by `chunks` [n, L, 7]."""
        answers, indices = [], []
        for task in np.unique(self._tasks[rows]).tolist():
            indices.append(np.flatnonzero(self._tasks[rows] == task))
            came = self._envs[task].step(self._places[rows[indices[-1]]], chunks[indices[-1]])
            answers.append(replace(came, obs=numbered(came.obs, task), snapshots=wide(came.snapshots, task)))
        return ChunkStep.joined(answers, np.argsort(np.concatenate(indices)))  # tasks were stepped one after the other


def wide(positions: FloatArray, task: int) -> FloatArray:
    """Returns [..., S] snapshots of the suite for joint positions [..., P] of the task number `task`."""
    snapshots = np.zeros((*positions.shape[:-1], 1 + _MOST_POSITIONS), np.float32)
    snapshots[..., 0] = task
    snapshots[..., 1 : 1 + positions.shape[-1]] = positions
    return snapshots


def numbered(obs: Observations, task: int) -> Observations:
    """Returns `obs` of the task number `task` with the suite's snapshots."""
    return replace(obs, snapshots=wide(obs.snapshots, task), images=())
