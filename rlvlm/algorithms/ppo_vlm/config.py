"""Hyperparameters of PPO for policies that answer in text; imports nothing heavy: the command line starts at once.

An estimator of advantages and the loss that goes with it are one choice: a member of `ObjectiveConfig`.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import tyro


def _check_shares(owner: object, section: str, *names: str) -> None:
    """Raises ValueError unless every named field lies in [0, 1]."""
    for name in names:
        if not 0 <= getattr(owner, name) <= 1:
            raise ValueError(f"{section}.{name} must be in [0, 1], got {getattr(owner, name)}")


def _check_positive(owner: object, section: str, *names: str) -> None:
    """Raises ValueError unless every named field is above 0."""
    for name in names:
        if getattr(owner, name) <= 0:
            raise ValueError(f"{section}.{name} must be > 0, got {getattr(owner, name)}")


def _check_weights(owner: object, section: str, *names: str) -> None:
    """Raises ValueError unless every named field is 0 or above."""
    for name in names:
        if getattr(owner, name) < 0:
            raise ValueError(f"{section}.{name} must be >= 0, got {getattr(owner, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RL4VLMConfig:
    """One ratio per reply, in which thoughts weigh less than the action (Zhai 2024, arXiv:2405.10292)."""

    choice: ClassVar[str] = "rl4vlm"
    gamma: float = 0.9
    """Discount per turn, in [0, 1]."""
    gae_lambda: float = 0.95
    """In [0, 1]; 0 trusts the critic, 1 the rewards."""
    thought_weight: float = 0.5
    """Weight of the thought's log-probability beside the action's, in [0, 1]."""
    clip: float = 0.1
    """Largest change of the ratio that is still rewarded, > 0."""
    value_clip: float = 0.1
    """The same for the critic's value, in reward units, > 0."""
    value_weight: float = 0.5
    """Weight of the critic's loss, >= 0."""
    largest_ratio: float = 10.0
    """A minibatch with a ratio above this learns from the clipped term alone."""

    def __post_init__(self) -> None:
        _check_shares(self, "algo.objective", "gamma", "gae_lambda", "thought_weight")
        _check_positive(self, "algo.objective", "clip", "value_clip", "largest_ratio")
        _check_weights(self, "algo.objective", "value_weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPPOConfig:
    """A ratio per token, the turn's advantage for all tokens of its reply (VL-DAC's form)."""

    choice: ClassVar[str] = "token_ppo"
    gamma: float = 0.9
    """Discount per turn, in [0, 1]."""
    gae_lambda: float = 0.95
    """In [0, 1]; 0 trusts the critic, 1 the rewards."""
    clip: float = 0.2
    """Largest change of a token's ratio that is still rewarded, > 0."""
    kl_weight: float = 0.0
    """Weight of the divergence from the policy that PPO started with, >= 0."""
    entropy_weight: float = 0.0
    """Weight of the entropy of the action's tokens, >= 0; larger explores more."""
    value_weight: float = 0.5
    """Weight of the critic's loss, >= 0."""
    value_warm_up: int = 0
    """Updates at the start in which only the critic learns."""
    is_shrunk: bool = True
    """Whether an update is taken back as far as it may be chance, see `losses.kept_share`. A reward that says nothing
    then leaves the policy as it is, instead of wearing it down."""

    def __post_init__(self) -> None:
        _check_shares(self, "algo.objective", "gamma", "gae_lambda")
        _check_positive(self, "algo.objective", "clip")
        _check_weights(self, "algo.objective", "kl_weight", "entropy_weight", "value_weight", "value_warm_up")


@dataclass(frozen=True, kw_only=True, slots=True)
class BiLevelConfig:
    """Advantages of turns first, then of the tokens within each turn (VAGEN); the critic judges every token."""

    choice: ClassVar[str] = "bi_level"
    turn_gamma: float = 0.9
    """Discount per turn, in [0, 1]."""
    turn_lambda: float = 0.95
    """Of the turns' advantages, in [0, 1]."""
    token_gamma: float = 1.0
    """Discount per token within a reply, in [0, 1]."""
    token_lambda: float = 1.0
    """Of the tokens' advantages, in [0, 1]."""
    clip: float = 0.2
    """Largest change of a token's ratio that is still rewarded, > 0."""
    kl_weight: float = 0.0
    """Weight of the divergence from the policy that PPO started with, >= 0."""
    entropy_weight: float = 0.0
    """Weight of the entropy of the action's tokens, >= 0."""
    value_weight: float = 0.5
    """Weight of the critic's loss, >= 0."""
    value_warm_up: int = 0
    """Updates at the start in which only the critic learns."""
    is_shrunk: bool = True
    """Whether an update is taken back as far as it may be chance, see `losses.kept_share`. A reward that says nothing
    then leaves the policy as it is, instead of wearing it down."""

    def __post_init__(self) -> None:
        _check_shares(self, "algo.objective", "turn_gamma", "turn_lambda", "token_gamma", "token_lambda")
        _check_positive(self, "algo.objective", "clip")
        _check_weights(self, "algo.objective", "kl_weight", "entropy_weight", "value_weight", "value_warm_up")


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig:
    """No critic: an episode is compared with others from the same start (Shao 2024, arXiv:2402.03300)."""

    choice: ClassVar[str] = "grpo"
    group_size: int = 8
    """Episodes from each start, >= 2; it must divide the number of envs."""
    is_scaled: bool = True
    """Whether a group's advantages are divided by their standard deviation."""
    clip: float = 0.2
    """Largest change of a token's ratio that is still rewarded, > 0."""
    kl_weight: float = 0.0
    """Weight of the divergence from the policy that PPO started with, >= 0."""
    entropy_weight: float = 0.0
    """Weight of the entropy of the action's tokens, >= 0."""

    def __post_init__(self) -> None:
        _check_group(self.group_size)
        _check_positive(self, "algo.objective", "clip")
        _check_weights(self, "algo.objective", "kl_weight", "entropy_weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class GiGPOConfig:
    """GRPO that also compares turns of a group which saw the very same image (Feng 2025, arXiv:2505.10978)."""

    choice: ClassVar[str] = "gigpo"
    group_size: int = 8
    """Episodes from each start, >= 2; it must divide the number of envs."""
    gamma: float = 0.95
    """Discount per turn of the returns that turns are compared by, in [0, 1]."""
    step_weight: float = 1.0
    """Weight of the comparison of turns beside that of episodes, >= 0."""
    is_scaled: bool = True
    """Whether advantages are divided by the standard deviation of those compared."""
    clip: float = 0.2
    """Largest change of a token's ratio that is still rewarded, > 0."""
    kl_weight: float = 0.0
    """Weight of the divergence from the policy that PPO started with, >= 0."""
    entropy_weight: float = 0.0
    """Weight of the entropy of the action's tokens, >= 0."""

    def __post_init__(self) -> None:
        _check_group(self.group_size)
        _check_shares(self, "algo.objective", "gamma")
        _check_positive(self, "algo.objective", "clip")
        _check_weights(self, "algo.objective", "step_weight", "kl_weight", "entropy_weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """PPO for a policy whose action comes from a head over the legal actions, without any text."""

    choice: ClassVar[str] = "head"
    gamma: float = 0.99
    """Discount per turn, in [0, 1]."""
    gae_lambda: float = 0.95
    """In [0, 1]; 0 trusts the critic, 1 the rewards."""
    clip: float = 0.2
    """Largest change of the ratio that is still rewarded, > 0."""
    entropy_weight: float = 0.01
    """Weight of the actions' entropy, >= 0."""
    value_weight: float = 0.5
    """Weight of the critic's loss, >= 0."""
    is_shrunk: bool = True
    """Whether an update is taken back as far as it may be chance, see `losses.kept_share`. A reward that says nothing
    then leaves the policy as it is, instead of wearing it down."""

    def __post_init__(self) -> None:
        _check_shares(self, "algo.objective", "gamma", "gae_lambda")
        _check_positive(self, "algo.objective", "clip")
        _check_weights(self, "algo.objective", "entropy_weight", "value_weight")


def _check_group(size: int) -> None:
    """Raises ValueError for a group that has nothing to compare with."""
    if size < 2:
        raise ValueError(f"algo.objective.group_size must be >= 2, got {size}: one episode has nothing to compare with")


ObjectiveConfig = TokenPPOConfig | RL4VLMConfig | BiLevelConfig | GiGPOConfig | GRPOConfig | HeadConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig:
    """PPO whose actions are replies in text (Schulman 2017, arXiv:1707.06347; Zhai 2024, arXiv:2405.10292)."""

    objective: (
        Annotated[TokenPPOConfig, tyro.conf.subcommand("token_ppo")]
        | Annotated[RL4VLMConfig, tyro.conf.subcommand("rl4vlm")]
        | Annotated[BiLevelConfig, tyro.conf.subcommand("bi_level")]
        | Annotated[GiGPOConfig, tyro.conf.subcommand("gigpo")]
        | Annotated[GRPOConfig, tyro.conf.subcommand("grpo")]
        | Annotated[HeadConfig, tyro.conf.subcommand("head")]
    ) = field(default_factory=TokenPPOConfig)
    """How advantages are estimated, and the loss that uses them."""
    num_envs: int = 32
    """Envs played side by side; their replies are sampled as one batch."""
    rollout_turns: int = 512
    """Turns between updates, of all envs together; objectives with groups play one episode per env instead."""
    epochs: int = 2
    """Passes over a rollout."""
    minibatch_turns: int = 64
    """Turns per step of the optimiser."""
    microbatch_turns: int = 64
    """Turns per backward pass; smaller ones need less memory and give the same gradient."""
    lr: float = 1e-4
    """Adam's step size of the policy."""
    value_lr: float = 3e-3
    """Adam's step size of the critic's head."""
    final_lr: float = 0.1
    """Share of both step sizes that is left at the run's last step; they fall along half a cosine."""
    max_grad_norm: float = 1.0
    """Larger gradients are scaled down to this norm."""
    largest_kl: float = 0.2
    """Divergence from the rollout's policy, in nats per reply, at which an update ends early; 0 never ends it."""
    most_unreadable: float = 0.0
    """Share in [0, 1] of a rollout's replies that nobody can read above which the run stops; 0 never stops."""
    reward_scale: float = 1.0
    """Factor on rewards before learning; figures shown are not scaled."""
    temperature: float = 1.0
    """Of sampling in training and in sampled evaluations, > 0."""
    max_reply_tokens: int = 48
    """A reply is cut after this many tokens."""
    is_value_detached: bool = True
    """Whether the critic's loss leaves the policy's body alone. Where it does not, returns of a few units are enough to
    make a policy forget its format within an update."""
    keeps_vision: bool = False
    """Whether a vision encoder that learns (policy.train_vision) does so in the supervised start alone. PPO then looks
    once at each image and its updates take a third of the time."""
    threads: int = 1
    """CPU threads of torch in each learner's process."""
    num_learners: int = 0
    """Processes that take each step together, with the gradient of one; 0: one, in the run's own process. Of `rl4vlm`
    each judges by itself whether a ratio exceeds `largest_ratio`, as micro-batches do."""
    gpus_per_learner: float = 0.0
    """GPUs that Ray sets aside for each learner of `num_learners`."""

    def __post_init__(self) -> None:
        _check_positive(
            self, "algo", "num_envs", "rollout_turns", "epochs", "minibatch_turns", "microbatch_turns", "lr",
            "value_lr", "max_grad_norm", "reward_scale", "temperature", "max_reply_tokens", "threads",
        )  # fmt: skip
        _check_shares(self, "algo", "final_lr", "most_unreadable")
        _check_weights(self, "algo", "largest_kl", "num_learners", "gpus_per_learner")
        if self.gpus_per_learner and not self.num_learners:
            raise ValueError("algo.gpus_per_learner has no effect without algo.num_learners; set both or neither")
        if self.num_learners > self.minibatch_turns:
            raise ValueError(
                f"algo.minibatch_turns must be >= algo.num_learners, got {self.minibatch_turns} and "
                f"{self.num_learners}: some learners would never see a turn"
            )
        if self.rollout_turns % self.num_envs:
            raise ValueError(
                f"algo.num_envs must divide algo.rollout_turns, got {self.num_envs} and {self.rollout_turns}"
            )
        size = getattr(self.objective, "group_size", 1)
        if self.num_envs % size:
            raise ValueError(f"algo.objective.group_size must divide algo.num_envs, got {size} and {self.num_envs}")

    @property
    def turns_per_env(self) -> int:
        """Turns that each env is played between updates."""
        return self.rollout_turns // self.num_envs


def rl4vlm_parity() -> PPOConfig:
    """The flags of RL4VLM's scripts for NumberLine; what its engine made of them differs (docs/policies.md)."""
    return PPOConfig(
        objective=RL4VLMConfig(), num_envs=1, rollout_turns=512, epochs=4, minibatch_turns=128, microbatch_turns=1,
        lr=1e-5, value_lr=1e-5, final_lr=1e-4, max_grad_norm=0.01, largest_kl=0.0, temperature=0.2,
        max_reply_tokens=256, is_value_detached=False,
    )  # fmt: skip
