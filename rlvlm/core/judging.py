"""What a judge is asked, and what it answers."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from rlvlm.core.steps import Frames


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

    @classmethod
    def of(cls, answer: "Label | float | None") -> "Status":
        """How a question ended whose answer was read so; None could not be read."""
        return cls.INVALID if answer is None else cls.NO_PREFERENCE if answer is Label.TIE else cls.OK


class Label(StrEnum):
    """Which side of a comparison is closer to the goal."""

    LEFT = "left"
    RIGHT = "right"
    TIE = "tie"

    @classmethod
    def of(cls, left: float, right: float) -> "Label":
        """The side that is worth more."""
        return cls.LEFT if left > right else cls.RIGHT if right > left else cls.TIE

    @property
    def swapped(self) -> "Label":
        """The same answer where left and right are exchanged."""
        return {Label.LEFT: Label.RIGHT, Label.RIGHT: Label.LEFT}.get(self, self)


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
    """[L, H, W, 3]; L is 1 when single images are compared."""
    right: Frames
    """[L, H, W, 3]."""
    goal_picture: Frames | None = None
    """[1, H, W, 3] the scene with the goal reached, where the judge is to be shown one."""

    @property
    def swapped(self) -> "Query":
        """The same question with left and right exchanged."""
        return replace(self, left=self.right, right=self.left)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """One clip and the goal it is scored by."""

    goal: str
    frames: Frames
    """[L, H, W, 3]."""
    goal_picture: Frames | None = None
    """[1, H, W, 3] the scene with the goal reached, where the judge is to be shown one."""
    action: str = ""
    """What was done between the first frame and the last, in a few plain words; empty where it is not described."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What an answer cost, where the backend says so."""

    tokens_in: int
    """Tokens of prompt and images."""
    tokens_out: int
    """Tokens written."""
    cost_usd: float | None = None
    """None where it is free, or the price is unknown."""

    def __add__(self, other: "Usage") -> "Usage":
        """Usage of both together; its price is unknown where either price is."""
        costs = (self.cost_usd, other.cost_usd)
        return Usage(
            tokens_in=self.tokens_in + other.tokens_in,
            tokens_out=self.tokens_out + other.tokens_out,
            cost_usd=None if costs[0] is None or costs[1] is None else costs[0] + costs[1],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A judge's or teacher's answer to one comparison.

    `label` is left or right when `status` is ok, tie when it is no_preference, and None otherwise.
    """

    status: Status
    label: Label | None
    stamp: Stamp
    probabilities: tuple[float, float, float] | None = None
    """Probabilities of left, right, tie, summing to 1; None when the backend cannot say."""
    text: str = ""
    """The raw answer, untrusted."""
    latency_s: float = 0.0
    usage: Usage | None = None
    question: str = field(default="", compare=False)
    """Content address of what was asked, given by the label store that keeps the answer; empty where none does."""
    votes: tuple[str, ...] = ()
    """Labels of the answers that were put to the vote, about the query as it was asked; empty for one that could not be
    read. None where there was a single answer."""

    @property
    def is_split(self) -> bool:
        """Whether one vote named the left side and another the right one."""
        return {Label.LEFT, Label.RIGHT} <= set(self.votes)

    def __post_init__(self) -> None:
        # a failure must never look like a tie, nor a tie like a choice
        decided = self.label in (Label.LEFT, Label.RIGHT)
        if decided != (self.status is Status.OK) or (self.label is Label.TIE) != (self.status is Status.NO_PREFERENCE):
            raise ValueError(f"label {self.label!r} does not go with status {self.status!r}")
        if self.probabilities is not None:  # of a judge of one's own they are often NumPy's, which no file takes
            left, right, tie = (float(share) for share in self.probabilities)
            object.__setattr__(self, "probabilities", (left, right, tie))


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
    num_frames: int | None = field(default=None, compare=False)
    """Frames of the clip that the judge was shown; None where it does not say."""

    def __post_init__(self) -> None:
        if self.value is not None:  # see `Verdict`
            object.__setattr__(self, "value", float(self.value))
