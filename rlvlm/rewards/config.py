"""Which reward a run learns from; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass
from typing import Literal

_SCORERS = ("judge", "oracle", "random")


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """Where the reward comes from."""

    source: Literal["preference", "score", "judged", "environment", "sparse", "novelty"] = "preference"
    """preference: learned from a teacher's comparisons; score: learned from a teacher's scores of single pictures;
    judged: the judge's score of each picture, as it stands; environment: the true reward; sparse: the success flag;
    novelty: state entropy alone."""
    teacher: Literal[
        "judge",
        "oracle",
        "progress",
        "mistake",
        "stochastic",
        "skip",
        "equal",
        "myopic",
        "simulated",
        "published",
        "measured",
        "random",
    ] = "judge"
    """judge: the VLM; oracle: compares true returns, or gives the true progress as score; progress: compares true
    progress; mistake, stochastic, skip, equal, myopic: B-Pref's, each with one human weakness; simulated: with those of
    feedback.simulated; published: right, wrong or undecided as often as the paper's VLM was on this task; measured: as
    feedback.measured says; random: a coin, or a die. Scores come from judge, oracle or random."""
    model: Literal["image", "resnet18", "state"] = "image"
    """What the learned reward looks at. image: pictures, by a small CNN; resnet18: pictures, by a ResNet-18; state:
    observation and action."""

    def __post_init__(self) -> None:
        if self.source == "score" and self.teacher not in _SCORERS:
            raise ValueError(
                f"reward.teacher {self.teacher} compares and gives no scores; reward.source score needs "
                f"one of {', '.join(_SCORERS)}"
            )

    @property
    def is_learned(self) -> bool:
        """Whether a reward model is fitted to a teacher's answers."""
        return self.source in ("preference", "score")

    @property
    def asks_judge(self) -> bool:
        """Whether a VLM is asked at all."""
        return self.source == "judged" or (self.is_learned and self.teacher == "judge")
