"""The envs of a LIBERO task: a single one, and many that share one scene. Made by the registry."""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import logging
from dataclasses import replace
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.episodes import ChunkStep, Observations
from rlvlm.core.progress import count_progress
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import ChunkEnv, ChunkEnvs
from rlvlm.envs.libero.config import LiberoConfig
from rlvlm.envs.libero.expert import Script, ScriptMemory, has_script
from rlvlm.envs.libero.scene import CAMERAS, LiberoScene, shared_scene
from rlvlm.envs.mujoco.env import KEY_GRAIN
from rlvlm.envs.rendering import ensure_renderer
from rlvlm.envs.robosuite.arm import EXACT_STEP_S, FAST_STEP_S

CHUNK_STEPS = 8
ACTION_SIZE = 7
_GRIPPER = ACTION_SIZE - 1
_PROPRIO_SIZE = 8
_LOGGER = logging.getLogger(__name__)


def to_robosuite(action: FloatArray) -> FloatArray:
    """Returns `[7]` as robosuite takes it: the gripper, 1 open and 0 closed in a policy's actions, becomes -1 and 1.

    Source: OpenVLA's LIBERO evaluation, -sign(2 g - 1). Departure: exactly 0.5, whose sign is 0 there, opens.
    """
    return np.append(action[:_GRIPPER], -1.0 if action[_GRIPPER] >= 0.5 else 1.0).astype(np.float32)


class LiberoEnvs(ChunkEnvs):
    """Envs stepped side by side. They share one scene in turn; finished ones are not stepped any more.

    Args:
        scene: scene of the task.
        config: time limit, largest shift of things, and the simulation's step.
    """

    def __init__(self, scene: LiberoScene, config: LiberoConfig) -> None:
        self.scene = scene
        self._episode_steps, self._start_jitter_m = config.episode_steps, config.start_jitter_m
        self._step_s = FAST_STEP_S if config.physics == "fast" else EXACT_STEP_S
        self._continue_after_success = config.continue_after_success
        self.states: list[NDArray[np.float64]] = []
        self.ages = np.empty(0, np.int64)
        self.progress = np.empty(0, np.float32)
        self.solved = np.empty(0, bool)
        """[N] whether the success was already rewarded."""

    def begin(self, state_ids: NDArray[np.int64]) -> Observations:
        """Returns the first observations of N new episodes."""
        distinct, inverse = np.unique(state_ids, return_inverse=True)
        starts = []  # equal numbers share one start, settled once
        with self.scene.turn:
            for state_id in distinct.tolist():
                state = self.scene.start(state_id, self._start_jitter_m)
                count_progress()
                starts.append((state, self.scene.positions(), self.scene.arm.proprio(), self.scene.progress()))
        states, positions, proprio, progress = zip(*starts, strict=True)
        self.states = [states[index] for index in inverse]
        self.ages = np.zeros(len(state_ids), np.int64)
        self.progress = np.array(progress, np.float32)[inverse]
        self.solved = np.zeros(len(state_ids), bool)
        return self._observed(np.stack(positions)[inverse], np.stack(proprio)[inverse])

    def step(self, rows: NDArray[np.intp], chunks: FloatArray) -> ChunkStep:
        """Drives the envs `rows` [n] by `chunks` [n, L, 7]."""
        scene, num, length = self.scene, len(rows), chunks.shape[1]
        trail = np.empty((num, length, scene.model.nq), np.float32)
        proprio = np.empty((num, _PROPRIO_SIZE), np.float32)
        rewards = np.zeros((num, length), np.float32)
        steps = np.zeros(num, np.int64)
        progress = np.empty(num, np.float32)
        success, success_at_end, is_cut = (np.zeros(num, bool) for _ in range(3))
        with scene.turn:
            for place, row in enumerate(rows.tolist()):
                scene.load(self.states[row])
                left = min(length, self._episode_steps - int(self.ages[row]))
                is_solved = False
                for index, action in enumerate(chunks[place, :left]):
                    scene.arm.step(to_robosuite(action), self._step_s)
                    trail[place, index:] = scene.positions()  # fills to the end: steps left out repeat the last one
                    steps[place] = index + 1
                    is_cut[place] = scene.has_diverged()
                    if is_cut[place]:  # the physics diverged: the episode is cut here, as a failure
                        _LOGGER.warning("the simulation diverged: %s; the episode ends here", scene.instruction)
                    is_solved = not is_cut[place] and scene.is_solved()
                    rewards[place, index] = is_solved and not self.solved[row]
                    success[place] |= is_solved
                    self.solved[row] |= is_solved
                    if is_cut[place] or (is_solved and not self._continue_after_success):
                        break
                success_at_end[place] = is_solved
                self.states[row] = scene.save()
                count_progress()
                mujoco.mj_kinematics(scene.model, scene.data)  # a step leaves positions as before its last substep
                proprio[place] = scene.arm.proprio()
                progress[place] = 1.0 if is_solved else scene.progress()
        self.ages[rows] += steps
        self.progress[rows] = progress
        ended = success & (not self._continue_after_success)
        return ChunkStep(
            obs=self._observed(trail[:, -1], proprio),
            snapshots=trail,
            steps=steps,
            env_rewards=rewards,
            success=success,
            success_at_end=success_at_end,
            progress=progress,
            terminated=ended,
            truncated=~ended & (is_cut | (self.ages[rows] >= self._episode_steps)),
        )

    def _observed(self, positions: FloatArray, proprio: FloatArray) -> Observations:
        instructions = (self.scene.instruction,) * len(positions)
        return Observations(snapshots=positions.copy(), texts=instructions, proprio=proprio)


class LiberoEnv(ChunkEnv):
    """One env of a LIBERO task.

    Args:
        config: time limit, largest shift of things, and the simulation's step.
        seed: of the initial states, until `reset` is given another seed.
        suite: a key of `SUITES`.
        number: number of the task in the suite, from 0, in digits.

    Raises:
        UsageError: LIBERO-PRO has no such perturbation of the task.
        MachineError: LIBERO is not installed, or no off-screen renderer works here.
    """

    cameras = CAMERAS
    chunk_steps = CHUNK_STEPS
    action_low = np.array([-1.0] * _GRIPPER + [0.0], np.float32)
    action_high = np.ones(ACTION_SIZE, np.float32)
    scaled_actions = (True,) * _GRIPPER + (False,)
    proprio_size = _PROPRIO_SIZE
    offset_unit = 0.1
    grain = KEY_GRAIN

    def __init__(self, config: LiberoConfig, seed: int, suite: str, number: str) -> None:
        ensure_renderer()  # before training starts, rather than an hour into it
        mesh_cell = config.mesh_cell if config.render_style == "light" else 0.0
        self.scene = shared_scene(suite, int(number), mesh_cell, config.perturbation)
        self._config = config
        self.grain = self.scene.grain  # finer with shadows and reflections
        self.goal = self.scene.instruction
        self.instructions = (self.goal,)
        self.episode_steps = config.episode_steps
        self.snapshot_size = self.scene.model.nq  # joint positions
        self.robot_columns = self.scene.robot_columns
        self.num_offsets = 3 * len(self.scene.named)
        self.num_held_out = None if config.start_jitter_m else self.scene.num_held_out
        self._envs = LiberoEnvs(self.scene, config)
        self._state_id = 0
        self._seen = np.empty(self.snapshot_size, np.float32)
        self._memory = ScriptMemory()
        self._planned: tuple[FloatArray, ScriptMemory] | None = None
        self.reset(seed=seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Returns the first observation and info of a new episode; `options["state_id"]` chooses the initial state."""
        self._state_id = self.drawn_state(seed, options)
        obs = self._envs.begin(np.array([self._state_id]))
        self._seen = obs.snapshots[0]
        self._memory = ScriptMemory()
        return obs, {"state_id": self._state_id, "progress": float(self._envs.progress[0]), "success": False}

    def step(self, chunk: FloatArray) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """Returns observation, 1 if the task has just been solved, terminated, truncated, info."""
        chunk = np.asarray(chunk, np.float32)
        # the script keeps its memory as long as the executed actions are the ones it planned, at once or in parts;
        # otherwise it starts over
        planned, memory = self._planned or (chunk[:0], ScriptMemory())
        is_scripted = len(planned) > 0 and np.array_equal(chunk, planned[: len(chunk)])
        left = planned[len(chunk) :]
        self._planned = (left, memory) if is_scripted and len(left) else None
        self._memory = memory if is_scripted and not len(left) else ScriptMemory()
        came = self._envs.step(np.array([0]), chunk[None])
        self._seen = came.obs.snapshots[0]
        return self.answer_alone(came, self._state_id)

    def snapshot(self) -> FloatArray:
        """Returns [S]: joint positions of robot, things and fixtures."""
        return self._seen.copy()

    def draw(self, snapshots: FloatArray, size_px: int, camera: str = "") -> Frames:
        """Returns images [N, size_px, size_px, 3], rotated like those that published policies were trained on."""
        return np.ascontiguousarray(self.scene.draw(snapshots, size_px, camera)[:, :, ::-1])

    def hand_path(self, snapshots: FloatArray, camera: str = "") -> FloatArray:
        """Returns [N, 2]: mirrored, as the images are."""
        return self.scene.hand_path(snapshots, camera) * (-1, 1) + np.array((1, 0), np.float32)

    def landmarks(self, snapshots: FloatArray) -> FloatArray:
        """Returns [N, K, 3]: the hand, and the things that the goals name."""
        return self.scene.landmarks(snapshots)

    def augment_scenes(self, snapshots: FloatArray, starts: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Returns [N, S]: the arm of `snapshots` among the things of `starts`, each moved by up to 3 cm."""
        return self.scene.augment_scenes(snapshots, starts, rng)

    def scripted_chunk(self, noise: float, rng: np.random.Generator) -> FloatArray | None:
        """Returns [L, 7], the next chunk of the pick-and-place script; None if the task asks for more than it can do.

        The script reacts to the outcome of each action, so the chunk is simulated, and then the env is reset to its
        state.
        """
        scene = self.scene
        with scene.turn:
            scene.load(self._envs.states[0])
            mujoco.mj_fwdPosition(scene.model, scene.data)
            if not has_script(scene):
                return None
            memory = replace(self._memory)
            script = Script(scene, memory)
            chunk = np.empty((CHUNK_STEPS, ACTION_SIZE), np.float32)
            for action in chunk:
                action[:] = script.act(noise, rng)
                scene.arm.step(to_robosuite(action))
        self._planned = (chunk, memory)
        return chunk

    def many(self) -> LiberoEnvs:
        """Returns envs of the same config."""
        return LiberoEnvs(self.scene, self._config)

    def get_state(self) -> dict[str, Any]:
        """Returns physics and arm, the episode's step count, and the generator."""
        return {
            "state": self._envs.states[0].copy(),
            "script": self._memory.to_array(),
            "seen": self._seen.copy(),
            "age": int(self._envs.ages[0]),
            "solved": bool(self._envs.solved[0]),
            "progress": float(self._envs.progress[0]),
            "state_id": self._state_id,
            "generator": self.generator_text(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._envs.states = [np.array(state["state"], np.float64)]
        self._envs.ages = np.array([state["age"]], np.int64)
        self._envs.solved = np.array([state["solved"]], bool)
        self._envs.progress = np.array([state["progress"]], np.float32)
        self._memory, self._planned = ScriptMemory.from_array(np.asarray(state["script"])), None
        self._seen = np.array(state["seen"], np.float32)
        self._state_id = int(state["state_id"])
        self.set_generator(state["generator"])

    def close(self) -> None:
        """Frees OpenGL; the next image opens it again."""
        self.scene.close()
