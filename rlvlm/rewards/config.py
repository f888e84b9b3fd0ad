"""Which reward a run learns from; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """Where the reward comes from."""

    source: Literal["preference", "judged", "environment", "sparse", "novelty"] = "preference"
    """preference: learned from a teacher's comparisons; judged: the judge's score of each picture, as it stands;
    environment: the true reward; sparse: the success flag; novelty: state entropy alone."""
    teacher: Literal[
        "judge", "oracle", "mistake", "stochastic", "skip", "equal", "myopic", "simulated", "random"
    ] = "judge"
    """judge: the VLM; oracle: compares true returns; mistake, stochastic, skip, equal, myopic: B-Pref's, each with one
    human weakness; simulated: with those of feedback.simulated; random: a coin."""
    model: Literal["image", "state"] = "image"
    """What the learned reward looks at: pictures or observation and action."""

    @property
    def asks_judge(self) -> bool:
        """Whether a VLM is asked at all."""
        return self.source == "judged" or (self.source == "preference" and self.teacher == "judge")
