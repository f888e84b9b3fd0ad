"""Questions to a judge, and its answers."""

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rlvlm.core.steps import Frames


class Status(StrEnum):
    """Outcome of a question to a judge. The four are counted separately and never merged."""

    OK = "ok"
    """The judge chose (a comparison) or gave a number (a score)."""
    NO_PREFERENCE = "no_preference"
    """The judge answered that it sees no difference or cannot tell."""
    INVALID = "invalid"
    """The judge's answer could not be read."""
    FAILED = "failed"
    """There was no answer: an outage, a deadline, a refused request."""

    @classmethod
    def of(cls, answer: "Label | float | None") -> "Status":
        """Returns the status for an answer as read; None is unreadable."""
        return cls.INVALID if answer is None else cls.NO_PREFERENCE if answer is Label.TIE else cls.OK


class Label(StrEnum):
    """Side of a comparison that is closer to the goal."""

    LEFT = "left"
    RIGHT = "right"
    TIE = "tie"

    @classmethod
    def of(cls, left: float, right: float) -> "Label":
        """Returns the side with the larger value."""
        return cls.LEFT if left > right else cls.RIGHT if right > left else cls.TIE

    @property
    def swapped(self) -> "Label":
        """The same answer with left and right exchanged."""
        return {Label.LEFT: Label.RIGHT, Label.RIGHT: Label.LEFT}.get(self, self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """Origin of an answer: two answers may share a cache entry only if their stamps are equal."""

    judge: str
    """Backend and model, e.g. `transformers:Qwen/Qwen3-VL-8B-Instruct`."""
    revision: str
    """Commit or digest of the weights; empty if unknown."""
    prompt: str
    """Name and version of the prompt, e.g. `two_stage/1`."""
    decoding: str
    """Everything that changes the answer at fixed weights, e.g. `temperature=0 max_new_tokens=256 max_pixels=90000`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A question to a judge: two short clips and the goal by which they are compared."""

    goal: str
    """Goal, for the slot of the prompt, e.g. `open the drawer`."""
    left: Frames
    """[L, H, W, 3] uint8; L is 1 if single images are compared."""
    right: Frames
    """[L, H, W, 3] uint8."""
    goal_picture: Frames | None = None
    """[1, H, W, 3] image of the reached goal to show; None shows none."""

    @property
    def swapped(self) -> "Query":
        """The same question with left and right exchanged."""
        return replace(self, left=self.right, right=self.left)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """One clip and the goal by which it is scored."""

    goal: str
    frames: Frames
    """[L, H, W, 3] uint8."""
    goal_picture: Frames | None = None
    """[1, H, W, 3] image of the reached goal to show; None shows none."""
    action: str = ""
    """Action between the first frame and the last, in a few plain words; empty if it is not described."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Cost of an answer, if the backend reports it."""

    tokens_in: int
    """Tokens of prompt and images."""
    tokens_out: int
    """Tokens of the reply."""
    cost_usd: float | None = None
    """Cost in USD; None if it is free, or the price is unknown."""

    def __add__(self, other: "Usage") -> "Usage":
        """Returns the sum of both; its price is unknown if either price is."""
        costs = (self.cost_usd, other.cost_usd)
        return Usage(
            tokens_in=self.tokens_in + other.tokens_in,
            tokens_out=self.tokens_out + other.tokens_out,
            cost_usd=None if costs[0] is None or costs[1] is None else costs[0] + costs[1],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A judge's or teacher's answer to one comparison.

    `label` is left or right if `status` is ok, tie if it is no_preference, and None otherwise.
    """

    status: Status
    label: Label | None
    stamp: Stamp
    probabilities: tuple[float, float, float] | None = None
    """Probabilities of left, right and tie, summing to 1; None if the backend gives none."""
    text: str = ""
    """Raw answer, untrusted."""
    latency_s: float = 0.0
    usage: Usage | None = None
    question: str = field(default="", compare=False)
    """Content address of the question, set by the label store that keeps the answer; else empty."""
    votes: tuple[str, ...] = ()
    """Labels of the answers that were put to the vote, for the query's own order; empty for unreadable ones. No
    entries for a single answer."""

    @property
    def is_split(self) -> bool:
        """Whether one vote is for the left side and another for the right one."""
        return {Label.LEFT, Label.RIGHT} <= set(self.votes)

    def __post_init__(self) -> None:
        # a failure must never look like a tie, nor a tie like a choice
        decided = self.label in (Label.LEFT, Label.RIGHT)
        if decided != (self.status is Status.OK) or (self.label is Label.TIE) != (self.status is Status.NO_PREFERENCE):
            raise ValueError(f"label {self.label!r} does not go with status {self.status!r}")
        if self.probabilities is not None:  # a user's own judge often gives NumPy numbers, which no file accepts
            left, right, tie = (float(share) for share in self.probabilities)
            object.__setattr__(self, "probabilities", (left, right, tie))


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A judge's answer about one clip; one whose value is no number cannot be read, and is invalid without it."""

    status: Status
    value: float | None
    """Score in [0, 1]; None unless status is ok."""
    stamp: Stamp
    text: str = ""
    latency_s: float = 0.0
    usage: Usage | None = None
    question: str = field(default="", compare=False)
    """Content address of the question, as in `Verdict`."""
    num_frames: int | None = field(default=None, compare=False)
    """Number of the clip's frames shown to the judge; None if unknown."""

    def __post_init__(self) -> None:
        if self.value is None:
            return
        value = float(self.value)  # see `Verdict`
        is_number = math.isfinite(value)
        object.__setattr__(self, "value", value if is_number else None)
        if not is_number:
            object.__setattr__(self, "status", Status.INVALID)
