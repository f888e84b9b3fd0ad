"""Turns and episodes of envs that are talked to: an image and words in, text out."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a player is given when it is its turn."""

    snapshot: FloatArray
    """[S] everything that can change the image; the env can draw it."""
    prompt: str
    """The user's words of this turn, without any mark for the image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a player wrote, and what the env read in it."""

    text: str
    """As it was written; untrusted."""
    thought: str
    """The members of the reply's JSON object that stand before its action, as written; empty where there are none."""
    action: int | None
    """Index into the env's `action_names`; None: nothing could be read, or the action is not legal now."""
    action_span: tuple[int, int] | None
    """First and one past the last character of `text` that make up the action's value, its quotes left out; None where
    there is no such value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnEpisode:
    """One whole episode of T turns. Entry t belongs to turn t; success and progress hold after its reply."""

    task: str
    seed: int
    """Of the `reset` that the episode began with."""
    snapshots: FloatArray
    """[T + 1, S]: before each reply, and after the last."""
    prompts: tuple[str, ...]
    """T of them."""
    replies: tuple[Reply, ...]
    """T of them."""
    env_rewards: FloatArray
    """[T]."""
    success: NDArray[np.bool_]
    """[T] whether the env's own success test held after the reply."""
    progress: FloatArray
    """[T] how near to success, in [0, 1]."""
    terminated: bool
    """Whether the last reply ended the episode for good; a time limit only cuts it."""

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name)) for name in ("prompts", "replies", "env_rewards", "success", "progress")
        }
        if set(lengths.values()) != {len(self.snapshots) - 1}:
            raise ValueError(f"T + 1 = {len(self.snapshots)} snapshots need T of everything else, got {lengths}")

    def __len__(self) -> int:
        return len(self.replies)
