"""The one record of an episode for policies that answer in tokens, by text or by action chunks.

It is what rollouts give, labellers fill, estimators read, learners shard and pages show. Letters: S env steps so far,
T turns of this piece (a turn is a reply or a chunk), N tokens of an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray
from rlvlm.core.turns import IntArray, Reply


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """What a policy is given before each of M answers. Images are keys: equal keys look the same."""

    images: tuple[bytes, ...]
    texts: tuple[str, ...]
    """Prompts or instructions."""
    proprio: FloatArray
    """[M, P] what a robot feels of itself, in the env's units; P is 0 where there is none."""
    snapshots: FloatArray
    """[M, D] from which an env can draw the images."""

    def __post_init__(self) -> None:
        if not len(self.images) == len(self.texts) == len(self.proprio) == len(self.snapshots):
            raise ValueError("images, texts, proprio and snapshots need one entry per observation")

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, rows: Sequence[int]) -> "Observations":
        """Those of `rows`, in their order."""
        return Observations(
            images=tuple(self.images[row] for row in rows),
            texts=tuple(self.texts[row] for row in rows),
            proprio=self.proprio[list(rows)],
            snapshots=self.snapshots[list(rows)],
        )

    @staticmethod
    def joined(parts: Sequence["Observations"]) -> "Observations":
        """All of `parts`, one after the other."""
        return Observations(
            images=tuple(image for part in parts for image in part.images),
            texts=tuple(text for part in parts for text in part.texts),
            proprio=np.concatenate([part.proprio for part in parts]),
            snapshots=np.concatenate([part.snapshots for part in parts]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEpisode:
    """A whole episode, or the piece of one that was played between two updates.

    What an env shows (`snapshots`, `env_rewards`, `replies`) is of the whole episode so far; what is learned from is of
    the T turns of this piece. A demonstration, which nobody's policy played, has no tokens, log-probs, values and
    versions.
    """

    task: str
    seed: int
    """Of the reset that it began with, or the number of its initial state."""
    group: int = 0
    """Episodes of one group began alike."""
    slot: int = 0
    """Place among the envs that were played side by side; pieces of one env are not independent."""
    played_at: IntArray
    """[T] number of the round of its rollout in which each turn was played; rows of an update are in this order."""
    obs: Observations
    """T + 1: before each answer, and what the last one led to."""
    snapshots: FloatArray
    """[S + 1, D] at the start and after each env step."""
    steps: IntArray
    """[T] env steps that came of each turn: 1 of a reply, those of a chunk that were run."""
    tokens: tuple[IntArray, ...]
    """T answers of N tokens each: a reply's ids, an action head's action, or the bins of a chunk."""
    log_probs: tuple[FloatArray, ...]
    """T times [N] when they were sampled."""
    masks: tuple[NDArray[np.bool_], ...]
    """T times [N] tokens that are learned from: drawn, and of steps that were run."""
    actions: tuple[NDArray[np.bool_], ...] = ()
    """T times [N] tokens that make the action; all others are a thought. Empty: all are."""
    values: FloatArray
    """[T] a critic's, before each answer; 0 without one."""
    versions: IntArray
    """[T] of the weights that answered."""
    replies: tuple[Reply, ...] = ()
    """S of them, as the env read them; empty of chunks."""
    env_rewards: FloatArray
    """[S] true rewards."""
    success: NDArray[np.bool_]
    """[S] whether the env's own success test held after each step; of chunks after its last step or before."""
    progress: FloatArray
    """[S] in [0, 1], the simulator's; NaN between the ends of chunks."""
    gains: FloatArray
    """[T] by how much each turn brought success nearer, below 0 for farther: in turns of the expert where they are
    known, in progress elsewhere."""
    action_names: tuple[str, ...] = ()
    """[T] name of the action that was read in each reply, empty where none was; empty of chunks."""
    goals: tuple[str, ...]
    """[T] the goal of each turn, for a judge."""
    is_over: bool
    """Whether the episode ended, for whatever reason, with this piece."""
    terminated: bool
    """Whether it ended for good; a time limit only cuts it."""
    is_undone: bool = False
    """Whether success held and no longer does at the end."""
    rewards: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """[T] what is learned from; a labeller gives it. NaN where nobody could say it."""

    def __len__(self) -> int:
        """T."""
        return len(self.steps)

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.env_rewards)

    @property
    def first_step(self) -> int:
        """Env steps before this piece."""
        return self.num_steps - int(self.steps.sum())

    @property
    def ends(self) -> IntArray:
        """[T] place in `snapshots` of the state after each turn."""
        return self.first_step + np.cumsum(self.steps)

    @property
    def turn_rewards(self) -> FloatArray:
        """[T] true rewards, summed over each turn's env steps."""
        # turn t has the rewards from `ends - steps` to `ends`, and the next turn begins where it ends
        return np.add.reduceat(self.env_rewards, self.ends - self.steps).astype(np.float32)

    @property
    def is_success(self) -> bool:
        """Whether the env's own test ever held."""
        return bool(self.success.any())

    @property
    def env_return(self) -> float:
        """Sum of the true rewards."""
        return float(self.env_rewards.sum())
