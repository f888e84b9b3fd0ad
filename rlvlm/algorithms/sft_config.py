"""How a policy is fine-tuned on demonstrations; imports nothing heavy so that the command line starts at once."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rlvlm.core.checks import check_least, check_positive, check_shares

NO_EXPERT_FIX = "--sft.demonstrations DIR, --sft.start-from DIR, or --sft.turns 0 and a model that can play a little"
"""Advice where no script plays an env."""

_WARM_UP = 20
"""Updates over which the step size of chunks rises."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """The supervised start of a run: what policies that reply and policies that act in chunks have in common."""

    demonstrations: str = ""
    """Folder that `rlvlm collect` or `rlvlm data import` made, to learn from all of it; empty: the task's expert
    plays."""
    labels: str = ""
    """Table of a judge's labels of `demonstrations`, as `rlvlm score` wrote it, e.g. `pushes.labels/labels.parquet`."""
    weighting: Literal["none", "filter", "progress", "advantage", "condition", "preference"] = "none"
    """How much each demonstrated answer counts, by `labels`. none: all alike, and in chunks failures are left out;
    filter: those of episodes worth `min_worth` or more to the judge; progress: by the gain in progress up to the next
    answer (RA-BC); advantage: exponentiated advantages (AWR), the value being a table over progress; condition: all
    alike, each with a word in its prompt on whether it did better than expected (RECAP; needs `policy.conditioned`);
    preference: pairs of segments, the better of which is to be likelier (CPL), see `sft_preferences`."""
    min_worth: float = 0.5
    """For weighting filter, in [0, 1]: episodes that the judge scores lower are left out. The page of `rlvlm score`
    says which value tells the data's own successes and failures apart best."""
    start_from: str = ""
    """Weights of another run or job to begin with, without demonstrations."""
    p_perturb: float = 0.0
    """Probability in [0, 1) that something else is carried out than what the expert does, and not learned from. So
    states are shown that the expert itself never gets into, and how it goes on from there."""
    updates: int = 80
    """Steps of the optimiser."""
    batch_size: int = 32
    """Turns, or chunks, in a step."""
    lr: float = 1e-3
    """Largest step size of AdamW; it rises first and then falls along a cosine."""

    def __post_init__(self) -> None:
        if self.demonstrations and self.start_from:
            raise ValueError(
                "sft.demonstrations would have no effect beside sft.start_from, whose policy has learned; leave one out"
            )
        if (self.weighting == "none") != (not self.labels) or (self.labels and not self.demonstrations):
            raise ValueError(
                "sft.weighting needs sft.labels, these need sft.demonstrations, and labels need a weighting, got "
                f"weighting {self.weighting}, labels {self.labels!r}, demonstrations {self.demonstrations!r}"
            )
        if self.min_worth != 0.5 and self.weighting != "filter":
            raise ValueError(f"sft.min_worth {self.min_worth:g} has no effect unless sft.weighting is filter")
        check_shares(self, "sft", "min_worth")
        if not 0 <= self.p_perturb < 1:
            raise ValueError(f"sft.p_perturb must be in [0, 1), got {self.p_perturb}")
        check_positive(self, "sft", "batch_size", "lr")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplySFTConfig(SFTConfig):
    """SFT of a policy that replies: the demonstrated replies' tokens are made likelier. `start_from` is a folder that
    `rlvlm sft` made.
    """

    turns: int = 256
    """Demonstrated turns of the task's expert, those held out included; 0 goes without this stage."""
    p_wrong: float = 0.0
    """Probability in [0, 1) that a demonstrated action is replaced by another legal one; leaves PPO something to do."""
    reply_weight: float = 0.0
    """With an action head: weight of a demonstrated reply's likelihood beside its action's, >= 0. What the thought says
    of the image then teaches the policy to see, which an action alone hardly does."""
    held_out: float = 0.1
    """Share of the demonstrated episodes that is kept for validation, in [0, 1)."""
    max_grad_norm: float = 1.0
    """Larger gradients are scaled down to this norm."""
    weight_decay: ClassVar[float] = 0.01
    betas: ClassVar[tuple[float, float]] = (0.9, 0.98)
    stream: ClassVar[int] = 5
    log_every: ClassVar[int] = 20

    def lr_at(self, update: int) -> float:
        """Step size of an update, from 0: up over the first tenth, then down to 0 along half a cosine."""
        rise = max(self.updates // 10, 1)
        if update < rise:
            return self.lr * ((update + 1) / rise)
        return self.lr * ((1 + math.cos(math.pi * (update - rise) / max(self.updates - rise, 1))) / 2)

    def __post_init__(self) -> None:
        SFTConfig.__post_init__(self)  # not super(): a class with slots is made twice, and super() knows the first
        for name in ("p_wrong", "held_out"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"sft.{name} must be in [0, 1), got {getattr(self, name)}")
        check_positive(self, "sft", "updates", "max_grad_norm")
        check_least(self, "sft", 0, "reply_weight")
        if self.turns < 0:
            raise ValueError(f"sft.turns must be >= 0, got {self.turns}; 0 goes without")

    @property
    def plays_expert(self) -> bool:
        """Whether the task's scripted expert plays the demonstrations."""
        return bool(self.turns) and not self.demonstrations and not self.start_from


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSFTConfig(SFTConfig):
    """SFT of a policy that acts in chunks: cross-entropy of the demonstrated action tokens. `start_from` is a
    checkpoint, e.g. `runs/push_block/TIME/checkpoints/best`.
    """

    episodes: int = 120
    """Episodes of the task's expert, each from an initial state of its own; only successes are learned from."""
    noise: float = 0.05
    """Standard deviation of what is added to the expert's actions, scaled to [-1, 1]."""
    label_width: float = 0.15
    """Standard deviation of the bell over bins that is a token's target, in units of the range [-1, 1] of normalised
    actions; 0 teaches the single bin. It decides how widely the policy explores: much less and the episodes of a group
    are all alike; much more and sampled actions miss. Dimensions that never change, and those that are not scaled, are
    always single bins."""
    scenes: int = 0
    """Rearranged scenes for a policy that learns to predict offsets: the robot of a demonstrated moment among the
    things of an episode's start, each moved a little. Demonstrations show the hand where it should be, so what they
    teach alone is lost where it is elsewhere. Each gradient step has two of them for each of its chunks."""
    updates: int = 600
    """Steps of the optimiser; 0 starts from the policy as it is."""
    lr: float = 2e-3
    """Largest step size of AdamW; it rises over 20 steps and falls along a cosine."""
    weight_decay: float = 1e-4
    """Weight decay of AdamW, >= 0."""
    max_grad_norm: ClassVar[float] = math.inf
    betas: ClassVar[tuple[float, float]] = (0.9, 0.999)
    stream: ClassVar[int] = 6
    log_every: ClassVar[int] = 200

    def lr_at(self, update: int) -> float:
        """Step size of an update, from 0: up over the first 20, then down along half a cosine to a fiftieth."""
        rise = min(1.0, (update + 1) / _WARM_UP)
        return self.lr * (rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * update / self.updates))))

    def __post_init__(self) -> None:
        SFTConfig.__post_init__(self)
        check_least(self, "sft", 1, "episodes")
        check_least(self, "sft", 0, "updates", "scenes", "noise", "label_width", "weight_decay")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Where and how the job runs; `SFTConfig` says what it learns."""

    num_workers: int = 1
    """Learners that take each step together, each on its part of the batch; one without a GPU of Ray's is the command's
    own process."""
    gpus_per_worker: float = 0.0
    """GPUs that Ray sets aside for each, 0 to 1; 0: one learner lies where the policy's device says, several on
    CPUs."""
    threads: int = 1
    """CPU threads of torch in each."""
    shard: bool = False
    """Whether several share out weights, gradients and AdamW's averages (FSDP2), so that a policy fits that no single
    GPU holds."""
    compute_dtype: Literal["same", "bfloat16"] = "same"
    """What sharded learners compute in. bfloat16: they gather in it too; same: as the weights are."""
    microbatch_tokens: int = 0
    """Tokens that go through the policy at once, those of images and prompts included; 0: 64 turns, or all chunks."""
    save_every: int = 50
    """Updates between checkpoints, each with a validation on what is held out."""
    max_reply_tokens: int = 256
    """A reply is cut after so many tokens when it is validated."""

    def __post_init__(self) -> None:
        check_least(self, "job", 1, "num_workers", "threads", "save_every", "max_reply_tokens")
        check_least(self, "job", 0, "gpus_per_worker", "microbatch_tokens")
        if self.shard and self.num_workers < 2:
            raise ValueError(f"job.shard needs job.num_workers >= 2, got {self.num_workers}; set both or neither")

    def learners(self) -> dict[str, Any]:
        """The fields of `PolicyGradientConfig` that say the same."""
        is_own_process = self.num_workers == 1 and not self.gpus_per_worker
        same = ("threads", "shard", "compute_dtype", "microbatch_tokens", "max_reply_tokens")
        return {name: getattr(self, name) for name in same} | {
            "num_learners": 0 if is_own_process else self.num_workers,
            "gpus_per_learner": self.gpus_per_worker,
        }
