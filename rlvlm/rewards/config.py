"""Which reward a run learns from; imports nothing heavy so that the command line starts at once."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

SOURCES = ("preference", "score", "judged", "environment", "success", "novelty")
"""Sources of steps' rewards by their names, each of which means the same in all algorithms."""
TEACHERS = (
    *("judge", "oracle", "progress", "mistake", "stochastic", "skip", "equal", "myopic", "simulated"),
    *("published", "measured", "random"),
)
_SCORERS = ("judge", "oracle", "random")
_FORMER = {"sparse": "success"}


def check_name(setting: str, value: str, names: Iterable[str]) -> None:
    """Passes where `value` is one of `names`, or refers to an object of the user's own.

    Raises:
        ValueError: says which is meant.
    """
    names = list(names)
    if value in names or ":" in value:
        return
    if value in _FORMER:
        raise ValueError(f"{setting} {value} is called {_FORMER[value]} now")
    near = get_close_matches(value, names, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"{setting} is {value!r}; {hint}use one of {', '.join(names)}, or my_file:NAME of your own")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorationConfig:
    """What draws the agent on to where it has not been, once a learned reward is in force.

    Source: Liang et al. 2022 (RUNE), arXiv:2205.12401, sec. 4: reward + beta_t bonus, with beta_t = beta_0 (1 - rho)^t.
    Departures: t counts from the step at which the learned reward takes over, since before that novelty is the whole
    reward; and the bonus may be novelty, which sees what the images of the reward model hide, such as the robot.
    """

    bonus: Literal["none", "disagreement", "novelty"] = "none"
    """none: the learned reward alone; disagreement: standard deviation of the ensemble's rewards (RUNE); novelty:
    distance to the states visited before, as before the learned reward takes over."""
    weight: float = 0.05
    """beta_0, >= 0: reward per unit of the bonus at first (the paper's value, for rewards within [-1, 1]; here they lie
    within [-3, 3]). Novelty is in units of its own standard deviation."""
    decay: float = 1e-4
    """rho, in [0, 1]: share of the weight that is lost with each env step (the paper's lie from 1e-5 to 1e-3)."""

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"reward.exploration.weight must be >= 0, got {self.weight}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"reward.exploration.decay must be in [0, 1], got {self.decay}; 0 keeps the weight")

    def weight_after(self, num_steps: int) -> float:
        """beta_t, `num_steps` env steps after the learned reward took over; 0 without a bonus."""
        return 0.0 if self.bonus == "none" else self.weight * (1 - self.decay) ** num_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """Where the reward comes from."""

    source: str = "preference"
    """preference: learned from a teacher's comparisons; score: learned from a teacher's scores of single images;
    judged: the judge's score of each image, as it stands; environment: the true reward; success: 1 where the env's
    own test holds; novelty: state entropy alone; my_file:NAME: a `RewardSource` of your own, or a function of
    (images, goal) that gives scores."""
    teacher: str = "judge"
    """judge: the VLM; oracle: compares true returns, or gives the true progress as score; progress: compares true
    progress; mistake, stochastic, skip, equal, myopic: B-Pref's, each with one human weakness; simulated: with those of
    feedback.simulated; published: right, wrong or undecided as often as the paper's VLM was on this task; measured: as
    feedback.measured says; random: random labels, the negative control; my_file:NAME: a `Teacher` of your own. Scores
    come from judge, oracle, random or your own."""
    model: Literal["image", "resnet18", "state"] = "image"
    """What the learned reward looks at. image: images, by a small CNN; resnet18: images, by a ResNet-18; state:
    observation and action."""
    exploration: ExplorationConfig = field(default_factory=ExplorationConfig)
    """What is added to a learned reward for a while, so that exploring does not end when it takes over."""

    def __post_init__(self) -> None:
        check_name("reward.source", self.source, SOURCES)
        check_name("reward.teacher", self.teacher, TEACHERS)
        if self.source == "score" and self.teacher not in _SCORERS and ":" not in self.teacher:
            raise ValueError(
                f"reward.teacher {self.teacher} compares and gives no scores; reward.source score needs "
                f"one of {', '.join(_SCORERS)}"
            )
        if self.teacher != "judge" and not self.is_learned:
            raise ValueError(
                f"reward.teacher {self.teacher} has no effect with reward.source {self.source}, which learns from "
                "no teacher; leave one of them out"
            )
        if self.exploration.bonus != "none" and not self.is_learned:
            raise ValueError(
                f"reward.exploration.bonus {self.exploration.bonus} is added to a learned reward, and reward.source "
                f"{self.source} learns none; leave one of them out"
            )

    @property
    def is_learned(self) -> bool:
        """Whether a reward model is fitted to a teacher's answers."""
        return self.source in ("preference", "score")

    @property
    def asks_judge(self) -> bool:
        """Whether a VLM is asked at all."""
        return self.source == "judged" or (self.is_learned and self.teacher == "judge")


FALSE_POSITIVES = 0.2
"""Share of failures that the teacher biased takes for successes, unless another is set."""
ScoreTeacher = Literal["judge", "random", "biased", "progress"]
"""Who scores turns and episodes. judge: the VLM; random: random scores, the negative control; biased: the truth,
but for a share of failures that it takes for successes, the control that the monitor must catch; progress: the
simulator's progress with noise, a judge as good as one wants, to study what graded scores teach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig:
    """How a judge that rewards is watched. What is measured never reaches the policy."""

    controls: int = 4
    """Scored turns or episodes of each update that are shown again twice: backwards, and with a goal that is not
    theirs; 0 shows none."""
    window: int = 400
    """Episodes that the newest figures are about; the first so many are what they are compared with."""
    most_false_positives: float = 0.1
    """Share of failures, in [0, 1], that may be called successes before there is an alarm."""
    on_alarm: Literal["warn", "stop"] = "warn"
    """warn: say so in the log, the panel and the run's pages; stop: end the run too, with exit code 5."""
    preflight: int = 32
    """Known successes, and as many known failures, that the judge has to tell apart before a run starts; 0 asks for
    nothing."""
    least_auc: float = 0.75
    """Least area under the curve of that test, in [0.5, 1]."""

    def __post_init__(self) -> None:
        if min(self.controls, self.preflight) < 0 or self.window < 20:
            got = f"{self.controls}, {self.preflight} and {self.window}"
            raise ValueError(f"need monitor.controls and preflight >= 0 and window >= 20, got {got}")
        if not 0 <= self.most_false_positives <= 1 or not 0.5 <= self.least_auc <= 1:
            got = f"{self.most_false_positives} and {self.least_auc}"
            raise ValueError(f"need most_false_positives in [0, 1] and least_auc in [0.5, 1], got {got}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig:
    """Weights of the sources that are added up; each is logged raw, too."""

    environment: float = 0.0
    """Of the true reward, in its own units."""
    judged: float = 0.0
    """Of the judge's score, as a number in [-1, 1]."""
    novelty: float = 0.0
    """Of the novelty of what was done, in [0, 1]."""

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the sources whose weight is not 0."""
        return tuple(name for name in ("environment", "judged", "novelty") if getattr(self, name))


def check_scoring(section: str, num_frames: int, neutral: float, teacher: ScoreTeacher, false_positives: float) -> None:
    """Raises ValueError for frames, a neutral score or a bias that make no sense; `section` names their place."""
    if num_frames < 2:
        raise ValueError(f"{section}.num_frames must be >= 2, got {num_frames}")
    if not 0 <= neutral <= 1 or not 0 <= false_positives <= 1:
        raise ValueError(f"{section}.neutral and false_positives must be in [0, 1], got {neutral}, {false_positives}")
    if false_positives != FALSE_POSITIVES and teacher != "biased":
        raise ValueError(f"{section}.false_positives goes with the teacher biased, got {false_positives} for {teacher}")
