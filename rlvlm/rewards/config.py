"""Which reward a run learns from; imports nothing heavy so that the command line starts at once."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Literal

from rlvlm.core.checks import check_least, check_shares

SOURCES = ("preference", "score", "judged", "environment", "success", "novelty")
"""Sources of steps' rewards by their names, each of which means the same in all algorithms."""
TEACHERS = (
    *("judge", "oracle", "progress", "mistake", "stochastic", "skip", "equal", "myopic", "simulated"),
    *("published", "measured", "random", "human", "mixed"),
)
_SCORERS = ("judge", "oracle", "random")
_PEOPLE = ("human", "mixed")


def check_name(setting: str, value: str, names: Iterable[str]) -> None:
    """Raises unless `value` is one of `names`, or refers to an object of the user's own.

    Raises:
        ValueError: says which is meant.
    """
    names = list(names)
    if value in names or ":" in value:
        return
    near = get_close_matches(value, names, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"{setting} is {value!r}; {hint}use one of {', '.join(names)}, or my_file:NAME of your own")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorationConfig:
    """Exploration bonus for new states, once a learned reward is in force.

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
        check_least(self, "reward.exploration", 0, "weight")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"reward.exploration.decay must be in [0, 1], got {self.decay}; 0 keeps the weight")

    def weight_after(self, num_steps: int) -> float:
        """beta_t, `num_steps` env steps after the learned reward took over; 0 without a bonus."""
        # beta_t = beta_0 (1 - rho)^t
        return 0.0 if self.bonus == "none" else self.weight * (1 - self.decay) ** num_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRewardConfig:
    """Source of the reward."""

    source: str = "preference"
    """preference: learned from a teacher's comparisons; score: learned from a teacher's scores of single images;
    judged: the judge's score of each image, as it is; environment: the true reward; success: 1 where the env's
    own test holds; novelty: state entropy alone; my_file:NAME: a `RewardSource` of your own, or a function of
    (images, goal) that gives scores."""
    teacher: str = "judge"
    """judge: the VLM; oracle: compares true returns, or gives the true progress as score; progress: compares true
    progress; mistake, stochastic, skip, equal, myopic: B-Pref's, each with one human weakness; simulated: with those of
    feedback.simulated; published: right, wrong or undecided as often as the paper's VLM was on this task; measured: as
    feedback.measured says; random: random labels, the negative control; human: a person at the page of `rlvlm labels
    ask`, for whom the run does not wait; mixed: `mixed_judge`, and a person where that one is in doubt; my_file:NAME: a
    `Teacher` of your own. Scores come from judge, oracle, random or your own."""
    mixed_judge: str = "judge"
    """Who answers every query of the teacher mixed before a person is asked about some (feedback.mixed): judge, the
    VLM; or another teacher that answers at once, such as simulated or measured, to try a budget out."""
    model: Literal["image", "resnet18", "state"] = "image"
    """Input of the learned reward. image: images, by a small CNN; resnet18: images, by a ResNet-18; state:
    observation and action."""
    exploration: ExplorationConfig = field(default_factory=ExplorationConfig)
    """A decaying bonus on top of the learned reward, so that exploration continues after it takes over."""

    def __post_init__(self) -> None:
        check_name("reward.source", self.source, SOURCES)
        check_name("reward.teacher", self.teacher, TEACHERS)
        check_name("reward.mixed_judge", self.mixed_judge, (name for name in TEACHERS if name not in _PEOPLE))
        # Settings without effect are refused: a run that ignores a setting looks in a table as if it had used it.
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
    def first_teacher(self) -> str:
        """Who is put every query: `teacher`, or of the teacher mixed its judge."""
        return self.mixed_judge if self.teacher == "mixed" else self.teacher

    @property
    def asks_judge(self) -> bool:
        """Whether a VLM is asked at all."""
        return self.source == "judged" or (self.is_learned and self.first_teacher == "judge")

    @property
    def may_ask_person(self) -> bool:
        """Whether some or all queries are for a person, who answers when there is time."""
        return self.is_learned and self.teacher in _PEOPLE

    def title(self, judge: str, mark: str = "") -> str:
        """Source of the reward, short enough for a legend, e.g. `judge labels, image reward`.

        Args:
            judge: name of the judge, if one is asked.
            mark: stands behind the judge, e.g. that its weights are random.
        """
        if self.source == "judged":
            return f"{judge} score{mark}"
        if not self.is_learned:
            return f"{self.source} reward"
        answers = {"preference": "labels", "score": "scores"}[self.source]
        return f"{self.teacher}{mark} {answers}, {self.model} reward"


FALSE_POSITIVES = 0.2
"""Share of failures that the teacher biased calls successes, unless another is set."""
ScoreTeacher = Literal["judge", "random", "biased", "progress", "measured"]
"""Scorer of turns and episodes. judge: the VLM; random: random scores, the negative control; biased: the truth,
but for a share of failures that it takes for successes, the control that the monitor must catch; progress: the
simulator's progress with noise, a judge of any quality, to study graded scores; measured: scores that
a judge gave in `rlvlm judge-bench` to episodes of such progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig:
    """How a judge that rewards is watched. What is measured never reaches the policy."""

    controls: int = 4
    """Scored turns or episodes of each update that are shown again twice: backwards, and with a goal that is not
    theirs; 0 shows none."""
    window: int = 400
    """Episodes that the newest figures are about; the first so many are what they are compared with."""
    success_threshold: float | None = None
    """A score from here on, in (0, 1], counts as the judge's word that an episode is a success. None: the reward's
    threshold; without one what the preflight finds; else 0.5, and of turns 0.875."""
    max_false_positives: float = 0.1
    """Share of failures, in [0, 1], that may be called successes before there is an alarm."""
    on_alarm: Literal["warn", "stop"] = "warn"
    """warn: say so in the log, the panel and the run's pages; stop: end the run too, with exit code 5."""
    preflight: int = 32
    """Known turns of each kind, or twice as many episodes in all, that the judge has to tell apart before a run starts:
    a small draw of `rlvlm judge-bench TASK`; 0 asks for nothing."""
    min_auc: float = 0.75
    """Least area under the curve of successes against failures among them, in [0.5, 1]; there is an alarm where that
    of the newest episodes surely lies below it."""

    def __post_init__(self) -> None:
        if min(self.controls, self.preflight) < 0 or self.window < 20:
            got = f"{self.controls}, {self.preflight} and {self.window}"
            raise ValueError(f"need monitor.controls and preflight >= 0 and window >= 20, got {got}")
        if self.success_threshold is not None and not 0 < self.success_threshold <= 1:
            raise ValueError(f"monitor.success_threshold must be in (0, 1] or None, got {self.success_threshold}")
        if not 0 <= self.max_false_positives <= 1 or not 0.5 <= self.min_auc <= 1:
            got = f"{self.max_false_positives} and {self.min_auc}"
            raise ValueError(f"need max_false_positives in [0, 1] and min_auc in [0.5, 1], got {got}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig:
    """Weights of the sources that are added up; each is logged raw, too."""

    environment: float = 0.0
    """Weight of the true reward, in its own units."""
    judged: float = 0.0
    """Weight of the judge's score, as a number in [-1, 1]."""
    novelty: float = 0.0
    """Weight of the novelty of the transitions, in [0, 1]."""

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the sources whose weight is not 0."""
        return tuple(name for name in ("environment", "judged", "novelty") if getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRewardConfig:
    """Reward of turns, chunks or episodes; the true reward is kept beside it, for evaluation."""

    source: Literal["environment", "success", "judged", "mixture"] = "environment"
    """environment: the true reward; success: 1 for an episode that succeeds by the env's own test, else 0; judged: a
    judge's score alone; mixture: the weighted sum that `mixture` describes."""
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    teacher: ScoreTeacher = "judge"
    """The scorer, where scores are used."""
    per: Literal["turn", "episode"] = "turn"
    """turn: the utility of each turn or chunk, from the image before it, the action and the image after it
    (`judge.score utility`); episode: one score of the images of the whole episode, given to its last turn."""
    clip: Literal["turn", "growing"] = "turn"
    """For `per turn`, what the judge is shown. growing: the images of the episode so far, with the other forms of
    `judge.score`; a turn's reward is by how much the score rises, so an episode's add up to its last score."""
    is_centred: bool = True
    """Whether scores in [0, 1] become rewards in [-1, 1]."""
    unreadable: float = -1.0
    """Reward of a turn with an unreadable reply: nothing was done that could be judged, so the judge is not asked.
    For `per turn` alone."""
    num_frames: int = 8
    """Images of an episode that the judge is shown at most, >= 2, the first and the last among them."""
    frame_px: int = 224
    """Side of those images, of envs that draw at any size."""
    flip_images: bool = False
    """Whether images are flipped, left to right, before the judge sees them. LIBERO's images are mirrored, as published
    policies want them: what an instruction calls left is on their right. The pocket judges learned them so; any other
    judge should see them as they are."""
    success_weight: float = 0.0
    """Weight of the env's success, >= 0, beside the judge's score of an episode, whose weight is 1; the result is their
    mean. With a judge of progress these are success and an episode's changes of potential, which add up without a
    discount to its last potential less its first, which a group shares. Departure from Ng et al. 1999, whose potential
    is 0 where an episode ends: then all of it would cancel within a group. So the judge does change which policy is
    best."""
    threshold: float | Literal["calibrated"] | None = None
    """Scores from here on count as 1, others as 0; None takes them as they are. calibrated: where the judge told known
    episodes apart best before anything was learned, see `monitor.preflight`."""
    without_answer: Literal["stop", "drop", "neutral"] = "drop"
    """Where the judge has no answer: end the run, leave the episode's turns of this update out (where episodes are
    compared, its whole group), or score it `neutral`. The truth never takes its place."""
    neutral: float = 0.5
    """See `without_answer`; in [0, 1]."""
    fallback_judge: str = ""
    """Name of a running Serve app whose judge is asked where the run's own has no answer; empty: none."""
    false_positives: float = FALSE_POSITIVES
    """For teacher biased: share of failures that it calls successes, in [0, 1]."""
    noise: float = 0.0
    """For teacher progress: standard deviation of its noise, >= 0."""
    measured: str = ""
    """For teacher measured: bench.json of a judge (`rlvlm judge-bench`)."""
    parts: int = 4
    """A rollout of whole episodes is played in so many parts, >= 1: a judge looks at one while the next is played.
    There are fewer where a part would not have a group for each env runner."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def __post_init__(self) -> None:  # noqa: C901 - one rule after the other
        check_least(self, "reward", 2, "num_frames")
        check_least(self, "reward", 1, "frame_px", "parts")
        check_least(self, "reward", 0, "noise", "success_weight")
        check_shares(self, "reward", "neutral", "false_positives")
        # What only a scorer reads. By its field's default: envs in turns and in chunks have another `per`.
        defaults = {field.name: field.default for field in fields(self)}
        of_scorer = ("per", "clip", "teacher", "success_weight", "threshold", "without_answer", "neutral", "parts")
        idle = [] if self.scores else [name for name in of_scorer if getattr(self, name) != defaults[name]]
        threshold = self.threshold
        if self.false_positives != FALSE_POSITIVES and self.teacher != "biased":
            raise ValueError(
                f"reward.false_positives goes with the teacher biased, got {self.false_positives} for {self.teacher}"
            )
        if (self.source == "mixture") != bool(self.mixture.used):
            raise ValueError(
                f"reward.source is {self.source} and reward.mixture weighs {self.mixture.used or 'nothing'}: weights "
                "go with the source mixture, which needs one at least"
            )
        if self.noise and self.teacher != "progress":
            raise ValueError(f"reward.noise goes with the teacher progress, got {self.noise}")
        if (self.teacher == "measured") != bool(self.measured):
            raise ValueError(
                "reward.teacher measured and reward.measured FILE go together, got "
                f"{self.teacher} and {self.measured or 'no file'}"
            )
        if isinstance(threshold, float | int) and not 0 < threshold <= 1:
            raise ValueError(f"reward.threshold must be in (0, 1], calibrated or None, got {threshold}")
        if idle:
            raise ValueError(
                f"reward.{', '.join(idle)} have no effect without scores: set reward.source judged, or mixture "
                "with reward.mixture.judged"
            )
        # it is where the judge tells the preflight's episodes apart best, so there must be some, and a judge
        if threshold == "calibrated" and not (self.asks_judge and self.monitor.preflight):
            raise ValueError("a calibrated threshold needs a judge, and monitor.preflight episodes to calibrate it on")
        if self.fallback_judge and not self.asks_judge:
            raise ValueError("reward.fallback_judge has no effect where no judge is asked")
        if self.without_answer != "neutral" and self.neutral != 0.5:
            raise ValueError("reward.neutral has no effect unless without_answer is neutral")
        # these simulate a judge of episodes: none of them says what a single turn is worth
        if self.teacher in ("biased", "progress", "measured") and self.rates_turns:
            raise ValueError(
                f"the {self.teacher} teacher is about episodes; set reward.per episode or reward.clip growing"
            )
        if self.clip == "growing" and (self.per != "turn" or self.without_answer == "neutral"):
            raise ValueError(
                f"reward.clip growing goes with reward.per turn, got {self.per}, and with reward.without_answer drop "
                f"or stop, got {self.without_answer}: a gain needs both scores"
            )
        if self.success_weight and self.per == "turn":
            raise ValueError("reward.success_weight is beside the score of a whole episode; set reward.per episode")

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each source: those of `mixture`, or the only one."""
        names = ("environment", "success", "judged", "novelty")
        if self.source == "mixture":
            return {name: float(getattr(self.mixture, name, 0.0)) for name in names}
        return {name: float(name == self.source) for name in names}

    @property
    def scores(self) -> bool:
        """Whether a scorer is used."""
        return self.weights["judged"] != 0

    @property
    def rates_turns(self) -> bool:
        """Whether single turns are scored, and not episodes or their beginnings."""
        return self.per == "turn" and self.clip == "turn"

    @property
    def asks_judge(self) -> bool:
        """Whether a VLM is asked."""
        return self.scores and self.teacher == "judge"

    def title(self, judge: str, mark: str = "") -> str:
        """As of `StepRewardConfig`, e.g. `judge per turn`."""
        if self.source == "mixture":
            text = " + ".join(f"{getattr(self.mixture, name):g} {name}" for name in self.mixture.used)
        elif self.source == "judged":
            text = f"{self.teacher}{' gain' if self.clip == 'growing' else ''} per {self.per}"
        else:
            text = {"environment": "env reward", "success": "env success"}[self.source]
        return text + mark


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRewardConfig(TurnRewardConfig):
    """Reward of whole episodes of envs in chunks: success, unless it says otherwise; scores as they are."""

    source: Literal["environment", "success", "judged", "mixture"] = "success"
    """success: 1 or 0 by the env's own test; judged: what a judge says of the episode's video, or of each chunk;
    environment: the true reward; mixture: the weighted sum that `mixture` describes."""
    per: Literal["turn", "episode"] = "episode"
    """episode: one score of the images of the whole episode, given to its last chunk; turn: one for each chunk."""
    is_centred: bool = False
    """Whether scores in [0, 1] become rewards in [-1, 1]."""

    def title(self, judge: str, mark: str = "") -> str:
        """As of `StepRewardConfig`, e.g. `pocket score of the video`."""
        # not super(): a class with slots is made twice, and super() knows the first
        if self.source != "judged" or self.per == "turn":
            return TurnRewardConfig.title(self, judge, mark)
        who, bound = judge if self.asks_judge else self.teacher, self.threshold
        kind = "score" if bound is None else f"score >= {bound if isinstance(bound, str) else format(bound, 'g')}"
        added = f" + {self.success_weight:g} env success" if self.success_weight else ""
        return f"{who} {kind} of the video{added}{mark}"


RewardConfig = StepRewardConfig | TurnRewardConfig | ChunkRewardConfig
"""The reward of a run, by the kind of its env; a source has the same name and meaning in all of them."""
