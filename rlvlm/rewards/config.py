"""Which reward a run learns from; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """Where the reward comes from."""

    source: Literal["preference", "environment", "sparse", "novelty"] = "preference"
    """preference: learned from a teacher's comparisons; environment: the true reward; sparse: the success flag;
    novelty: state entropy alone."""
    teacher: Literal[
        "judge", "oracle", "mistake", "stochastic", "skip", "equal", "myopic", "simulated", "random"
    ] = "judge"
    """judge: the VLM; oracle: compares true returns; mistake, stochastic, skip, equal, myopic: B-Pref's, each with one
    human weakness; simulated: with those of feedback.simulated; random: a coin."""
    model: Literal["image", "state"] = "image"
    """What the learned reward looks at: pictures or observation and action."""
