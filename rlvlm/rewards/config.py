"""Configuration of rewards; imports nothing heavy so that the command line starts at once."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Annotated, ClassVar, Literal

from rlvlm.core.checks import (
    Bound,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    check_bounds,
)
from rlvlm.core.guests import short_names
from rlvlm.core.leads import CodeRef, FilePath
from rlvlm.core.references import is_reference

SOURCES = ("preference", "score", "judged", "environment", "success", "novelty")
"""Names of the sources of step rewards, with the same meaning in all algorithms."""
TEACHERS = (
    *("judge", "oracle", "progress", "mistake", "stochastic", "skip", "equal", "myopic", "simulated"),
    *("published", "measured", "random", "human", "mixed"),
)
_SCORERS = ("judge", "oracle", "random")
_PEOPLE = ("human", "mixed")


def check_name(setting: str, value: str, names: Iterable[str]) -> None:
    """Raises unless `value` is one of `names`, or refers to an object of the user's own.

    Raises:
        ValueError: suggests a name.
    """
    names = [*names, *short_names(setting)]
    if value in names or is_reference(value):
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
    """Bonus on the learned reward. none: no bonus; disagreement: standard deviation of the ensemble's rewards
    (RUNE); novelty: distance to the states visited before, as before the learned reward takes over."""
    weight: NonNegativeFloat = 0.05
    """beta_0, >= 0: initial reward per unit of the bonus (the paper's value, for rewards in [-1, 1]; here they lie
    in [-3, 3]). Novelty is in units of its own standard deviation."""
    decay: Share = 1e-4
    """rho, in [0, 1]: share of the weight lost per env step (1e-5 to 1e-3 in the paper)."""

    def __post_init__(self) -> None:
        check_bounds(self, "reward.exploration")

    def weight_after(self, num_steps: int) -> float:
        """Returns beta_t, `num_steps` env steps after the learned reward took over; 0 without a bonus."""
        # beta_t = beta_0 (1 - rho)^t
        return 0.0 if self.bonus == "none" else self.weight * (1 - self.decay) ** num_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelMonitorConfig:
    """Monitoring of a teacher of comparisons against the simulator's truth, which never reaches the policy."""

    window: Annotated[int, Bound(">= 20")] = 400
    """Number of decided labels behind the newest figures; a quarter as many first ones are the baseline."""
    clear_gap: Annotated[float, Bound("(0, 1)")] = 0.1
    """Difference in truth between the sides of a clear label, in (0, 1), as a share of the range of first and newest
    ones."""
    max_wrong: Share = 0.1
    """Share of clear labels, in [0, 1], that may be wrong between any two fifths of the way, even if fewer were at
    first."""
    min_accuracy: Share = 0.65
    """Share of clear labels that are right, in [0, 1], below which they surely lie for an alarm without a rise."""
    known_again: NonNegativeInt = 20
    """Pairs of the preflight that the judge compares again every `known_every` sessions, without its memory; 0:
    never."""
    known_every: PositiveInt = 5
    """Sessions between these, >= 1."""
    on_alarm: Literal["warn", "stop"] = "warn"
    """Reaction to an alarm. warn: report it in log, panel and pages; stop: also end the run, with exit code 5."""

    def __post_init__(self) -> None:
        check_bounds(self, "reward.monitor")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRewardConfig:
    """Source of the reward."""

    source: CodeRef = "preference"
    """preference: learned from a teacher's comparisons; score: learned from a teacher's scores of single images;
    judged: the judge's score of each image, unchanged; environment: the true reward; success: 1 if the env's own
    test holds; novelty: state entropy alone; my_file:NAME: your own `RewardSource`, or a function of (images, goal)
    that returns scores."""
    teacher: CodeRef = "judge"
    """judge: the VLM; oracle: compares true returns, or scores by true progress; progress: compares true progress;
    mistake, stochastic, skip, equal, myopic: B-Pref's, each with one human weakness; simulated: the weaknesses of
    feedback.simulated; published: right, wrong or undecided as often as the paper's VLM on this task; measured:
    errors as in feedback.measured; random: random labels, the negative control; human: a person at the page of
    `rlvlm labels ask`, for whom the run does not wait; mixed: `mixed_judge`, and a person for its doubtful answers;
    my_file:NAME: your own `Teacher`. Scores come from judge, oracle, random or your own."""
    mixed_judge: CodeRef = "judge"
    """Teacher that answers every query before a person is asked about some (teacher mixed, feedback.mixed): judge,
    the VLM; or another teacher that answers at once, such as simulated or measured, to try out a budget."""
    model: Literal["image", "resnet18", "state"] = "image"
    """Input of the learned reward. image: images, by a small CNN; resnet18: images, by a ResNet-18; state:
    observation and action."""
    exploration: ExplorationConfig = field(default_factory=ExplorationConfig)
    """Decaying bonus on top of the learned reward, so that exploration continues after it takes over."""
    monitor: LabelMonitorConfig = field(default_factory=LabelMonitorConfig)
    """Monitoring of the teacher's labels, with an alarm."""

    def __post_init__(self) -> None:
        check_name("reward.source", self.source, SOURCES)
        check_name("reward.teacher", self.teacher, TEACHERS)
        check_name("reward.mixed_judge", self.mixed_judge, (name for name in TEACHERS if name not in _PEOPLE))
        # Settings without effect are refused: a run that ignores a setting looks in a table as if it had used it.
        if self.source == "score" and self.teacher not in _SCORERS and not is_reference(self.teacher, "reward.teacher"):
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
        """Teacher that gets every query: `teacher`, or `mixed_judge` for the teacher mixed."""
        return self.mixed_judge if self.teacher == "mixed" else self.teacher

    @property
    def asks_judge(self) -> bool:
        """Whether a VLM is asked at all."""
        return self.source == "judged" or (self.is_learned and self.first_teacher == "judge")

    @property
    def may_ask_person(self) -> bool:
        """Whether some or all queries go to a person, who answers when there is time."""
        return self.is_learned and self.teacher in _PEOPLE

    def title(self, judge: str, mark: str = "") -> str:
        """Returns a name of the reward short enough for a legend, e.g. `judge labels, image reward`.

        Args:
            judge: name of the judge, if one is asked.
            mark: suffix of the judge's name, e.g. that its weights are random.
        """
        if self.source == "judged":
            return f"{judge} score{mark}"
        if not self.is_learned:
            return f"{self.source} reward"
        answers = {"preference": "labels", "score": "scores"}[self.source]
        return f"{self.teacher}{mark} {answers}, {self.model} reward"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueConfig:
    """Settings of a value of outcomes, an ensemble of networks that is only used in training; see
    `algorithms.outcome_value`.
    """

    hidden: PositiveInt = 128
    """Width of a network's two layers."""
    lr: PositiveFloat = 1e-3
    """Step size of AdamW."""
    steps: PositiveInt = 100
    """Gradient steps before each update."""
    batch_size: PositiveInt = 256
    """Turns or chunks per step."""
    episodes: PositiveInt = 2_000
    """Number of newest episodes that it is trained on, >= 1."""
    heads: PositiveInt = 1
    """Networks of the ensemble, 1 to 5; their mean is the value, and their standard deviation the spread."""
    gamma: Share = 1.0
    """Discount per turn or chunk, in [0, 1]; 1: the probability of success itself."""
    td_lambda: Share = 1.0
    """Lambda of the targets, in [0, 1]. 1: the episode's outcome (Monte Carlo); lower: the value of the next state
    counts too, which learns from parts of episodes that ended differently."""
    monte_carlo: NonNegativeInt = 5
    """Rounds of training at the start, one before each update, with lambda 1: the first values mean nothing."""

    def __post_init__(self) -> None:
        check_bounds(self, "value")
        if self.heads > 5:
            raise ValueError(f"value.heads must be 1 to 5, got {self.heads}; each is trained, and five tell the spread")


SHAPING_VALUE = ValueConfig(heads=3, td_lambda=0.9)
"""The network of `reward.shaping value`."""
ScoreTeacher = Literal["judge", "random", "biased", "progress", "measured"]
"""Scorer of turns and episodes. judge: the VLM; random: random scores, the negative control; biased: the truth,
except for a share of failures that it calls successes, or the other way round, the control that the monitor must
catch; progress: the
simulator's progress with noise, a judge of adjustable quality, to study graded scores; measured: scores that a judge
gave in `rlvlm judge-bench` to episodes of similar progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig:
    """Monitoring of a judge that rewards. Its measurements never reach the policy."""

    controls: NonNegativeInt = 4
    """Scored turns or episodes per update that are shown again: their first moment alone, backwards, with another goal
    and, where the env tells robot and things apart, with the robot's movement alone; 0 shows none."""
    known_again: NonNegativeInt = 20
    """Items of the preflight that are shown again every `known_every` updates, to the judge without its memory; 0:
    never."""
    known_every: PositiveInt = 20
    """Updates between these, >= 1."""
    uses_truth: bool = True
    """Whether the env's own test of success is held against the judge's answers. Without it, as on a robot, alarms
    rest on known items and controls alone."""
    window: Annotated[int, Bound(">= 20")] = 400
    """Number of episodes behind the newest figures; as many first ones are the baseline."""
    success_threshold: Annotated[float, Bound("(0, 1]")] | None = None
    """Score in (0, 1] from which the judge is taken to call an episode a success. None: the reward's threshold;
    without one the preflight's; else 0.5, and 0.875 for turns."""
    max_false_positives: Share = 0.1
    """Share of failures, in [0, 1], that may be called successes without an alarm, even if there were fewer before."""
    on_alarm: Literal["warn", "stop"] = "warn"
    """Reaction to an alarm. warn: report it in log, panel and pages; stop: also end the run, with exit code 5."""
    preflight: NonNegativeInt = 32
    """Known turns of each kind, or twice as many episodes in all, that the judge has to tell apart before a run
    starts: a small version of `rlvlm judge-bench TASK`; 0 skips it."""
    rehearse: Annotated[int, Bound("0 or >= 100")] = 0
    """Questions before a run, beside the preflight's, that find out what this judge would teach: a search follows it,
    the same search follows the truth (`rlvlm judge-bench TASK --rehearse`); for scores of episodes. At least 100, some
    hundred are good; 0 skips it."""
    min_auc: Annotated[float, Bound("[0.5, 1]")] = 0.75
    """Minimum area under the curve of successes against failures in the preflight, in [0.5, 1]; an area of the
    newest episodes that surely lies below it raises an alarm."""

    def __post_init__(self) -> None:
        check_bounds(self, "reward.monitor")


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig:
    """Weights of the rewards in the sum; each reward is also logged raw."""

    environment: float = 0.0
    """Weight of the true reward, in its own units."""
    judged: float = 0.0
    """Weight of the judge's score, scaled to [-1, 1]."""
    novelty: Share = 0.0
    """Weight of the transitions' novelty, in [0, 1]."""

    def __post_init__(self) -> None:
        check_bounds(self, "reward.mixture")

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the sources with a weight other than 0."""
        return tuple(name for name in ("environment", "judged", "novelty") if getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRewardConfig:
    """Reward of turns, chunks or episodes; the true reward is kept beside it, for evaluation."""

    is_learned: ClassVar[bool] = False
    """Whether a reward model is fitted to a teacher's answers."""
    source: Literal["environment", "success", "judged", "mixture"] = "environment"
    """environment: the true reward; success: 1 for an episode that succeeds by the env's own test, else 0; judged: a
    judge's score alone; mixture: the weighted sum in `mixture`."""
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    teacher: ScoreTeacher = "judge"
    """Scorer, if scores are used."""
    per: Literal["turn", "episode"] = "turn"
    """Unit that is scored. turn: the utility of each turn or chunk, from the image before it, the action and the
    image after it (`judge.score utility`); episode: one score of the images of the whole episode, given to its last
    turn."""
    clip: Literal["turn", "growing"] = "turn"
    """Images shown to the judge with `per turn`. turn: those before and after the turn; growing: those of the
    episode so far, with the other forms of `judge.score`; a turn's reward is the increase of the score, so that an
    episode's rewards sum to its last score."""
    is_centred: bool = True
    """Whether scores in [0, 1] become rewards in [-1, 1]."""
    unreadable: float = -1.0
    """Reward of a turn with an unreadable reply, with `per turn`: no action was taken that could be judged, so the
    judge is not asked."""
    num_frames: Annotated[int, Bound(">= 2")] = 8
    """Maximum number of an episode's images shown to the judge, >= 2, including the first and the last."""
    frame_px: PositiveInt = 224
    """Side length of those images in pixels, for envs that draw at any size."""
    flip_images: bool = False
    """Whether images are flipped left to right for the judge. LIBERO's images are mirrored, as published policies
    expect: the left side in an instruction is on their right. The pocket judges were trained on mirrored images; any
    other judge should see flipped ones."""
    success_weight: NonNegativeFloat = 0.0
    """Weight of the env's success, >= 0, beside the judge's score of an episode, whose weight is 1; the reward is
    their weighted mean. With a judge of progress these are success and an episode's changes of potential, which sum
    without a discount to its last potential minus its first, which a group shares. Departure from Ng et al. 1999,
    whose potential is 0 at the end of an episode: then all of it would cancel within a group. So the judge does
    change which policy is best."""
    threshold: Annotated[float, Bound("(0, 1]")] | Literal["calibrated"] | None = None
    """Score from which a score counts as 1, below it as 0; None uses scores unchanged. calibrated: the threshold at
    which the judge told known episodes apart best before training, see `monitor.preflight`."""
    without_answer: Literal["stop", "drop", "neutral"] = "drop"
    """Handling of missing answers. stop: end the run; drop: leave the episode's turns out of this update (with
    compared episodes, its whole group); neutral: score it `neutral`. The truth never replaces an answer."""
    neutral: Annotated[Share, Needs("without_answer", "neutral")] = 0.5
    """Score for `without_answer neutral`, in [0, 1]."""
    fallback_judge: str = ""
    """Name of a running Serve app whose judge is asked for answers missing from the run's own; empty for none."""
    false_positives: Annotated[Share, Needs("teacher", "biased")] = 0.2
    """Share of failures that the teacher biased calls successes, in [0, 1]."""
    false_negatives: Annotated[Share, Needs("teacher", "biased")] = 0.0
    """Share of successes that the teacher biased calls failures, in [0, 1]."""
    noise: Annotated[NonNegativeFloat, Needs("teacher", "progress")] = 0.0
    """Standard deviation of the noise of the teacher progress, >= 0."""
    measured: FilePath = ""
    """File bench.json of a judge (`rlvlm judge-bench`) for the teacher measured."""
    shaping: Literal["none", "value"] = "none"
    """Reward of each turn or chunk beside the outcome, which is a judge's score of the whole episode, or success.
    value: by how much the turn changed the learned probability of success, gamma V(s') - V(s), which leaves the best
    policy as it is. For advantages of turns (ppo, grpo_turns, rloo_turns); asks the judge no further question."""
    value: Annotated[ValueConfig, Needs("shaping", "value")] = SHAPING_VALUE
    """The network that `shaping value` learns from the outcomes of the run's own episodes."""
    corrects_noise: Annotated[bool, Needs("shaping", "value")] = True
    """Whether this network allows for the outcomes that are wrong, by the rates of false positives and false negatives
    of the preflight's known episodes (of the teacher biased: its own)."""
    parts: PositiveInt = 4
    """Number of parts in which a rollout of whole episodes is played, >= 1: a judge scores one while the next is
    played. It is lower if a part would not have a group for each env runner."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def __post_init__(self) -> None:  # noqa: C901 - one rule after the other
        check_bounds(self, "reward")
        # settings that only a scorer reads, against the fields' defaults: envs in turns and in chunks have another
        # `per`
        defaults = {field.name: field.default for field in fields(self)}
        of_scorer = ("per", "clip", "teacher", "success_weight", "threshold", "without_answer", "neutral", "parts")
        idle = [] if self.scores else [name for name in of_scorer if getattr(self, name) != defaults[name]]
        if (self.source == "mixture") != bool(self.mixture.used):
            raise ValueError(
                f"reward.source is {self.source} and reward.mixture weighs {self.mixture.used or 'nothing'}: weights "
                "go with the source mixture, which needs one at least"
            )
        if (self.teacher == "measured") != bool(self.measured):
            raise ValueError(
                "reward.teacher measured and reward.measured FILE go together, got "
                f"{self.teacher} and {self.measured or 'no file'}"
            )
        if idle:
            raise ValueError(
                f"reward.{', '.join(idle)} have no effect without scores: set reward.source judged, or mixture "
                "with reward.mixture.judged"
            )
        # the threshold comes from the preflight's episodes and a judge, so both are needed
        if self.monitor.rehearse and not (self.asks_judge and self.monitor.preflight and not self.rates_turns):
            raise ValueError(
                "reward.monitor.rehearse follows a judge that scores episodes, after its preflight: it needs "
                "reward.source judged, reward.per episode and monitor.preflight"
            )
        if self.threshold == "calibrated" and not (self.asks_judge and self.monitor.preflight):
            raise ValueError("a calibrated threshold needs a judge, and monitor.preflight episodes to calibrate it on")
        if self.fallback_judge and not self.asks_judge:
            raise ValueError("reward.fallback_judge has no effect where no judge is asked")
        # these simulate a judge of episodes: none of them can score a single turn
        if self.teacher in ("biased", "progress", "measured") and self.rates_turns:
            raise ValueError(
                f"the {self.teacher} teacher is about episodes; set reward.per episode or reward.clip growing"
            )
        if self.clip == "growing" and (self.per != "turn" or self.without_answer == "neutral"):
            raise ValueError(
                f"reward.clip growing goes with reward.per turn, got {self.per}, and with reward.without_answer drop "
                f"or stop, got {self.without_answer}: a gain needs both scores"
            )
        if self.shaping == "value" and not (self.source == "success" or (self.scores and self.per == "episode")):
            raise ValueError(
                "reward.shaping value learns from the outcomes of whole episodes: set reward.source success, or judged "
                f"with reward.per episode; got {self.source}, per {self.per}"
            )
        if self.success_weight and self.per == "turn":
            raise ValueError("reward.success_weight is beside the score of a whole episode; set reward.per episode")

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each source: those of `mixture`, or 1 for the only one."""
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
        """Returns a short name of the reward, as `StepRewardConfig.title` does, e.g. `judge per turn`."""
        if self.source == "mixture":
            text = " + ".join(f"{getattr(self.mixture, name):g} {name}" for name in self.mixture.used)
        elif self.source == "judged":
            text = f"{self.teacher}{' gain' if self.clip == 'growing' else ''} per {self.per}"
        else:
            text = {"environment": "env reward", "success": "env success"}[self.source]
        return text + (" + value" if self.shaping == "value" else "") + mark


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRewardConfig(TurnRewardConfig):
    """Reward of whole episodes of envs in chunks: success by default, and scores unscaled."""

    source: Literal["environment", "success", "judged", "mixture"] = "success"
    """success: 1 or 0 by the env's own test; judged: a judge's score of the episode's video, or of each chunk;
    environment: the true reward; mixture: the weighted sum in `mixture`."""
    per: Literal["turn", "episode"] = "episode"
    """episode: one score of the images of the whole episode, given to its last chunk; turn: one for each chunk."""
    is_centred: bool = False
    """Whether scores in [0, 1] become rewards in [-1, 1]."""

    def __post_init__(self) -> None:
        TurnRewardConfig.__post_init__(self)  # not super(): a class with slots is made twice
        if self.weights["novelty"]:
            raise ValueError(
                "reward.mixture.novelty is that of the actions of envs in turns, which have names, got "
                f"{self.mixture.novelty:g} for an env in chunks; leave it out"
            )

    def title(self, judge: str, mark: str = "") -> str:
        """Returns a short name of the reward, as `StepRewardConfig.title` does, e.g. `pocket score of the video`."""
        # not super(): a class with slots is made twice, and super() knows the first
        if self.source != "judged" or self.per == "turn":
            return TurnRewardConfig.title(self, judge, mark)
        who, bound = judge if self.asks_judge else self.teacher, self.threshold
        kind = "score" if bound is None else f"score >= {bound if isinstance(bound, str) else format(bound, 'g')}"
        added = f" + {self.success_weight:g} env success" if self.success_weight else ""
        added += " + value" if self.shaping == "value" else ""
        return f"{who} {kind} of the video{added}{mark}"


RewardConfig = StepRewardConfig | TurnRewardConfig | ChunkRewardConfig
"""Reward config of a run, by the kind of its env; a source has the same name and meaning in all of them."""
