"""The contract of envs in chunks: images, an instruction and proprioception in, a chunk of actions out.

Images are drawn on demand: an env gives snapshots, and whoever looks has them drawn, once per chunk and not per step.
`rlvlm.envs.contracts` holds every member to this contract.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.chunks import ChunkObs, ChunkStep
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames

FIRST_HELD_OUT_STATE = 1_000_000
"""Initial states from this number on are for evaluation alone; training draws smaller numbers."""


class ChunkEnvs(ABC):
    """N envs whose episodes begin together and are driven side by side; finished ones are stepped no further."""

    def batches(self, state_ids: NDArray[np.int64]) -> list[NDArray[np.intp]]:
        """The places of `state_ids` `[N]` in batches, each of which is begun and driven to its end before the next.

        One batch of all, unless they take more memory together than a machine has.
        """
        return [np.arange(len(state_ids))]

    @abstractmethod
    def begin(self, state_ids: NDArray[np.int64]) -> ChunkObs:
        """First observations of N new episodes, from the initial states `state_ids` `[N]`; N may differ each time."""

    @abstractmethod
    def step(self, rows: NDArray[np.intp], chunks: FloatArray) -> ChunkStep:
        """What comes of `chunks` `[n, L, A]`, in the env's units, in the envs `rows` `[n]`."""


class ChunkEnv(gym.Env[ChunkObs, FloatArray]):
    """An env that is driven by chunks of L actions and looked at between them.

    `reset` takes an initial state's number in `options["state_id"]`; without it the number is drawn with the seed.
    `reset` and `step` put into `info`: `state_id`, `progress` (float in [0, 1], the simulator's truth), `success`
    (bool), and `step` besides: `steps` (env steps run, the chunk stops at the end of the episode), `env_rewards`
    (`[steps]`) and `snapshots` (`[steps, S]`, after each). Time limits truncate, they do not terminate.
    """

    goal: str
    """What a judge is told where no episode's instruction is at hand."""
    instructions: tuple[str, ...] = ()
    """All that an episode may have, which imported demonstrations must keep to; empty where they cannot be listed."""
    cameras: tuple[str, ...]
    """Names of the cameras that a policy sees through."""
    chunk_steps: int
    """L."""
    action_low: FloatArray
    """[A] smallest values of an action, in the env's units."""
    action_high: FloatArray
    """[A] largest values."""
    scaled_actions: tuple[bool, ...]
    """A of them: whether a dimension is normalised by the demonstrations' quantiles; False for a gripper in [0, 1]."""
    proprio_size: int
    """P."""
    snapshot_size: int
    """S."""
    num_ways: int = 0
    """W, numbers in the ways from the hand to the other landmarks."""
    way_unit: float = 1.0
    """How far the hand typically is from things, in the units of `landmarks`: what ways are counted in."""
    episode_steps: int
    """Env steps of the longest episode."""
    num_held_out: int | None = None
    """Initial states for evaluation, where there are few: numbers from `FIRST_HELD_OUT_STATE` on that are so far apart
    have the same one. None where each number has its own."""

    @abstractmethod
    def snapshot(self) -> FloatArray:
        """The present state as `[S]`: everything that can change the images."""

    @abstractmethod
    def draw(self, snapshots: FloatArray, size_px: int, camera: str = "") -> Frames:
        """Images `[N, size_px, size_px, 3]` of `snapshots` `[N, S]` by a camera, the first one by default.

        The running episode is not disturbed.
        """

    @abstractmethod
    def image_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """`[N, P]`: snapshots with equal keys look the same, to well under a pixel at any size in use."""

    def landmarks(self, snapshots: FloatArray) -> FloatArray:
        """`[N, K, D]` where the hand is in space and the things that the task is about, the hand first; for what learns
        from the simulator's truth: critics, and auxiliary tasks of policies.

        Where there are none, as by default (K = 0), a critic goes by the snapshots themselves.
        """
        return np.empty((len(snapshots), 0, 3), np.float32)

    def ways(self, snapshots: FloatArray) -> FloatArray:
        """`[N, W]` from the hand to each other landmark, one after the other, in multiples of `way_unit`."""
        places = self.landmarks(snapshots)
        return (places[:, 1:] - places[:, :1]).reshape(len(places), -1) / np.float32(self.way_unit)

    def augment_scenes(self, snapshots: FloatArray, starts: FloatArray, rng: np.random.Generator) -> FloatArray:
        """`[N, S]` scenes that nobody has played: the robot of `snapshots` `[N, S]` among the things of `starts`
        `[N, S]`, each of them moved a little; for what learns to see.

        Raises:
            UsageError: this env has none, as by default.
        """
        raise UsageError(f"{type(self).__name__} has no scenes but those that are played", "--sft.scenes 0")

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """The full state as arrays, numbers and strings: after `set_state` the future is bit-identical."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, on this or another instance of the same config."""

    @abstractmethod
    def scripted_chunk(self, noise: float, rng: np.random.Generator) -> FloatArray | None:
        """`[L, A]` what a script that knows the goal does next; None where there is none.

        Args:
            noise: standard deviation of what is added to each action, in units of its range.
            rng: of the noise.
        """

    @abstractmethod
    def many(self) -> ChunkEnvs:
        """Envs of the same config that are driven side by side."""


class SyncChunkEnvs(ChunkEnvs):
    """Ordinary envs, one after another.

    Args:
        envs: at least as many as episodes are begun with, all of one config.
    """

    def __init__(self, envs: Sequence[ChunkEnv]) -> None:
        self._envs = tuple(envs)

    def begin(self, state_ids: NDArray[np.int64]) -> ChunkObs:
        """First observations of N new episodes.

        Raises:
            ValueError: there are fewer envs.
        """
        if len(state_ids) > len(self._envs):
            raise ValueError(f"{len(state_ids)} episodes need as many envs, there are {len(self._envs)}")
        pairs = zip(self._envs, state_ids.tolist(), strict=False)
        return _joined([env.reset(options={"state_id": state_id})[0] for env, state_id in pairs])

    def step(self, rows: NDArray[np.intp], chunks: FloatArray) -> ChunkStep:
        """Drives the envs `rows` [n] by `chunks` [n, L, A]."""
        answers = [self._envs[row].step(chunk) for row, chunk in zip(rows.tolist(), chunks, strict=True)]
        infos = [info for *_, info in answers]
        left_out = [chunks.shape[1] - info["steps"] for info in infos]
        return ChunkStep(
            obs=_joined([answer[0] for answer in answers]),
            snapshots=np.stack(
                [
                    np.pad(info["snapshots"], ((0, missing), (0, 0)), mode="edge")
                    for info, missing in zip(infos, left_out, strict=True)
                ]
            ),
            steps=np.array([info["steps"] for info in infos], np.int64),
            env_rewards=np.stack(
                [np.pad(info["env_rewards"], (0, missing)) for info, missing in zip(infos, left_out, strict=True)]
            ),
            success=np.array([info["success"] for info in infos], bool),
            success_at_end=np.array([info.get("success_at_end", info["success"]) for info in infos], bool),
            progress=np.array([info["progress"] for info in infos], np.float32),
            terminated=np.array([answer[2] for answer in answers], bool),
            truncated=np.array([answer[3] for answer in answers], bool),
        )


def _joined(parts: Sequence[ChunkObs]) -> ChunkObs:
    return ChunkObs(
        snapshots=np.concatenate([part.snapshots for part in parts]),
        instructions=tuple(instruction for part in parts for instruction in part.instructions),
        proprio=np.concatenate([part.proprio for part in parts]),
    )
