"""Configuration of preference learning; imports nothing heavy so that the command line starts at once."""

import math
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedTeacherConfig:
    """The weaknesses of a teacher who knows the true reward; by default there are none."""

    mistake: float = 0.0
    """Probability that an answer is turned round, in [0, 1]."""
    beta: float = math.inf
    """Rationality per unit of true return, > 0: right is preferred with probability sigmoid(beta * gain); inf always
    prefers the larger return."""
    gamma: float = 1.0
    """Memory: each step of a segment weighs this share of the next one, in (0, 1]."""
    skip: float = 0.0
    """A query is skipped unless one side is worth more than this share of an average segment, >= 0."""
    equal: float = 0.0
    """Sides whose returns differ by less than this share of an average segment's are no preference, >= 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.mistake <= 1:
            raise ValueError(f"feedback.simulated.mistake is a probability in [0, 1], got {self.mistake}")
        if not self.beta > 0:
            raise ValueError(f"feedback.simulated.beta must be > 0, got {self.beta}; inf takes the larger return")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"feedback.simulated.gamma must be in (0, 1], got {self.gamma}; 1 forgets nothing")
        for name in ("skip", "equal"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"feedback.simulated.{name} is a share >= 0, got {getattr(self, name)}")


BPREF_TEACHERS = {
    "mistake": SimulatedTeacherConfig(mistake=0.1),
    "stochastic": SimulatedTeacherConfig(beta=1.0),
    "skip": SimulatedTeacherConfig(skip=0.1),
    "equal": SimulatedTeacherConfig(equal=0.1),
    "myopic": SimulatedTeacherConfig(gamma=0.9),
}
"""The imperfect teachers of Lee et al. 2021 (B-Pref), arXiv:2111.03026: one weakness each, at its published value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackConfig:
    """When the teacher is asked, and about what."""

    first_step: int = 3_000
    """Env step of the first session; before it the agent explores by novelty."""
    every_steps: int = 2_000
    """Env steps between sessions."""
    queries: int = 100
    """Queries per session."""
    max_queries: int = 20_000
    """Budget of the whole run: queries asked, answered or not."""
    segment_steps: int = 1
    """Steps per segment, L >= 1; 1 compares single pictures, as the paper does."""
    recent_episodes: int = 100
    """Queries are drawn uniformly from the frames of this many newest episodes."""
    ties: Literal["drop", "equal"] = "drop"
    """drop: answers without preference do not train (the paper); equal: they train as one half."""
    ahead: bool = False
    """Whether the agent learns on while the teacher answers; the answers are then used one session later."""
    simulated: SimulatedTeacherConfig = field(default_factory=SimulatedTeacherConfig)

    def __post_init__(self) -> None:
        for name in ("first_step", "every_steps", "queries", "segment_steps", "recent_episodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"feedback.{name} must be >= 1, got {getattr(self, name)}")
        if self.max_queries < 0:
            raise ValueError(f"feedback.max_queries must be >= 0, got {self.max_queries}")


def simulated_config(teacher: str, feedback: FeedbackConfig) -> SimulatedTeacherConfig | None:
    """The weaknesses of the simulated teacher that `RewardConfig.teacher` names; None for every other teacher.

    Raises:
        ValueError: it skips queries, which would then train as ties.
    """
    config = feedback.simulated if teacher == "simulated" else BPREF_TEACHERS.get(teacher)
    if config is not None and config.skip > 0 and feedback.ties == "equal":
        raise ValueError("a teacher that skips queries needs feedback.ties drop, got equal, with which skipped queries "
                         "would train as one half; choose one of the two")
    return config


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelConfig:
    """An ensemble that predicts which side the teacher prefers."""

    picture_px: int = 64
    """Side of the pictures the image model sees, in pixels (300 in the paper)."""
    ensemble: int = 3
    """Members, K >= 1; the reward is their mean."""
    lr: float = 3e-4
    """Adam's step size."""
    batch_size: int = 32
    """Comparisons per gradient step (64 in the paper)."""
    max_epochs: int = 50
    """Passes over all comparisons per session, at most."""
    min_updates: int = 60
    """Gradient steps per session before the fit may stop at `stop_accuracy`, 0 to `max_updates`."""
    max_updates: int = 100
    """Gradient steps per session, at most; bounds a session's time when there are many comparisons."""
    stop_accuracy: float = 0.97
    """A session's fit ends once the members' mean training accuracy of an epoch exceeds this."""

    hold_out_every: int = 5
    """One comparison in this many never trains but tests the fit: rewards stay 0 until they tell held-out labels
    better than a coin would. 0 holds out none and trusts every fit."""

    def __post_init__(self) -> None:
        for name in ("picture_px", "ensemble", "batch_size", "max_epochs", "max_updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"reward_model.{name} must be >= 1, got {getattr(self, name)}")
        if self.hold_out_every < 0 or self.hold_out_every == 1:
            raise ValueError(f"reward_model.hold_out_every must be 0 or >= 2, got {self.hold_out_every}")
        if not 0 <= self.min_updates <= self.max_updates:
            raise ValueError(
                f"need 0 <= reward_model.min_updates <= max_updates, got {self.min_updates} and {self.max_updates}"
            )
        if not 0 < self.stop_accuracy <= 1:
            raise ValueError(f"reward_model.stop_accuracy must be in (0, 1], got {self.stop_accuracy}")
        if self.lr <= 0:
            raise ValueError(f"reward_model.lr must be > 0, got {self.lr}")
