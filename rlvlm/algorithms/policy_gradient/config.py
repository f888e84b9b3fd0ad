"""Hyperparameters of policy gradients over tokens; imports nothing heavy: the command line starts at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlvlm.core.checks import check_least, check_positive, check_shares
from rlvlm.core.errors import UsageError

Granularity = Literal["token", "action", "answer", "weighted"]
Averaging = Literal["turn", "trajectory", "token", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """A network that predicts an episode's score before each of its chunks, from the simulator's state.

    Only training has it: the policy still acts on images.
    """

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
        check_positive(self, "algo.advantage.critic", "lr")
        check_least(self, "algo.advantage.critic", 1, "hidden", "steps", "batch_size", "episodes")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """How rewards become advantages, and which groups teach anything. An estimator reads what it needs of it."""

    estimator: str = "gae"
    """Name in `advantages.ESTIMATORS` (gae, gae_tokens, bi_level, grpo, rloo, gigpo), or one of your own as
    `module:FUNCTION`."""
    gamma: float = 0.9
    """Discount per turn, or per chunk, in [0, 1]."""
    gae_lambda: float = 0.95
    """Lambda of GAE, for estimators with a critic, in [0, 1]; 0 trusts the critic, 1 the rewards."""
    token_gamma: float = 1.0
    """Discount per token within an answer, in [0, 1]; for estimators that ask the critic before every token."""
    token_lambda: float = 1.0
    """Lambda of GAE over the tokens of an answer, in [0, 1]; for the same estimators."""
    step_weight: float = 1.0
    """For gigpo: weight of the comparison of turns beside that of episodes, >= 0."""
    divide_by_std: bool = True
    """Whether advantages are divided by the standard deviation of their group, or, with a critic, centred and divided
    by that of the whole update."""
    values: Literal["policy", "state"] = "policy"
    """Whose values a critic's estimator takes. policy: those of the policy's own value head; state: those of a network
    that sees the simulator's state, and in which an episode's score is its only reward."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    min_spread: float = 1e-3
    """Groups whose largest and smallest score differ by less teach nothing and are dropped; > 0."""
    scorer_noise: float | Literal["measured"] = 0.0
    """Standard deviation of the scorer when asked again about the same episode; a group whose own standard deviation is
    not above `noise_factor` times this is dropped. 0: the scorer repeats itself, as the env's own test does. measured:
    it is asked twice about the episodes of `monitor.preflight` before anything is learned."""
    noise_factor: float = 2.0
    """See `scorer_noise`; > 0."""

    def __post_init__(self) -> None:
        section = "algo.advantage"
        check_shares(self, section, "gamma", "gae_lambda", "token_gamma", "token_lambda")
        check_least(self, section, 0, "step_weight")
        check_positive(self, section, "min_spread", "noise_factor")
        if self.scorer_noise != "measured" and self.scorer_noise < 0:
            raise ValueError(f"{section}.scorer_noise must be >= 0, or measured, got {self.scorer_noise}")
        if self.scorer_noise == 0 and self.noise_factor != 2.0:
            raise ValueError(f"{section}.noise_factor has no effect without scorer_noise; set both or neither")
        if self.values != "state" and self.critic != CriticConfig():
            raise ValueError(f"{section}.critic has no effect unless values is state")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Loss of an update: a clipped surrogate, a critic's error, a divergence and an entropy."""

    policy: str = "clipped"
    """Name in `losses.POLICY_LOSSES` (clipped, guarded), or one of your own as `module:FUNCTION`."""
    ratio: Granularity = "token"
    """Unit of the probability ratio: each token; each action of a chunk, over its dimensions; each answer as a
    whole (a reply or a chunk); weighted: each reply, in which thoughts weigh less than the action (RL4VLM)."""
    average: Averaging = "turn"
    """turn: the sum over a reply's tokens, mean over turns (the gradient of whole replies); trajectory: every episode
    weighs the same, however long; token: every token does; constant: the sum over an episode's tokens is divided by the
    longest possible episode's number of tokens (Dr. GRPO)."""
    clip_low: float = 0.2
    """A ratio below 1 - clip_low no longer pays; in (0, 1)."""
    clip_high: float = 0.2
    """A ratio above 1 + clip_high no longer pays; > 0."""
    correction: Literal["auto", "none", "token", "sequence"] = "auto"
    """Whether an answer counts by how likely the trainer finds what the engine sampled, over how likely the engine did
    (importance sampling), for each token or each answer as a whole. An engine in 16 bits, or with kernels of its own,
    is not quite the policy that is trained. It costs a pass through the policy before each update. auto: token where
    engines run on vLLM or sharded learners compute in another precision than they, else none."""
    correction_cap: float = 2.0
    """No answer counts more than this many times, >= 1."""
    beyond_cap: Literal["truncate", "mask"] = "truncate"
    """What becomes of what would count more often than `correction_cap`. truncate: it counts that often; mask: it, and
    what would count less often than 1 / `correction_cap`, is not learned from."""
    dual_clip: float | None = None
    """At negative advantages the loss is at most dual_clip * |advantage|; > 1, or None for no such bound."""
    max_ratio: float = 10.0
    """For loss guarded: a minibatch with a ratio above this learns from the clipped term alone."""
    thought_weight: float = 0.5
    """For ratio weighted: weight of the thought's log-probability beside the action's, in [0, 1]."""
    kl_weight: float = 0.0
    """Weight of the KL divergence (k3 estimate) from the policy after its supervised start, >= 0."""
    entropy_weight: float = 0.0
    """Weight of the entropy of the action's tokens, >= 0; larger explores more."""
    value_weight: float = 0.5
    """Weight of the critic's loss, >= 0, where the policy has a critic."""
    value_clip: float | None = None
    """A critic's value farther than this from its old one is held to it, > 0, in reward units; None: it is not."""

    def __post_init__(self) -> None:
        section = "algo.loss"
        if not 0 < self.clip_low < 1 or not self.clip_high > 0:
            raise ValueError(
                f"need 0 < {section}.clip_low < 1 and clip_high > 0, got {self.clip_low}, {self.clip_high}"
            )
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"{section}.dual_clip must be > 1 or None, got {self.dual_clip}")
        if self.value_clip is not None and not self.value_clip > 0:
            raise ValueError(f"{section}.value_clip must be > 0 or None, got {self.value_clip}")
        check_shares(self, section, "thought_weight")
        check_positive(self, section, "max_ratio")
        check_least(self, section, 1, "correction_cap")
        check_least(self, section, 0, "kl_weight", "entropy_weight", "value_weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradientConfig:
    """Rollouts, advantages and updates; the defaults are PPO's for policies in text."""

    preset: Literal["ppo", "grpo", "rloo", "gigpo"] = "ppo"
    """Estimator and loss that the run starts from."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    num_envs: int = 32
    """Envs that are talked to side by side; their replies are sampled as one batch."""
    rollout: Literal["synchronous", "asynchronous"] = "synchronous"
    """synchronous: all envs wait for the slowest reply of their row, and chunks for all envs' steps. asynchronous: each
    env that is talked to goes on as soon as its own reply is there, which needs `engine.num_replicas`; a rollout has as
    many turns, more of them in envs whose replies are short, and no two runs are the same. With `staleness` replies are
    by the newest weights there are, and what is unfinished at the end of a rollout, replies or groups, is carried over
    into the next one; a checkpoint leaves it out. Envs in chunks are played in two halves, one being stepped while the
    policy samples for the other, which needs `env_workers`; runs repeat."""
    rollout_turns: int = 512
    """Turns between updates, of all envs together; 0: whole episodes in groups, as envs in chunks always play."""
    groups: int = 32
    """Groups that are rolled out at once, each from one initial state, and that an update should learn from."""
    group_size: int = 8
    """Episodes of a group, >= 2 where an estimator compares them."""
    rounds: int = 3
    """Most times that groups are rolled out for one update, until enough of them teach something. All that do are
    learned from at once, so nothing is thrown away and nothing is old."""
    env_runners: int = 0
    """Processes that play groups of envs in chunks side by side, each with a copy of the policy; 0: the run's own."""
    gpus_per_env_runner: float = 0.0
    """GPUs that Ray sets aside for each of `env_runners`, for its copy of the policy."""
    env_workers: int = 0
    """Processes of one core, wherever the cluster has one, that step and draw the envs in chunks of each env runner, or
    of the run's own process; 0: it does so itself, one env after the other. A large policy or a slow simulator needs
    them: the policy then samples for all envs at once, while these are stepped side by side."""
    temperature: float = 1.0
    """Sampling temperature, in rollouts, in the update and in sampled evaluations."""
    draws: Literal["token", "chunk"] = "token"
    """Random numbers that chunks are sampled with. token: one for each token; chunk: one for each dimension of
    the action, for all steps of a chunk, so that a chunk leans to one side as a whole and does not tremble. Each token
    has the same distribution in both, and the update takes them as if they were drawn one by one; evaluations always
    draw one for each token."""
    min_range: float = 0.0
    """Dimensions of a chunk's action of whose range demonstrations use less than this share, from the 1st to the 99th
    percentile, are not explored: their likeliest token is taken, in sampled evaluations too, and no update learns from
    it. What a script hardly turns decides nothing when it is turned at random, and adds noise to the gradient. 0: all
    are explored. Dimensions that are not scaled (grippers) always are."""
    max_reply_tokens: int = 48
    """A reply is cut after this many tokens."""
    max_invalid_share: float = 0.0
    """Maximum share of unreadable replies in a rollout, in [0, 1], above which the run stops; 0 never stops."""
    reward_scale: float = 1.0
    """Factor on rewards before learning; figures shown are not scaled."""
    epochs: int = 2
    """Passes over a rollout."""
    minibatches: int = 0
    """Gradient steps of a pass; 0: as many as `minibatch_turns` makes."""
    minibatch_turns: int = 64
    """Turns of a gradient step, where `minibatches` is 0."""
    microbatch_turns: int = 64
    """Turns or chunks that go through the policy at once within a gradient step, to save memory; 0: all of the step's.
    The gradient is the same."""
    microbatch_tokens: int = 0
    """Tokens, those of images and prompts included, that go through it at once, in the place of `microbatch_turns`:
    turns of like length go together, and a single longer one goes alone. 0: `microbatch_turns` decides."""
    lr: float = 1e-4
    """First step size of Adam, of the policy."""
    value_lr: float = 3e-3
    """The same of the critic's head."""
    min_lr_ratio: float = 0.1
    """Share of the step sizes that is left at the run's last step, in (0, 1]: they fall along half a cosine, and
    `kl_target` with its square. An update is mostly noise where a whole episode has one bit to teach; shorter steps
    average over it."""
    warm_up: int = 0
    """Updates over which the step size rises to `lr`."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's."""
    adam_eps: float = 1e-6
    """Adam's."""
    max_grad_norm: float = 1.0
    """Longer gradients are cut to this norm."""
    max_kl: float = 0.2
    """Divergence from the rollout's policy, in nats per answer, after which an update takes no further step; 0 never
    ends it."""
    kl_target: float | None = None
    """Divergence per answer, in nats, that an update should come to: the step size grows or shrinks by 1.3 where an
    update ended at less than 2/3 or more than 3/2 of this, and one that has come to twice as much takes no further
    step. With `staleness` the updates since the rollout are in it too, so each moves the policy by less. It is measured
    before each gradient step, so an update needs two at least. An update of fewer groups than `groups` is to move it by
    as much less. None: the step size stays."""
    shrinkage: bool = True
    """Whether an update with a critic is taken back as far as it may be chance, see `losses.kept_share`. A reward that
    says nothing then leaves the policy as it is, instead of wearing it down."""
    value_warm_up: int = 0
    """Updates at the start in which only the critic learns."""
    is_value_detached: bool = True
    """Whether the critic's loss leaves the policy's body alone. Where it does not, returns of a few units are enough to
    make a policy forget its format within an update."""
    keeps_vision: bool = False
    """Whether a vision encoder that learns (policy.train_vision) does so in the supervised start alone. Updates then
    look once at each image and take a third of the time."""
    threads: int = 1
    """CPU threads of torch in each learner's process."""
    staleness: int = 0
    """Updates by which what is learned from may be older than the policy, >= 0. 1: the next rollout is played and
    scored while the learner learns from the one before it. Rollouts are played by `env_runners` or
    `engine.num_replicas`; where the run's own process plays, only their scores are not waited for. 2: also
    where now a rollout and now an update takes longer. Every rollout is exactly so old, so runs repeat; only
    asynchronous ones may be newer. Checkpoints and evaluations wait until no rollout is under way."""
    num_learners: int = 0
    """Processes that take each step together, with the gradient of one; 0: one, in the run's own process. Of the loss
    guarded each judges by itself whether a ratio exceeds `max_ratio`, as micro-batches do."""
    shard: bool = False
    """Whether the learners of `num_learners` share out the policy's weights, gradients and Adam's averages (FSDP2), so
    that a policy fits that no single GPU holds. The gradient is the same; every pass gathers the weights anew."""
    compute_dtype: Literal["same", "bfloat16"] = "same"
    """Compute type of sharded learners. bfloat16: weights are gathered and computed in it, and Adam changes the slices
    as they are, float32 where all weights learn; same: all as it is."""
    deterministic: bool = False
    """Whether gradients on a GPU are computed by kernels that give the same bits each time: only then do runs in
    bfloat16 repeat, and resume, exactly. Slower; it fails where torch has no such kernel, which names it."""
    offload: bool = False
    """Whether Adam's averages, and the slices of the policy that `loss.kl_weight` compares with, lie in main memory
    while nothing is learned: for a policy that samples on the GPU on which it learns, or beside `engine.colocated`.
    They travel twice per update; what is learned is the same."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where a VLA learns in the run's own process. auto: a GPU that Ray or SLURM has assigned to it, else the CPU;
    cuda: the first that is visible. A VLM lies where policy.device says."""
    gpus_per_learner: float = 0.0
    """GPUs that Ray sets aside for each learner of `num_learners`."""

    def __post_init__(self) -> None:  # noqa: C901 - one rule after the other
        check_positive(self, "algo", "lr", "value_lr", "temperature", "max_grad_norm", "reward_scale", "adam_eps")
        ones = ("num_envs", "groups", "rounds", "epochs", "minibatch_turns", "max_reply_tokens", "threads")
        check_least(self, "algo", 1, *ones, "group_size")
        check_least(
            self, "algo", 0, "rollout_turns", "minibatches", "microbatch_turns", "microbatch_tokens", "warm_up",
            "max_kl", "value_warm_up", "env_runners", "num_learners", "gpus_per_learner", "staleness",
            "gpus_per_env_runner", "env_workers",
        )  # fmt: skip
        check_shares(self, "algo", "min_lr_ratio", "max_invalid_share", "min_range")
        if not self.min_lr_ratio > 0:
            raise ValueError(f"algo.min_lr_ratio must be in (0, 1], got {self.min_lr_ratio}")
        for share, count in (("gpus_per_learner", "num_learners"), ("gpus_per_env_runner", "env_runners")):
            if getattr(self, share) and not getattr(self, count):
                raise ValueError(f"algo.{share} has no effect without algo.{count}; set both or neither")
        gpus = self.gpus_per_learner
        if gpus > 1 or (self.num_learners > 1 and gpus not in (0, 1)):
            raise ValueError(
                f"algo.gpus_per_learner must be 1, or 0 for a CPU, got {gpus:g}: a learner computes on one GPU, and "
                "NCCL refuses two learners on the same; a single learner may share its own (0 to 1)"
            )
        if self.shard and self.num_learners < 2:
            raise ValueError("algo.shard has no effect without algo.num_learners >= 2; set both or neither")
        if self.compute_dtype != "same" and not self.shard:
            raise ValueError("algo.compute_dtype is of sharded learners; set algo.shard, or policy.dtype for others")
        if self.num_learners > self.minibatch_turns:
            raise ValueError(
                f"algo.minibatch_turns must be >= algo.num_learners, got {self.minibatch_turns} and "
                f"{self.num_learners}: some learners would never see a turn"
            )
        if self.rollout_turns % self.num_envs:
            raise ValueError(
                f"algo.num_envs must divide algo.rollout_turns, got {self.num_envs} and {self.rollout_turns}"
            )
        if self.kl_target is not None and not self.kl_target > 0:
            raise ValueError(f"algo.kl_target must be > 0 or None, got {self.kl_target}")
        if self.kl_target is not None and self.epochs * self.minibatches == 1:
            raise ValueError(
                "algo.kl_target needs updates of two gradient steps at least: how far one has moved the policy is "
                "measured before its last step; set kl_target None, or minibatches or epochs >= 2"
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
    """`algo` with the estimator and the loss of a preset; step sizes, batches and the rest stay as they are.

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
    """GRPO as policies that act in chunks learn by it: `changes` are fields that differ."""
    about_bits: dict[str, Any] = {
        "rollout_turns": 0, "epochs": 1, "minibatches": 4, "microbatch_turns": 0, "lr": 6e-4, "min_lr_ratio": 1.0,
        "warm_up": 5, "betas": (0.9, 0.99), "adam_eps": 1e-8, "max_kl": 0.0, "kl_target": 0.3,
    }  # fmt: skip
    return replace(with_preset(PolicyGradientConfig(), "grpo", **about_bits), **changes)


def rl4vlm_parity() -> PolicyGradientConfig:
    """The flags of RL4VLM's scripts for NumberLine; what its engine made of them differs (docs/turn_envs.md)."""
    return PolicyGradientConfig(
        loss=LossConfig(policy="guarded", ratio="weighted", clip_low=0.1, clip_high=0.1, value_clip=0.1),
        shrinkage=False, num_envs=1, rollout_turns=512, epochs=4, minibatch_turns=128, microbatch_turns=1,
        lr=1e-5, value_lr=1e-5, min_lr_ratio=1e-4, max_grad_norm=0.01, max_kl=0.0, temperature=0.2,
        max_reply_tokens=256, is_value_detached=False,
    )  # fmt: skip
