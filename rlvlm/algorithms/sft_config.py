"""Settings of fine-tuning on demonstrations; imports nothing heavy so that the command line starts at once."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

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
from rlvlm.core.leads import FilePath
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig

NO_EXPERT_FIX = "--sft.demonstrations DIR, --sft.start-from DIR, or --sft.turns 0 and a model that can play a little"
"""Advice if no script plays an env."""

_WARM_UP = 20
"""Updates over which the step size of policies in chunks rises."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """Settings of a run's supervised start that are common to policies with replies and with chunks."""

    demonstrations: FilePath = ""
    """Folder from `rlvlm collect` or `rlvlm data import`, all of whose episodes are used; empty: the task's expert
    plays."""
    labels: FilePath = ""
    """Table of a judge's labels of `demonstrations`, written by `rlvlm score`, e.g. `pushes.labels/labels.parquet`."""
    weighting: Literal["none", "filter", "progress", "advantage", "condition", "iql", "preference"] = "none"
    """Weights of demonstrated answers by `labels`. none: all equal, and failures are left out in chunks; filter:
    episodes worth `min_worth` or more to the judge; progress: by the gain in progress up to the next answer (RA-BC);
    advantage: exponentiated advantages (AWR); condition: all equal, each labelled in its prompt as better or worse than
    expected (needs `policy.conditioned`; see `advantage_prompt`), by the advantages of `advantage`: of
    `advantage_steps` answers, from the value of `rlvlm score --value` (RECAP), or without one an episode's worth minus
    a table over progress (conditioned on judged return); iql: exponentiated, of one answer, from that value's upper
    expectile (the policy of implicit Q-learning); preference: pairs of segments, the better of which becomes
    more likely (CPL), see `sft_preferences`."""
    min_worth: Annotated[Share, Needs("weighting", "filter")] = 0.5
    """Minimum score in [0, 1] by the judge of episodes used with weighting filter. The page of `rlvlm score` shows
    which value best separates the data's own successes and failures."""
    advantage_steps: Annotated[NonNegativeInt, Needs("weighting", "advantage or condition")] = 5
    """Answers after which an advantage takes the value in place of what came, for weightings advantage and condition
    of labels with a value; 0: the outcome at the episode's end."""
    start_from: FilePath = ""
    """Weights of another run or job to begin with, instead of demonstrations."""
    p_perturb: Annotated[float, Bound("[0, 1)")] = 0.0
    """Probability in [0, 1) that the expert's action is replaced by another one, which is not learned from. This shows
    states that the expert itself never gets into, and how to continue from there."""
    updates: PositiveInt = 80
    """Number of optimiser steps."""
    batch_size: PositiveInt = 32
    """Turns, or chunks, per step."""
    lr: PositiveFloat = 1e-3
    """Maximum step size of AdamW; it first rises and then falls along a cosine."""

    @property
    def plays_expert(self) -> bool:
        """Whether the task's scripted expert plays the demonstrations, which not every env has."""
        return False

    def script_options(self) -> dict[str, Any]:
        """Returns how the task's script plays the demonstrations, as options of `rlvlm collect`."""
        return {}

    def __post_init__(self) -> None:
        check_bounds(self, "sft")
        if self.demonstrations and self.start_from:
            raise ValueError(
                "sft.demonstrations would have no effect beside sft.start_from, whose policy has learned; leave one out"
            )
        if (self.weighting == "none") != (not self.labels) or (self.labels and not self.demonstrations):
            raise ValueError(
                "sft.weighting needs sft.labels, these need sft.demonstrations, and labels need a weighting, got "
                f"weighting {self.weighting}, labels {self.labels!r}, demonstrations {self.demonstrations!r}"
            )

    def check_policy(self, policy: PolicyConfig | VLAConfig) -> None:
        """Raises ValueError if these settings and the policy's contradict each other, or have no effect on it."""
        is_taught = self.weighting == "condition"
        if is_taught != policy.conditioned and not (policy.conditioned and self.start_from):
            raise ValueError(
                "policy.conditioned asks for what sft.weighting condition teaches, and one has no effect without the "
                f"other, got {policy.conditioned} and {self.weighting}; set both or neither"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplySFTConfig(SFTConfig):
    """SFT of a policy with replies, which makes the demonstrated replies' tokens more likely. `start_from` is a folder
    of `rlvlm sft`, or a checkpoint of a run.
    """

    turns: NonNegativeInt = 256
    """Demonstrated turns of the task's expert, including those held out; 0 skips this stage."""
    p_wrong: Annotated[float, Bound("[0, 1)")] = 0.0
    """Probability in [0, 1) that a demonstrated action is replaced by another legal one, so that PPO can improve on
    it."""
    reply_weight: NonNegativeFloat = 0.0
    """Weight of a demonstrated reply's likelihood beside its action's, with an action head, >= 0. The thought's
    description of the image then teaches the policy to see, which an action alone hardly does."""
    held_out: Annotated[float, Bound("[0, 1)")] = 0.1
    """Share of the demonstrated episodes held out for validation, in [0, 1)."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum norm of gradients; larger ones are scaled down to it."""
    weight_decay: ClassVar[float] = 0.01
    betas: ClassVar[tuple[float, float]] = (0.9, 0.98)
    stream: ClassVar[int] = 5
    log_every: ClassVar[int] = 20

    def lr_at(self, update: int) -> float:
        """Returns the step size of an update, from 0: up over the first tenth, then down to 0 along half a cosine."""
        rise = max(self.updates // 10, 1)
        if update < rise:
            return self.lr * ((update + 1) / rise)
        return self.lr * ((1 + math.cos(math.pi * (update - rise) / max(self.updates - rise, 1))) / 2)

    @property
    def plays_expert(self) -> bool:
        """Whether the task's scripted expert plays the demonstrations."""
        return bool(self.turns) and not self.demonstrations and not self.start_from


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSFTConfig(SFTConfig):
    """SFT of a policy in chunks, by cross-entropy of the demonstrated action tokens. `start_from` is a checkpoint, e.g.
    `runs/push_block/TIME/checkpoints/best`.
    """

    episodes: PositiveInt = 120
    """Episodes of the task's expert, each from an initial state of its own; only successes are learned from."""
    noise: NonNegativeFloat = 0.05
    """Standard deviation of the noise added to the expert's actions, scaled to [-1, 1]."""
    label_width: NonNegativeFloat = 0.15
    """Standard deviation of the bell over bins that is a token's target, in units of the range [-1, 1] of normalised
    actions; 0 teaches the single bin. It decides how widely the policy explores: with much less, a group's episodes are
    all alike; with much more, sampled actions miss. Constant dimensions, and those that are not scaled, always use
    single bins."""
    scenes: NonNegativeInt = 0
    """Number of rearranged scenes for a policy that learns to predict offsets: the robot of a demonstrated moment among
    the things of an episode's start, each moved a little. Demonstrations only show the hand where it should be, so
    training on them alone fails elsewhere. Each gradient step has two such scenes for each of its chunks."""
    updates: NonNegativeInt = 600
    """Number of optimiser steps; 0 starts from the policy as it is."""
    lr: float = 2e-3
    """Maximum step size of AdamW; it rises over 20 steps and falls along a cosine."""
    weight_decay: NonNegativeFloat = 1e-4
    """Weight decay of AdamW, >= 0."""
    max_grad_norm: ClassVar[float] = math.inf
    betas: ClassVar[tuple[float, float]] = (0.9, 0.999)
    stream: ClassVar[int] = 6
    log_every: ClassVar[int] = 200

    def check_policy(self, policy: PolicyConfig | VLAConfig) -> None:
        SFTConfig.check_policy(self, policy)
        assert isinstance(policy, VLAConfig), "replies have settings of their own"
        if self.scenes and not (policy.model or policy.pocket.predicts_offsets):
            raise ValueError(
                f"sft.scenes {self.scenes} has no effect on a policy that does not learn to predict offsets; set "
                "--policy.pocket.predicts-offsets, or --sft.scenes 0"
            )
        # flows are fine-tuned on a folder; for OpenVLA-OFT's tokens this was not tried
        told = {"demonstrations": self.demonstrations and policy.head != "flow", "start_from": self.start_from}
        if policy.model and (idle := [name for name, value in told.items() if value]):
            raise ValueError(f"sft.{idle[0]} has no effect on policy.model, which comes trained; leave one out")

    def script_options(self) -> dict[str, Any]:
        return {"episodes": self.episodes, "noise": self.noise, "p_perturb": self.p_perturb}

    def lr_at(self, update: int) -> float:
        """Returns the step size of an update, from 0: up over the first 20, then along half a cosine to a fiftieth."""
        rise = min(1.0, (update + 1) / _WARM_UP)
        return self.lr * (rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * update / self.updates))))


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Resources and checkpoints of the job; `SFTConfig` decides what it learns."""

    num_workers: PositiveInt = 1
    """Number of learners that take each step together, each on its part of the batch; a single one without a GPU from
    Ray is the command's own process."""
    gpus_per_worker: NonNegativeFloat = 0.0
    """GPUs that Ray reserves for each learner, 0 to 1; 0: a single learner uses the policy's device, several use
    CPUs."""
    threads: PositiveInt = 1
    """CPU threads of torch in each learner."""
    shard: bool = False
    """Whether learners shard weights, gradients and AdamW's averages (FSDP2), for a policy too large for any single
    GPU."""
    compute_dtype: Literal["same", "bfloat16"] = "same"
    """Compute dtype of sharded learners. bfloat16: also for gathering; same: that of the weights."""
    microbatch_tokens: NonNegativeInt = 0
    """Tokens per forward pass, including those of images and prompts; 0: 64 turns, or all chunks."""
    save_every: PositiveInt = 50
    """Updates between checkpoints, each with a validation on held-out data."""
    max_reply_tokens: PositiveInt = 256
    """Maximum reply length in validation, tokens."""

    def __post_init__(self) -> None:
        check_bounds(self, "job")
        if self.shard and self.num_workers < 2:
            raise ValueError(f"job.shard needs job.num_workers >= 2, got {self.num_workers}; set both or neither")

    def learners(self) -> dict[str, Any]:
        """Returns the equivalent fields of `PolicyGradientConfig`."""
        is_own_process = self.num_workers == 1 and not self.gpus_per_worker
        same = ("threads", "shard", "compute_dtype", "microbatch_tokens", "max_reply_tokens")
        return {name: getattr(self, name) for name in same} | {
            "num_learners": 0 if is_own_process else self.num_workers,
            "gpus_per_learner": self.gpus_per_worker,
        }
