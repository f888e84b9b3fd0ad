"""Configuration of preference learning; imports nothing heavy so that the command line starts at once."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlvlm.core.checks import Bound, NonNegativeInt, PositiveFloat, PositiveInt, Share, check_bounds
from rlvlm.core.leads import CodeRef, FilePath
from rlvlm.rewards.config import StepRewardConfig, check_name

SAMPLING = ("uniform", "disagreement", "entropy", "k_center")
"""Names of the query strategies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedTeacherConfig:
    """Imperfections of a teacher that knows the truth; none by default."""

    truth: Literal["return", "progress"] = "return"
    """Quantity that the teacher compares: true returns of the sides (B-Pref), or true progress at their ends, which
    images show."""
    mistake: Share = 0.0
    """Probability that an answer is flipped, in [0, 1]."""
    left: float = 0.0
    """Probability that the left side is chosen regardless, as by a judge that prefers a side; at most 1 - mistake."""
    beta: PositiveFloat = math.inf
    """Rationality per unit of true return, > 0: right is preferred with probability sigmoid(beta * gain); inf always
    prefers the larger return."""
    gamma: Annotated[float, Bound("(0, 1]")] = 1.0
    """Memory decay in (0, 1]: each step of a segment has this weight relative to the next one."""
    skip: Annotated[float, Bound("[0, inf)")] = 0.0
    """Share of an average segment's return, >= 0: a query is skipped unless one side exceeds it."""
    equal: Annotated[float, Bound("[0, inf)")] = 0.0
    """Share of an average segment's return, >= 0: sides that differ by less are no preference."""
    seconds: Annotated[float, Bound("[0, inf)")] = 0.0
    """Time per answer on the teacher's own clock, >= 0: counted, but not waited for."""

    def __post_init__(self) -> None:
        check_bounds(self, "feedback.simulated")
        if not 0 <= self.left <= 1 - self.mistake:
            raise ValueError(
                f"feedback.simulated.left is a probability, with mistake at most 1, got {self.left} and {self.mistake}"
            )


PREFLIGHT = 24
"""Default number of known pairs that a judge is tried on."""
RESNET_MIN_PX = 64
"""Smallest image for a ResNet, in pixels: its five halvings leave two; one pixel could not be normalised."""
BPREF_TEACHERS = {
    "mistake": SimulatedTeacherConfig(mistake=0.1),
    "stochastic": SimulatedTeacherConfig(beta=1.0),
    "skip": SimulatedTeacherConfig(skip=0.1),
    "equal": SimulatedTeacherConfig(equal=0.1),
    "myopic": SimulatedTeacherConfig(gamma=0.9),
}
"""The imperfect teachers of Lee et al. 2021 (B-Pref), arXiv:2111.03026: one weakness each, at its published value."""


THEIR_TASKS = {
    "drawer_open": "Drawer",
    "soccer": "Soccer",
    "sweep_into": "Sweep",
    "cartpole": "CartPole",
    "fold_cloth": "Cloth",
    "straighten_rope": "Rope",
    "pass_water": "Water",
}
"""Names of our tasks in Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681."""


def published_name(task: str) -> str:
    """Returns the paper's name of one of our tasks, whose labels the teacher `published` imitates.

    Raises:
        ValueError: the paper has no such task.
    """
    if task not in THEIR_TASKS:
        raise ValueError(
            f"reward.teacher published knows {', '.join(sorted(THEIR_TASKS))}, got {task}; for another task measure a "
            "judge with `rlvlm judge-bench` and choose reward.teacher measured with feedback.measured FILE"
        )
    return THEIR_TASKS[task]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedConfig:
    """Choice of the queries for the person of the teacher `mixed`, and its budget."""

    person: Literal["human", "simulated"] = "human"
    """human: somebody at the page of `rlvlm labels ask`; simulated: a teacher that knows the truth, with the
    weaknesses of `feedback.mixed.simulated`, to try out a budget."""
    share: Annotated[float, Bound("(0, 1]")] = 0.25
    """Share of a session's queries that the person is asked about, in (0, 1]: first those that the judge could not
    decide, because its two orders disagree or it gave no label, then those on which the reward model's members
    disagree most. The judge's answers to these queries are logged and not trained on."""
    max_answers: NonNegativeInt = 400
    """Maximum number of queries that the person is asked in the whole run."""
    max_minutes: PositiveFloat = 60.0
    """Time that the person spends on answers in the whole run, > 0, in minutes; afterwards only the judge is asked.
    The judge's cost is limited by judge.api.max_cost_usd."""
    simulated: SimulatedTeacherConfig = field(
        default_factory=lambda: SimulatedTeacherConfig(truth="progress", mistake=0.05, seconds=4.0)
    )
    """Simulated person: by default it compares progress, errs in 5 % of the answers and takes 4 s for each."""

    def __post_init__(self) -> None:
        check_bounds(self, "feedback.mixed")


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackConfig:
    """Schedule and choice of the queries."""

    first_step: PositiveInt = 3_000
    """Env step of the first session; before it the agent explores by novelty."""
    every_steps: PositiveInt = 2_000
    """Env steps between sessions."""
    queries: PositiveInt = 100
    """Queries per session."""
    max_queries: NonNegativeInt = 20_000
    """Query budget of the whole run, answered or not."""
    segment_steps: PositiveInt = 1
    """Steps per segment, L >= 1; 1 compares single images, as the paper does."""
    recent_episodes: PositiveInt = 100
    """Number of newest episodes from whose frames queries are sampled."""
    sampling: CodeRef = "uniform"
    """Strategy that chooses queries. uniform: random (the paper); the others choose among candidates by the current
    reward model. disagreement: where its members differ most; entropy: where they are least sure; k_center: farthest
    from all earlier queries; my_file:FUNCTION: your own strategy. Before the first fit all are uniform."""
    pool: PositiveInt = 10
    """Candidates per query, >= 1, for sampling other than uniform."""
    ties: Literal["drop", "equal"] = "drop"
    """Handling of ties. drop: answers without preference are not used (the paper); equal: they count as one half."""
    ahead: bool = False
    """Whether the agent keeps learning while the teacher answers; answers are then used one session later."""
    simulated: SimulatedTeacherConfig = field(default_factory=SimulatedTeacherConfig)
    mixed: MixedConfig = field(default_factory=MixedConfig)
    measured: FilePath = ""
    """bench.json (`rlvlm judge-bench`) or judge_report.csv (`rlvlm judge-report`) of a judge; the teacher `measured`
    imitates its rates of right, wrong and undecided answers, and its preference for a side."""
    preflight: NonNegativeInt | None = None
    """Known pairs that a judge is asked about in both orders before the run starts, a small version of `rlvlm
    judge-bench TASK`: a judge that cannot tell them apart is refused. None: 24, of a judge that can be asked about
    what it has not answered before; 0 skips it;
    fewer than 24 allow few conclusions."""
    rehearse: Annotated[int, Bound("0 or >= 100")] = 0
    """Questions before the run that find out what this judge would teach: a reward model of its answers is followed by
    a search, the same search follows the truth (`rlvlm judge-bench TASK --rehearse`). At least 100; 0 skips it."""

    def __post_init__(self) -> None:
        check_bounds(self, "feedback")
        check_name("feedback.sampling", self.sampling, SAMPLING)

    def pool_factor(self, num_fits: int) -> int:
        """Returns the number of candidates per query after `num_fits` fits of the reward model."""
        return self.pool if self.sampling != "uniform" and num_fits else 1


def simulated_config(teacher: str, feedback: FeedbackConfig) -> SimulatedTeacherConfig | None:
    """Returns the weaknesses of the simulated teacher named in `StepRewardConfig`; None for every other teacher.

    Raises:
        ValueError: the teacher skips queries, which would then train as ties.
    """
    config = feedback.simulated if teacher == "simulated" else BPREF_TEACHERS.get(teacher)
    if config is not None and config.skip > 0 and feedback.ties == "equal":
        raise ValueError(
            "a teacher that skips queries needs feedback.ties drop, got equal, with which skipped queries "
            "would train as one half; choose one of the two"
        )
    return config


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelConfig:
    """Ensemble that predicts the teacher's answers."""

    image_px: PositiveInt = 64
    """Side length of the image model's images, in pixels (300 in the paper)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for training and evaluation. auto: a GPU that Ray or SLURM has assigned to the process, else the CPU;
    cuda: the first visible GPU, which a judge may use too."""
    ensemble: PositiveInt = 3
    """Number of ensemble members, K >= 1; the reward is their mean."""
    lr: PositiveFloat = 3e-4
    """Learning rate of Adam."""
    batch_size: PositiveInt = 32
    """Answers per gradient step (64 in the paper)."""
    max_epochs: PositiveInt = 50
    """Maximum number of passes over all answers per session."""
    min_updates: NonNegativeInt = 60
    """Minimum number of gradient steps per session before the fit may stop early, 0 to `max_updates`."""
    max_updates: PositiveInt = 100
    """Maximum number of gradient steps per session; bounds a session's time when there are many answers."""
    stop_accuracy: Annotated[float, Bound("(0, 1]")] = 0.97
    """Mean training accuracy of an epoch above which a session's fit to comparisons ends."""
    stop_error: Annotated[float, Bound("(0, 1]")] = 0.05
    """Root mean square error of the members' mean on held-out scores, in [0, 1], below which a session's fit to
    scores ends."""
    label_smoothing: Annotated[float, Bound("[0, 1)")] = 0.0
    """Share of each label that is spread evenly over both sides, in [0, 1): 0.2 fits a probability of 90 % for a
    label. At 0 rewards grow until they reach their bound, where near and nearer states have equal rewards."""
    output: Literal["bounded", "normalised"] = "bounded"
    """Range of the rewards. bounded: networks end in a tanh, as in both papers, and perfect labels push most rewards
    to its ends. normalised: networks are unbounded, and states are scaled anew by all labelled steps before each fit;
    the agent gets rewards that are centred and scaled by those of the labelled steps (Christiano et al. 2017, sec.
    2.2.1), then bounded. It distinguishes near from nearer; not tried with images."""
    hold_out_every: Annotated[int, Bound("0 or >= 2")] = 5
    """One score in this many is held out, and a fit ends once these are met. The agent explores until the model has
    predicted so many new answers that chance would in at most one run of a hundred. 0 holds out none, and trusts every
    fit."""

    def __post_init__(self) -> None:
        check_bounds(self, "reward_model")
        if self.min_updates > self.max_updates:
            raise ValueError(
                f"reward_model.min_updates must be <= max_updates, got {self.min_updates} and {self.max_updates}"
            )


def check_learning(reward: StepRewardConfig, feedback: FeedbackConfig, reward_model: RewardModelConfig) -> None:
    """Raises unless the feedback settings fit the teacher and the reward model.

    Raises:
        ValueError: says which two settings conflict.
    """
    simulated_config(reward.first_teacher, feedback)  # only for its check
    if reward.may_ask_person and feedback.ahead:
        raise ValueError(
            f"feedback.ahead has no effect with reward.teacher {reward.teacher}: nobody waits for a person's answers; "
            "leave it out"
        )
    if reward.exploration.bonus == "disagreement" and reward_model.ensemble == 1:
        raise ValueError(
            "reward.exploration.bonus disagreement needs members that can disagree, got reward_model.ensemble 1; "
            "use 3, or the bonus novelty"
        )
    if (reward.first_teacher == "measured") != bool(feedback.measured):
        raise ValueError(
            "reward.teacher measured and feedback.measured FILE go together, got "
            f"{reward.first_teacher} and {feedback.measured or 'no file'}"
        )
    # the preflight asks about pairs of images: other teachers see no images, and a judge of scores is not asked about
    # pairs
    tried = feedback.preflight or feedback.rehearse
    if tried and not (reward.asks_judge and reward.source == "preference"):
        raise ValueError(
            f"feedback.preflight and feedback.rehearse ({tried}) try a judge on pairs, and reward.source "
            f"{reward.source} with teacher {reward.teacher} asks none; leave them out"
        )
    if reward.model == "resnet18" and reward_model.image_px < RESNET_MIN_PX:
        raise ValueError(
            f"reward.model resnet18 needs reward_model.image_px >= {RESNET_MIN_PX}, got "
            f"{reward_model.image_px}; smaller images are for reward.model image"
        )
    # the remaining rules are about scores
    if reward.source != "score":
        return
    if reward_model.label_smoothing:
        raise ValueError("reward_model.label_smoothing is of pairs; reward.source score has none")
    if feedback.segment_steps != 1:
        raise ValueError(
            "reward.source score learns from single images, so feedback.segment_steps must be 1, "
            f"got {feedback.segment_steps}; longer segments need reward.source preference"
        )
    if feedback.sampling == "entropy":
        raise ValueError(
            "feedback.sampling entropy is about labels of pairs, and reward.source score has none; "
            "use disagreement or k_center"
        )
