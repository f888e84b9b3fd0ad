"""Nouns that travel between rooms: frozen records of numpy arrays, and nothing that acts.

Shape letters, used in every docstring of the project:
B batch, T steps of an episode, L steps of a segment, K ensemble members, G group, N any count, D obs, A action,
S snapshot, H and W pixels. Left and right name the two sides of a comparison; `p_right` is always the probability
that the right side is the better one.
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
Frames = NDArray[np.uint8]
"""Pictures, [N, H, W, 3] RGB."""


class Status(StrEnum):
    """How a question to a judge ended. The four are counted apart and never folded into one another."""

    OK = "ok"
    """The judge chose (a comparison) or gave a number (a score)."""
    NO_PREFERENCE = "no_preference"
    """The judge answered that it sees no difference or cannot tell."""
    INVALID = "invalid"
    """The judge answered something that could not be read."""
    FAILED = "failed"
    """There was no answer: an outage, a deadline, a refused request."""


class Label(StrEnum):
    """Which side of a comparison is closer to the goal."""

    LEFT = "left"
    RIGHT = "right"
    TIE = "tie"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """Where an answer comes from: two answers may share a cache entry only when their stamps are equal."""

    judge: str
    """Backend and model, e.g. `transformers:Qwen/Qwen3-VL-8B-Instruct`."""
    revision: str
    """Commit or digest of the weights; empty when unknown."""
    prompt: str
    """Name and version of the prompt, e.g. `two_stage/1`."""
    decoding: str
    """Everything that changes the answer at fixed weights, e.g. `temperature=0 max_new_tokens=256 max_pixels=90000`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Two short clips and the goal they are judged by: what a judge is asked."""

    goal: str
    """Fills the one slot of the prompt, e.g. `open the drawer`."""
    left: Frames
    """[L, H, W, 3]; L is 1 when single pictures are compared."""
    right: Frames
    """[L, H, W, 3]."""
    goal_picture: Frames | None = None
    """[1, H, W, 3] the scene with the goal reached, where the judge is to be shown one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """One clip and the goal it is scored by."""

    goal: str
    frames: Frames
    """[L, H, W, 3]."""
    goal_picture: Frames | None = None
    """[1, H, W, 3] the scene with the goal reached, where the judge is to be shown one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What an answer cost, where the backend says so."""

    tokens_in: int
    """Tokens of prompt and pictures."""
    tokens_out: int
    """Tokens written."""
    cost_usd: float | None = None
    """None where nobody charges, or the price is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A judge's or teacher's answer to one comparison.

    `label` is left or right when `status` is ok, tie when it is no_preference, and None otherwise.
    """

    status: Status
    label: Label | None
    stamp: Stamp
    probabilities: tuple[float, float, float] | None = None
    """Of left, right, tie, summing to 1; None when the backend cannot say."""
    text: str = ""
    """The raw answer, untrusted."""
    latency_s: float = 0.0
    usage: Usage | None = None
    question: str = field(default="", compare=False)
    """Content address of what was asked, given by the label store that keeps the answer; empty where none does."""

    def __post_init__(self) -> None:
        decided = self.label in (Label.LEFT, Label.RIGHT)
        if decided != (self.status is Status.OK) or (self.label is Label.TIE) != (self.status is Status.NO_PREFERENCE):
            raise ValueError(f"label {self.label!r} does not go with status {self.status!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A judge's answer about one clip."""

    status: Status
    value: float | None
    """In [0, 1]; None unless status is ok."""
    stamp: Stamp
    text: str = ""
    latency_s: float = 0.0
    usage: Usage | None = None
    question: str = field(default="", compare=False)
    """As of a `Verdict`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transitions:
    """A batch of single steps."""

    obs: FloatArray
    """[B, D] before the action."""
    actions: FloatArray
    """[B, A] in [-1, 1]."""
    next_obs: FloatArray
    """[B, D] after the action."""
    terminated: FloatArray
    """[B] 1 where the episode ended for good (a time limit is not an end)."""
    env_rewards: FloatArray
    """[B] the env's true reward. For metrics and oracle teachers only."""
    success: FloatArray
    """[B] 1 where the env's own success test held after the action. For the sparse reward only."""
    snapshots: FloatArray
    """[B, S] of the state after the action; a World can draw it."""

    def part(self, chosen: NDArray[np.bool_]) -> "Transitions":
        """Those steps where `chosen` `[B]` is true."""
        return Transitions(**{column.name: getattr(self, column.name)[chosen] for column in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One episode of T steps. Row t of every array belongs to step t; snapshots show the state *after* the step."""

    obs: FloatArray
    """[T, D] before each action."""
    actions: FloatArray
    """[T, A]."""
    next_obs: FloatArray
    """[T, D] after each action."""
    env_rewards: FloatArray
    """[T]."""
    snapshots: FloatArray
    """[T, S]."""
    progress: FloatArray
    """[T] the simulator's progress towards the goal in [0, 1]: the truth that labels are checked against."""
    success: NDArray[np.bool_]
    """[T] the env's own success test."""
    terminated: bool
    """Whether the last step ended the episode for good."""

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in
                   ("obs", "actions", "next_obs", "env_rewards", "snapshots", "progress", "success")}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"all arrays of a trajectory need the same number of steps, got {lengths}")

    def __len__(self) -> int:
        return len(self.env_rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """L consecutive steps of one episode."""

    obs: FloatArray
    """[L, D]."""
    actions: FloatArray
    """[L, A]."""
    next_obs: FloatArray
    """[L, D]."""
    snapshots: FloatArray
    """[L, S]."""
    env_rewards: FloatArray
    """[L]."""
    progress: FloatArray
    """[L]."""

    def __len__(self) -> int:
        return len(self.env_rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two segments of equal length that a teacher is asked to compare."""

    left: Segment
    right: Segment

    def __post_init__(self) -> None:
        if len(self.left) != len(self.right):
            raise ValueError(f"both segments need the same length, got {len(self.left)} and {len(self.right)}")
