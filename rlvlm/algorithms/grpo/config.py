"""Hyperparameters of GRPO and of its supervised start; imports nothing heavy, so the command line starts at once."""

from dataclasses import dataclass, field
from typing import Literal

from rlvlm.policies.vla.config import VLAConfig
from rlvlm.rewards.config import FALSE_POSITIVES, MonitorConfig, ScoreTeacher, check_scoring

GroupBaseline = Literal["mean", "leave_one_out"]
Granularity = Literal["token", "action", "chunk"]
Averaging = Literal["trajectory", "token", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """A network that predicts an episode's score before each of its chunks, from the simulator's state.

    Only training has it: the policy still acts on images.
    """

    trace: float = 0.5
    """Lambda of the generalised advantage estimate over chunks, in [0, 1]. 1: a chunk is credited with all that comes
    after it; 0: with nothing but the change in what is predicted from before it to after it."""
    hidden: int = 128
    """Width of its two layers."""
    lr: float = 1e-3
    """Step size of AdamW."""
    steps: int = 100
    """Gradient steps before each update."""
    batch_size: int = 256
    """Chunks in a step."""
    episodes: int = 2_000
    """The newest episodes that it learns from, >= 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.trace <= 1 or not self.lr > 0:
            raise ValueError(f"need critic.trace in [0, 1] and critic.lr > 0, got {self.trace} and {self.lr}")
        if min(self.hidden, self.steps, self.batch_size, self.episodes) < 1:
            counts = f"{self.hidden}, {self.steps}, {self.batch_size} and {self.episodes}"
            raise ValueError(f"critic.hidden, steps, batch_size and episodes must be >= 1, got {counts}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """How an episode's score becomes its advantage, and which groups teach anything."""

    baseline: GroupBaseline | Literal["critic"] = "mean"
    """What is taken off a score: the group's mean; the mean of the others (RLOO); or what a critic expects, chunk by
    chunk (PPO), which learns from all groups."""
    divide_by_std: bool = True
    """Whether the difference is divided by the group's unbiased standard deviation, or by that of all chunks of the
    update where there is a critic."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    min_spread: float = 1e-3
    """Groups whose largest and smallest score differ by less teach nothing and are dropped; > 0."""
    scorer_noise: float | Literal["measured"] = 0.0
    """Standard deviation of the scorer when asked again about the same episode; a group whose own standard deviation is
    not above `noise_factor` times this is dropped. 0: the scorer repeats itself, as the env's own test does. measured:
    it is asked twice about the episodes of `monitor.preflight` before anything is learned."""
    noise_factor: float = 2.0
    """See `scorer_noise`; > 0."""
    chunk_share: float = 1.0
    """Share of each group's chunks that are learned from, in (0, 1]: those whose actions are furthest from what the
    other kind of the group's episodes, better or worse, did at that time. An update costs as much less."""

    def __post_init__(self) -> None:
        if not self.min_spread > 0:
            raise ValueError(f"min_spread must be > 0, got {self.min_spread}; a group of equal scores teaches nothing")
        if (self.scorer_noise != "measured" and self.scorer_noise < 0) or not self.noise_factor > 0:
            raise ValueError(
                f"need scorer_noise >= 0, or measured, and noise_factor > 0, got {self.scorer_noise} and "
                f"{self.noise_factor}"
            )
        if self.scorer_noise == 0 and self.noise_factor != 2.0:
            raise ValueError("noise_factor has no effect without scorer_noise; set both or neither")
        if not 0 < self.chunk_share <= 1:
            raise ValueError(f"chunk_share must be in (0, 1], got {self.chunk_share}; 1 learns from all chunks")
        if self.baseline == "critic" and self.chunk_share != 1:
            raise ValueError("chunk_share has no effect with a critic, which gives each chunk its own credit")
        if self.baseline == "leave_one_out" and self.divide_by_std:
            raise ValueError("leave_one_out is used without divide_by_std; add --algo.advantage.no-divide-by-std")
        if self.baseline == "critic" and (self.min_spread, self.scorer_noise) != (1e-3, 0.0):
            raise ValueError("min_spread and scorer_noise have no effect with a critic, which learns from all groups")
        if self.baseline != "critic" and self.critic != CriticConfig():
            raise ValueError("the critic's settings have no effect unless baseline is critic")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """The clipped objective."""

    ratio: Granularity = "token"
    """One ratio for each action dimension, for each env step, or for each chunk."""
    average: Averaging = "trajectory"
    """trajectory: every episode weighs the same, however long; token: every valid token does; constant: the sum over an
    episode's tokens is divided by the longest possible episode's number of tokens (Dr. GRPO)."""
    clip_low: float = 0.2
    """A ratio below 1 - clip_low no longer pays; in (0, 1)."""
    clip_high: float = 0.28
    """A ratio above 1 + clip_high no longer pays; > 0."""
    dual_clip: float | None = None
    """At negative advantages the loss is at most dual_clip * |advantage|; > 1, or None for no such bound."""
    kl_weight: float = 0.0
    """Weight of the KL divergence (k3 estimate) from the policy that SFT made, >= 0; above 0 that policy is kept."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1 or not self.clip_high > 0:
            raise ValueError(f"need 0 < clip_low < 1 and clip_high > 0, got {self.clip_low} and {self.clip_high}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be > 1 or None, got {self.dual_clip}")
        if self.kl_weight < 0:
            raise ValueError(f"kl_weight must be >= 0, got {self.kl_weight}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreConfig:
    """What an episode is worth."""

    source: Literal["success", "judged"] = "success"
    """success: 1 or 0 by the env's own test; judged: what a judge says of the episode's video."""
    teacher: ScoreTeacher = "judge"
    """Who scores, where the source is judged."""
    num_frames: int = 8
    """Frames of an episode that the judge is shown, >= 2, the first and the last among them."""
    frame_px: int = 224
    """Side of those frames."""
    flip_images: bool = False
    """Whether frames are flipped, left to right, before the judge sees them. LIBERO's images are mirrored, as published
    policies want them: what an instruction calls left is on their right. The pocket judges learned them so; any other
    judge should see them as they are."""
    success_weight: float = 0.0
    """Weight of the env's success, >= 0, beside the judge's score, whose weight is 1; the result is their mean. With a
    judge of progress these are success and an episode's changes of potential, which add up without a discount to its
    last potential less its first, which a group shares. Departure from Ng et al. 1999, whose potential is 0 where an
    episode ends: then all of it would cancel within a group. So the judge does change which policy is best."""
    threshold: float | Literal["calibrated"] | None = None
    """Scores from here on count as 1, others as 0; None takes them as they are. calibrated: where the judge told known
    episodes apart best before anything was learned, see `monitor.preflight`."""
    without_answer: Literal["stop", "drop_group", "neutral"] = "drop_group"
    """Where the judge has no answer: end the run, leave the episode's group out, or score it `neutral`."""
    neutral: float = 0.5
    """See `without_answer`; in [0, 1]."""
    fallback_judge: str = ""
    """Name of a running Serve app whose judge is asked where the run's own has no answer; empty: nobody is."""
    false_positives: float = FALSE_POSITIVES
    """Of the teacher biased: share of failures that it takes for successes, in [0, 1]."""
    noise: float = 0.0
    """Of the teacher progress: standard deviation of its noise, >= 0."""
    parts: int = 4
    """A rollout is played in so many parts, >= 1: a judge looks at one while the next is played. There are fewer where
    a part would not have a group for each env runner."""
    ahead: bool = False
    """Whether an update learns from the rollout before the newest one, at which the judge looks meanwhile: nobody waits
    for it unless it takes longer than all the rest, and episodes are learned from one update late. Checkpoints and
    evaluations wait and catch up."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def __post_init__(self) -> None:
        check_scoring("reward", self.num_frames, self.neutral, self.teacher, self.false_positives)
        if self.frame_px < 1 or self.parts < 1:
            raise ValueError(f"need frame_px and parts >= 1, got {self.frame_px} and {self.parts}")
        if self.noise < 0 or (self.noise and self.teacher != "progress"):
            raise ValueError(f"noise must be >= 0 and goes with the teacher progress, got {self.noise}")
        if isinstance(self.threshold, float | int) and not 0 < self.threshold <= 1:
            raise ValueError(f"threshold must be in (0, 1], calibrated or None, got {self.threshold}")
        if self.success_weight < 0:
            raise ValueError(f"success_weight must be >= 0, got {self.success_weight}")
        rest = (
            self.teacher,
            self.success_weight or None,
            self.threshold,
            self.without_answer,
            self.neutral,
            self.parts,
        )
        if self.source == "success" and rest != ("judge", None, None, "drop_group", 0.5, 4):
            raise ValueError(
                "teacher, success_weight, threshold, without_answer, neutral and parts have no effect unless source is "
                "judged"
            )
        if self.ahead and self.source == "success":
            raise ValueError("ahead has no effect unless source is judged")
        if self.threshold == "calibrated" and not (self.asks_judge and self.monitor.preflight):
            raise ValueError("a calibrated threshold needs a judge, and monitor.preflight episodes to calibrate it on")
        if self.fallback_judge and not self.asks_judge:
            raise ValueError("fallback_judge has no effect where no judge is asked")
        if self.without_answer != "neutral" and self.neutral != 0.5:
            raise ValueError("neutral has no effect unless without_answer is neutral")

    @property
    def flaw(self) -> float:
        """How wrong a simulated teacher is: false positives of the biased one, noise of progress."""
        return self.noise if self.teacher == "progress" else self.false_positives

    @property
    def asks_judge(self) -> bool:
        """Whether a VLM is asked."""
        return self.source == "judged" and self.teacher == "judge"


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """The supervised start: demonstrations, learned by cross-entropy of their action tokens."""

    data: str = ""
    """Folder that `rlvlm collect` or `rlvlm data import` made, to learn from all its successes; empty: the
    task's script plays. `demonstrations`, `noise` and `p_perturb` are for the script."""
    start_from: str = ""
    """Checkpoint of another run, e.g. `runs/push_block/TIME/checkpoints/best`: this one begins with its policy, and
    nothing is demonstrated."""
    demonstrations: int = 120
    """Episodes of the script, each from an initial state of its own; only successes are learned from."""
    noise: float = 0.05
    """Standard deviation of what is added to the script's actions, scaled to [-1, 1]."""
    p_perturb: float = 0.0
    """Probability in [0, 1) that an earlier chunk of the episode is carried out again in place of the script's, and not
    learned from. So a thing is missed or lost now and then, and the demonstration shows how to begin again."""
    label_width: float = 0.15
    """Standard deviation of the bell over bins that a token is taught as, in units of the range [-1, 1] of normalised
    actions; 0 teaches the single bin. It decides how widely the policy tries things out: much less and the episodes of
    a group are all alike; much more and sampled actions miss. Dimensions that never change, and those that are not
    scaled, are always taught as single bins."""
    scenes: int = 0
    """Scenes that nobody has played, drawn for a policy that learns to tell ways: the robot of a demonstrated moment
    among the things of an episode's start, each moved a little. Demonstrations show the hand where it should be, so
    what they teach alone is lost where it is elsewhere. Each gradient step has two of them for each of its chunks."""
    steps: int = 600
    """Gradient steps; 0 starts from the policy as it is."""
    batch_size: int = 32
    """Chunks in a step."""
    lr: float = 2e-3
    """Largest step size of AdamW; it rises over 20 steps and falls along a cosine."""
    weight_decay: float = 1e-4
    """Of AdamW."""

    def __post_init__(self) -> None:
        counts = {"demonstrations": 1, "batch_size": 1, "steps": 0, "scenes": 0}
        if self.data and self.start_from:
            raise ValueError("sft.data has no effect beside sft.start_from, whose policy has learned; leave one out")
        for name, least in (counts | {"noise": 0, "label_width": 0}).items():
            if not getattr(self, name) >= least:
                raise ValueError(f"sft.{name} must be >= {least}, got {getattr(self, name)}")
        if not 0 <= self.p_perturb < 1:
            raise ValueError(f"sft.p_perturb must be in [0, 1), got {self.p_perturb}")
        if not self.weight_decay >= 0 or not self.lr > 0:
            raise ValueError(f"need sft.weight_decay >= 0 and sft.lr > 0, got {self.weight_decay} and {self.lr}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig:
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) on the policy that SFT made."""

    groups: int = 32
    """Groups that are rolled out at once, each from one initial state, and that an update should learn from."""
    group_size: int = 8
    """Episodes of a group, >= 2; 1 will do with a critic."""
    rounds: int = 3
    """Most times that groups are rolled out for one update, until enough of them teach something. All that do are
    learned from at once, so nothing is thrown away and nothing is old."""
    temperature: float = 1.0
    """Of sampling, in rollouts and in the update."""
    draws: Literal["token", "chunk"] = "token"
    """Of the random numbers that rollouts are sampled with. token: one for each token; chunk: one for each dimension of
    the action, for all steps of a chunk, so that a chunk drifts to one side and does not tremble. Each token
    has the same distribution in both, and the update takes them as if they were drawn one by one; evaluations always
    draw one for each token."""
    least_range: float = 0.0
    """Dimensions of the action of whose range demonstrations use less than this share, from the 1st to the 99th
    percentile, are not explored: their likeliest token is taken, in sampled evaluations too, and no update learns from
    it. What a script hardly turns decides nothing when it is turned at random, and adds noise to the gradient. 0: all
    are explored. Dimensions that are not scaled (grippers) always are."""
    lr: float = 6e-4
    """First step size of Adam."""
    final_lr: float = 1.0
    """Where the step size ends, as a share of `lr`: it falls along half a cosine over the run, and `kl_target` with its
    square. An update is mostly noise where a whole episode has one bit to teach; shorter steps average over it."""
    warm_up: int = 5
    """Updates over which the step size rises to `lr`."""
    kl_target: float | None = 0.3
    """Divergence per chunk, in nats, from the policy that played the episodes, which an update should come to: the step
    size grows or shrinks by 1.3 where an update ended at less than 2/3 or more than 3/2 of this, and one that has come
    to twice as much takes no further step. With `ScoreConfig.ahead` the update before is in it too, so each moves the
    policy by less. It is measured before each gradient step, so an update needs two at least. An update of fewer groups
    than `groups` is to move it by as much less. None: the step size stays."""
    epochs: int = 1
    """Passes over the episodes of an update."""
    minibatches: int = 4
    """Gradient steps of a pass."""
    micro_batch: int = 0
    """Chunks that go through the policy at once within a gradient step, to save memory; 0: all of the step's."""
    max_grad_norm: float = 1.0
    """Longer gradients are cut to this norm."""
    threads: int = 1
    """Threads of torch in each learner's process, >= 1."""
    env_runners: int = 0
    """Processes that play groups side by side, each with envs and a copy of the policy; 0: the run's own plays."""
    num_learners: int = 0
    """Processes that take each step together, with the gradient of one; 0: one, in the run's own process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy learns in the run's own process. auto: a GPU that Ray or SLURM has assigned to it, else the CPU;
    cuda: the first that is visible."""
    gpus_per_learner: float = 0.0
    """GPUs that Ray sets aside for each learner of `num_learners`."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)

    def __post_init__(self) -> None:
        size = 1 if self.advantage.baseline == "critic" else 2
        positive = ("groups", "rounds", "epochs", "minibatches", "threads")
        others = ("warm_up", "env_runners", "num_learners", "gpus_per_learner", "micro_batch")
        bounds: dict[str, int] = {"group_size": size} | dict.fromkeys(positive, 1) | dict.fromkeys(others, 0)
        for name, least in bounds.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"algo.{name} must be >= {least}, got {getattr(self, name)}")
        for name in ("temperature", "lr", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"algo.{name} must be > 0, got {getattr(self, name)}")
        if self.gpus_per_learner and not self.num_learners:
            raise ValueError("gpus_per_learner has no effect without num_learners; set both or neither")
        if not 0 < self.final_lr <= 1:
            raise ValueError(f"final_lr must be in (0, 1], got {self.final_lr}")
        if not 0 <= self.least_range < 1:
            raise ValueError(f"least_range must be in [0, 1), got {self.least_range}; 0 explores all dimensions")
        if self.kl_target is not None and not self.kl_target > 0:
            raise ValueError(f"kl_target must be > 0 or None, got {self.kl_target}")
        if self.kl_target is not None and self.epochs * self.minibatches == 1:
            raise ValueError(
                "kl_target needs updates of two gradient steps at least: how far one has moved the policy is measured "
                "before its last step; set kl_target None, or minibatches or epochs >= 2"
            )


def check_together(scores: ScoreConfig, grpo: GRPOConfig, sft: SFTConfig, policy: VLAConfig) -> None:
    """Raises ValueError where settings of one of them leave settings of another without effect."""
    if sft.scenes and not (policy.model or policy.pocket.ways):
        raise ValueError(
            f"sft.scenes {sft.scenes} has no effect on a policy that does not learn to tell ways; set "
            "--policy.pocket.ways, or --sft.scenes 0"
        )
    if scores.ahead and grpo.rounds > 1:
        raise ValueError(
            f"algo.rounds {grpo.rounds} has no effect with reward.ahead, which learns from one rollout at a time; "
            "set --algo.rounds 1"
        )
    if grpo.advantage.scorer_noise == "measured" and not (scores.source == "judged" and scores.monitor.preflight):
        raise ValueError(
            "algo.advantage.scorer_noise measured needs reward.source judged, and reward.monitor.preflight episodes to "
            "measure it on"
        )
