"""What envs in chunks show, and what comes of a chunk. Images stay references: snapshots."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkObs:
    """What a policy is given before a chunk, of N envs at once; an env by itself has N = 1."""

    snapshots: FloatArray
    """[N, S] everything that can change the images; an env can draw each of its cameras from it."""
    instructions: tuple[str, ...]
    """N of them, e.g. `push the red block onto the pad`."""
    proprio: FloatArray
    """[N, P] what the robot feels of itself, in the env's units."""

    def __post_init__(self) -> None:
        if not len(self.snapshots) == len(self.instructions) == len(self.proprio):
            raise ValueError(
                f"snapshots, instructions and proprio need one entry per env, got {len(self.snapshots)}, "
                f"{len(self.instructions)} and {len(self.proprio)}"
            )

    def __len__(self) -> int:
        return len(self.instructions)

    def at(self, rows: NDArray[np.intp]) -> "ChunkObs":
        """What is given in the envs `rows` [n], in their order."""
        instructions = tuple(self.instructions[row] for row in rows.tolist())
        return ChunkObs(snapshots=self.snapshots[rows], instructions=instructions, proprio=self.proprio[rows])

    @staticmethod
    def joined(parts: Sequence["ChunkObs"]) -> "ChunkObs":
        """All of `parts`, one after the other."""
        return ChunkObs(
            snapshots=np.concatenate([part.snapshots for part in parts]),
            instructions=tuple(instruction for part in parts for instruction in part.instructions),
            proprio=np.concatenate([part.proprio for part in parts]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkStep:
    """What came of one chunk of L actions, in N envs. An env whose episode ends leaves the rest of its chunk out."""

    obs: ChunkObs
    """Of the moment after the chunk's last env step."""
    snapshots: FloatArray
    """[N, L, S] after each env step; the last one is repeated where steps were left out."""
    steps: NDArray[np.int64]
    """[N] env steps that were run, 1 to L."""
    env_rewards: FloatArray
    """[N, L] true rewards; 0 where steps were left out."""
    success: NDArray[np.bool_]
    """[N] whether the env's own success test held at any step of the chunk."""
    success_at_end: NDArray[np.bool_]
    """[N] whether it held after the chunk's last env step."""
    progress: FloatArray
    """[N] in [0, 1], the simulator's truth after the chunk."""
    terminated: NDArray[np.bool_]
    """[N] the episode ended for good."""
    truncated: NDArray[np.bool_]
    """[N] the time limit was reached."""

    @property
    def ended(self) -> NDArray[np.bool_]:
        """[N] whether no further chunk may follow."""
        return self.terminated | self.truncated
