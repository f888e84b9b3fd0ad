"""Hyperparameters of policy gradients; imports nothing heavy so that the command line starts at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

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
from rlvlm.core.errors import UsageError
from rlvlm.core.leads import CodeRef
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.rewards.config import TurnRewardConfig, ValueConfig

Granularity = Literal["token", "action", "answer", "weighted"]
Averaging = Literal["turn", "trajectory", "token", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """Settings by which rewards become advantages and groups count as useful.

    An estimator reads only the settings that it needs.
    """

    estimator: CodeRef = "gae"
    """Name in `advantages.ESTIMATORS` (gae, gae_tokens, bi_level, grpo, rloo, grpo_turns, rloo_turns, gigpo), or an
    estimator of your own as `module:FUNCTION`."""
    gamma: Share = 0.9
    """Discount per turn, or per chunk, in [0, 1]; grpo and rloo compare whole episodes and use none."""
    gae_lambda: Share = 0.95
    """Lambda of GAE, for estimators with a critic, in [0, 1]; 0 trusts the critic, 1 the rewards."""
    token_gamma: Share = 1.0
    """Discount per token within an answer, in [0, 1]; for estimators with a value before every token."""
    token_lambda: Share = 1.0
    """Lambda of GAE over the tokens of an answer, in [0, 1]; for the same estimators."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of gigpo's comparison of turns relative to that of episodes, >= 0."""
    divide_by_std: bool = True
    """Whether advantages are divided by the standard deviation of their group or, with a critic, centred and divided by
    that of the whole update."""
    values: Literal["policy", "state"] = "policy"
    """Source of the values for an estimator with a critic. policy: the policy's own value head; state: a network that
    sees the simulator's state, with an episode's score as its only reward."""
    critic: Annotated[ValueConfig, Needs("values", "state")] = field(default_factory=ValueConfig)
    """The network of `values state`; it predicts an episode's score before each of its chunks."""
    min_spread: PositiveFloat = 1e-3
    """Minimum difference between the largest and the smallest score of a group, > 0; other groups are dropped."""
    scorer_noise: NonNegativeFloat | Literal["measured"] = 0.0
    """Standard deviation of the scorer when asked again about the same episode; a group whose own standard deviation is
    at most `noise_factor` times this is dropped. 0: the scorer repeats itself, as the env's own test does. measured: it
    is asked twice about the episodes of `monitor.preflight` before training."""
    noise_factor: Annotated[PositiveFloat, Needs("scorer_noise")] = 2.0
    """Factor on `scorer_noise`, > 0."""

    def __post_init__(self) -> None:
        check_bounds(self, "algo.advantage")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Settings of an update's loss: a clipped surrogate, a critic's error, a divergence and an entropy."""

    policy: CodeRef = "clipped"
    """Name in `losses.POLICY_LOSSES` (clipped, guarded), or a loss of your own as `module:FUNCTION`."""
    ratio: Granularity = "token"
    """Unit of the probability ratio. token: each token; action: each action of a chunk, over its dimensions; answer:
    each reply or chunk as a whole; weighted: each reply, with thoughts weighing less than the action (RL4VLM)."""
    average: Averaging = "turn"
    """Averaging of losses. turn: sum over a reply's tokens, mean over turns (the gradient of whole replies);
    trajectory: every episode has the same weight, however long; token: every token has the same weight; constant: sum
    over an episode's tokens divided by the number of tokens of the longest possible episode (Dr. GRPO)."""
    clip_low: Annotated[float, Bound("(0, 1)")] = 0.2
    """Lower clip of the ratio: below 1 - clip_low there is no further gain; in (0, 1)."""
    clip_high: PositiveFloat = 0.2
    """Upper clip of the ratio: above 1 + clip_high there is no further gain; > 0."""
    correction: Literal["auto", "none", "token", "sequence"] = "auto"
    """Importance weights: the trainer's probability of the sampled tokens over the engine's, per token or per answer
    (sequence). An engine in 16 bits, or with kernels of its own, is not exactly the policy in training. Costs a pass
    through the policy before each update. auto: token if engines run on vLLM or sharded learners compute in another
    precision than they, else none."""
    correction_cap: Annotated[float, Bound(">= 1")] = 2.0
    """Maximum importance weight of an answer, >= 1."""
    beyond_cap: Literal["truncate", "mask"] = "truncate"
    """Treatment of weights above `correction_cap`. truncate: reduced to it; mask: these, and those below
    1 / `correction_cap`, are not learned from."""
    dual_clip: Annotated[float, Bound("> 1")] | None = None
    """Bound on the loss at negative advantages, dual_clip * |advantage|; > 1, or None for no bound."""
    max_ratio: PositiveFloat = 10.0
    """Maximum ratio for loss guarded: a minibatch with a larger one only uses the clipped term."""
    thought_weight: Share = 0.5
    """Weight of the thought's log-probability relative to the action's for ratio weighted, in [0, 1]."""
    kl_weight: NonNegativeFloat = 0.0
    """Weight of the KL divergence (k3 estimate) from the policy after its supervised start, >= 0."""
    entropy_weight: NonNegativeFloat = 0.0
    """Weight of the entropy of the action's tokens, >= 0; larger values explore more."""
    value_weight: NonNegativeFloat = 0.5
    """Weight of the critic's loss, >= 0, if the policy has a critic."""
    value_clip: PositiveFloat | None = None
    """Clip on the distance of a value from its old one, in reward units, > 0; None: no clip."""

    def __post_init__(self) -> None:
        check_bounds(self, "algo.loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradientConfig:
    """Settings of rollouts, advantages and updates; the defaults are PPO's for policies in text."""

    preset: Literal["ppo", "grpo", "rloo", "gigpo"] = "ppo"
    """Estimator and loss to begin with."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    num_envs: PositiveInt = 32
    """Number of parallel envs in turns; their replies are sampled as one batch."""
    rollout: Literal["synchronous", "asynchronous"] = "synchronous"
    """When envs wait for each other. synchronous: all envs wait for the slowest reply of their round, and chunks for
    the steps of all envs. asynchronous: each env in turns continues as soon as its own reply is there, which needs
    `engine.num_replicas`; a rollout has as many turns, more of them in envs with short replies, and runs do not repeat.
    With `staleness` replies use the newest weights available, and replies or groups unfinished at the end of a rollout
    are carried over into the next one; a checkpoint leaves them out. Envs in chunks are played in two halves, one being
    stepped while the policy samples for the other, which needs `env_workers`; runs repeat."""
    rollout_turns: NonNegativeInt = 512
    """Turns between updates, of all envs together; 0: whole episodes in groups, as always for envs in chunks."""
    groups: PositiveInt = 32
    """Number of groups rolled out at once, each from one initial state, and wanted for an update."""
    group_size: PositiveInt = 8
    """Episodes per group, >= 2 if the estimator compares them."""
    rounds: PositiveInt = 3
    """Maximum number of times that groups are rolled out for one update, until enough of them are useful. All useful
    ones are learned from at once, so none is discarded or outdated."""
    env_runners: NonNegativeInt = 0
    """Processes that play groups of envs in chunks in parallel, each with a copy of the policy; 0: the run's own
    process."""
    gpus_per_env_runner: Annotated[NonNegativeFloat, Needs("env_runners")] = 0.0
    """GPUs that Ray reserves for each of `env_runners`, for its copy of the policy."""
    env_workers: NonNegativeInt = 0
    """Processes of one core, anywhere in the cluster, that step and draw the envs in chunks of each env runner, or of
    the run's own process; 0: it steps them itself, one after the other. Needed for a large policy or a slow simulator:
    the policy then samples for all envs at once, while these are stepped in parallel."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature in rollouts, updates and sampled evaluations."""
    draws: Literal["token", "chunk"] = "token"
    """Random numbers for sampling chunks. token: one for each token; chunk: one for each dimension of the action,
    shared by all steps of a chunk, so that a chunk deviates in one direction rather than trembles. Each token has the
    same distribution in both, and the update treats them as independent; evaluations always use token."""
    min_range: Share = 0.0
    """Minimum share of an action dimension's range that demonstrations use, from the 1st to the 99th percentile; other
    dimensions are not explored: their most likely token is taken, in sampled evaluations too, and no update learns from
    it. Random changes of a dimension that a script hardly uses have no effect but add noise to the gradient. 0: all are
    explored. Dimensions that are not scaled (grippers) always are."""
    max_reply_tokens: PositiveInt = 48
    """Maximum length of a reply, at which it is cut, tokens."""
    max_invalid_share: Share = 0.0
    """Maximum share of unreadable replies in a rollout, in [0, 1], above which the run stops; 0 never stops."""
    reward_scale: PositiveFloat = 1.0
    """Factor on rewards before learning; displayed figures are not scaled."""
    epochs: PositiveInt = 2
    """Passes over a rollout."""
    minibatches: NonNegativeInt = 0
    """Gradient steps per pass; 0: determined by `minibatch_turns`."""
    minibatch_turns: PositiveInt = 64
    """Turns per gradient step, if `minibatches` is 0."""
    microbatch_turns: NonNegativeInt = 64
    """Turns or chunks per forward pass within a gradient step, to save memory; 0: all of the step's. The gradient is
    the same."""
    microbatch_tokens: NonNegativeInt = 0
    """Tokens per forward pass, including those of images and prompts, instead of `microbatch_turns`: turns of similar
    length are grouped, and a longer one is alone. 0: `microbatch_turns` decides."""
    lr: PositiveFloat = 1e-4
    """Initial step size of Adam for the policy."""
    value_lr: PositiveFloat = 3e-3
    """Initial step size of Adam for the critic's head."""
    min_lr_ratio: Annotated[float, Bound("(0, 1]")] = 0.1
    """Share of the step sizes left at the run's last step, in (0, 1]: they decay along half a cosine, and `kl_target`
    with its square. If a whole episode has only one bit of reward, an update is mostly noise; shorter steps average
    over it."""
    warm_up: NonNegativeInt = 0
    """Updates over which the step size rises to `lr`."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's betas."""
    adam_eps: PositiveFloat = 1e-6
    """Adam's epsilon."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum norm of gradients; larger ones are scaled down to it."""
    max_kl: NonNegativeFloat = 0.2
    """Maximum divergence from the rollout's policy, in nats per answer, after which an update takes no further step; 0:
    no maximum."""
    kl_target: PositiveFloat | None = None
    """Target divergence of an update per answer, in nats: the step size changes by a factor of 1.3 if an update ended
    below 2/3 or above 3/2 of it, and an update that reaches twice the target takes no further step. With `staleness` it
    includes the updates since the rollout, so each moves the policy by less. It is measured before each gradient step,
    so an update needs at least two. An update with fewer groups than `groups` has a proportionally smaller target.
    None: the step size stays."""
    shrinkage: bool = True
    """Whether an update with a critic is shrunk by the part that may be noise, see `losses.james_stein_share`. A
    meaningless reward then leaves the policy as it is, instead of degrading it."""
    value_warm_up: NonNegativeInt = 0
    """Updates at the start in which only the critic is trained."""
    is_value_detached: bool = True
    """Whether the critic's loss leaves the policy's body unchanged. Otherwise returns of a few units suffice to make a
    policy forget its format within an update."""
    keeps_vision: bool = False
    """Whether a trained vision encoder (policy.train_vision) is only trained in the supervised start. Updates then
    encode each image once and take a third of the time."""
    threads: PositiveInt = 1
    """CPU threads of torch in each learner's process."""
    staleness: NonNegativeInt = 0
    """Maximum age of the data in an update, in updates, >= 0. 1: the next rollout is played and scored while the
    learner learns from the one before it. Rollouts are played by `env_runners` or `engine.num_replicas`; if the run's
    own process plays, only their scores are not waited for. 2: for rollouts and updates that take turns at being
    slower. Every rollout has exactly this age, so runs repeat; only asynchronous ones may be newer. Checkpoints and
    evaluations wait until no rollout is running."""
    num_learners: NonNegativeInt = 0
    """Processes that take each step together, with the gradient of one; 0: one, in the run's own process. With loss
    guarded each decides on its own whether a ratio exceeds `max_ratio`, as micro-batches do."""
    shard: bool = False
    """Whether the learners of `num_learners` shard the policy's weights, gradients and Adam's averages (FSDP2), for a
    policy too large for any single GPU. The gradient is the same; every pass gathers the weights anew."""
    compute_dtype: Annotated[Literal["same", "bfloat16"], Needs("shard")] = "same"
    """Compute dtype of sharded learners. bfloat16: weights are gathered and computed in it, while Adam updates the
    slices in their own, float32 if all weights are trained; same: that of the weights."""
    deterministic: bool = False
    """Whether gradients on a GPU use deterministic kernels, without which runs in bfloat16 neither repeat nor resume
    exactly. Slower; raises an error that names the operation if torch has no such kernel."""
    offload: bool = False
    """Whether Adam's averages, and the slices of the policy that `loss.kl_weight` compares with, are kept in main
    memory when nothing is being learned: for a policy that samples on the GPU on which it learns, or with
    `engine.colocated`. They are moved twice per update; results are the same."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of a VLA in training in the run's own process. auto: a GPU that Ray or SLURM assigned to it, else the CPU;
    cuda: the first visible GPU. For a VLM see policy.device."""
    gpus_per_learner: Annotated[NonNegativeFloat, Needs("num_learners")] = 0.0
    """GPUs that Ray reserves for each learner of `num_learners`."""
    gpu_type: Annotated[str, Needs("gpus_per_learner")] = ""
    """Kind of the learners' GPUs, as `serve.gpu_type`; empty: any."""

    def __post_init__(self) -> None:  # noqa: C901 - one rule after the other
        check_bounds(self, "algo")
        gpus = self.gpus_per_learner
        if gpus > 1 or (self.num_learners > 1 and gpus not in (0, 1)):
            raise ValueError(
                f"algo.gpus_per_learner must be 1, or 0 for a CPU, got {gpus:g}: a learner computes on one GPU, and "
                "NCCL refuses two learners on the same; a single learner may share its own (0 to 1)"
            )
        if self.shard and self.num_learners < 2:
            raise ValueError("algo.shard has no effect without algo.num_learners >= 2; set both or neither")
        if self.num_learners > self.minibatch_turns:
            raise ValueError(
                f"algo.minibatch_turns must be >= algo.num_learners, got {self.minibatch_turns} and "
                f"{self.num_learners}: some learners would never see a turn"
            )
        if self.rollout_turns % self.num_envs:
            raise ValueError(
                f"algo.num_envs must divide algo.rollout_turns, got {self.num_envs} and {self.rollout_turns}"
            )
        if self.kl_target is not None and self.epochs * self.minibatches == 1:
            raise ValueError(
                "algo.kl_target needs updates of two gradient steps at least: how far one has moved the policy is "
                "measured before its last step; set kl_target None, or minibatches or epochs >= 2"
            )

    def check_with(self, policy: PolicyConfig | VLAConfig, reward: TurnRewardConfig, *, is_served: bool) -> None:
        """Raises ValueError if these settings and those of other sections contradict each other, or one is useless
        beside another. A run asks when it is made; RLlib's config, which may be made by hand, when it is validated.

        Args:
            policy: the policy in training.
            reward: its reward.
            is_served: whether engines behind Serve sample for it.
        """
        device, quantization = policy.loading.device, getattr(policy, "quantization", "none")
        if device.startswith("cuda:") and (is_served or self.num_learners):
            raise ValueError(
                f"{device} is a GPU as the run's own process counts them; learners and replicas each see the one that "
                "Ray assigns to them: set the policy's device to cuda, and CUDA_VISIBLE_DEVICES for the run's own "
                "process"
            )
        if policy.is_own and is_served:
            raise ValueError(
                f"policy.head {policy.head} samples in the run's own process, and engine.num_replicas would sample for "
                "it; leave it out"
            )
        if self.shard and quantization != "none":
            raise ValueError(
                f"policy.quantization {quantization} does not go with algo.shard: 4-bit weights are not shared out; "
                "leave it out, for slices of bfloat16 weights beside an adapter take as little from two GPUs on, or "
                "leave out algo.shard, so that each learner holds all 4-bit weights"
            )
        if self.staleness and not (self.env_runners or is_served or reward.scores):
            raise ValueError(
                f"algo.staleness {self.staleness} has no effect where the run's own process plays and nobody scores; "
                "set --engine.num-replicas for replies, --algo.env-runners for chunks, or --algo.staleness 0"
            )
        # the noise is measured by the judge's scores of known episodes, which the preflight plays
        if self.advantage.scorer_noise == "measured" and not (reward.scores and reward.monitor.preflight):
            raise ValueError(
                "algo.advantage.scorer_noise measured needs reward.source judged, and reward.monitor.preflight "
                "episodes to measure it on"
            )


PRESETS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "ppo": ({"estimator": "gae"}, {"average": "turn", "clip_high": 0.2}),
    "grpo": ({"estimator": "grpo"}, {"average": "trajectory", "clip_high": 0.28}),
    "rloo": ({"estimator": "rloo"}, {"average": "trajectory", "clip_high": 0.28}),
    "gigpo": ({"estimator": "gigpo"}, {"average": "trajectory", "clip_high": 0.28}),
}
"""Settings of each `algo.preset` in `algo.advantage` and `algo.loss`. ppo: a critic (Schulman et al. 2017,
arXiv:1707.06347);
grpo: whole episodes in groups from one start, compared with each other (Shao et al. 2024, arXiv:2402.03300); rloo: each
compared with the mean of the others (Ahmadian et al. 2024, arXiv:2402.14740); gigpo: their turns compared too, where
they saw the same (Feng et al. 2025, arXiv:2505.10978)."""


def with_preset(algo: PolicyGradientConfig, preset: str, **rollouts: Any) -> PolicyGradientConfig:
    """Returns `algo` with the estimator and the loss of a preset; step sizes, batches and the rest stay as they are.

    Args:
        algo: settings to change.
        preset: a name in `PRESETS`.
        rollouts: fields of `algo` that the preset needs for its rollouts.

    Raises:
        UsageError: there is no such preset.
    """
    if preset not in PRESETS:
        raise UsageError(f"there is no algo.preset {preset}", f"one of {', '.join(PRESETS)}")
    advantage, loss = PRESETS[preset]
    return replace(
        algo, preset=preset, advantage=replace(algo.advantage, **advantage), loss=replace(algo.loss, **loss), **rollouts
    )


def chunk_defaults(**changes: Any) -> PolicyGradientConfig:
    """Returns GRPO as policies that act in chunks learn by it: `changes` are fields that differ."""
    about_bits: dict[str, Any] = {
        "rollout_turns": 0, "epochs": 1, "minibatches": 4, "microbatch_turns": 0, "lr": 6e-4, "min_lr_ratio": 1.0,
        "warm_up": 5, "betas": (0.9, 0.99), "adam_eps": 1e-8, "max_kl": 0.0, "kl_target": 0.3,
    }  # fmt: skip
    return replace(with_preset(PolicyGradientConfig(), "grpo", **about_bits), **changes)


def rl4vlm_parity() -> PolicyGradientConfig:
    """Returns the flags of RL4VLM's scripts for NumberLine; its engine applied them differently (docs/turn_envs.md)."""
    return PolicyGradientConfig(
        loss=LossConfig(policy="guarded", ratio="weighted", clip_low=0.1, clip_high=0.1, value_clip=0.1),
        shrinkage=False, num_envs=1, rollout_turns=512, epochs=4, minibatch_turns=128, microbatch_turns=1,
        lr=1e-5, value_lr=1e-5, min_lr_ratio=1e-4, max_grad_norm=0.01, max_kl=0.0, temperature=0.2,
        max_reply_tokens=256, is_value_detached=False,
    )  # fmt: skip
