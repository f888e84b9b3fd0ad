"""The common part of `TurnsRun` and `ChunksRun`."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.sft_config import ChunkSFTConfig, ReplySFTConfig
from rlvlm.policies.own import find_own
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.rewards.config import TurnRewardConfig
from rlvlm.runs.config import Role, RunConfig
from rlvlm.serving.config import LEARNER_ROLE


@dataclass(frozen=True, kw_only=True)
class AnswersRun(RunConfig):
    """Settings common to `TurnsRun` and `ChunksRun`: a large policy whose sampled answers, replies or chunks of
    actions, are trained by a policy gradient.
    """

    algorithm: ClassVar[str] = "policy_gradient"
    reward: TurnRewardConfig = field(default_factory=TurnRewardConfig)
    policy: PolicyConfig | VLAConfig  # pyright: ignore[reportIncompatibleVariableOverride] - here every run has one
    """Settings of the network that acts."""
    sft: ReplySFTConfig | ChunkSFTConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    """Settings of the supervised start."""
    algo: PolicyGradientConfig = field(default_factory=PolicyGradientConfig)
    """Settings of estimator, loss, rollouts and updates; `algo.preset` selects a combination."""

    def check(self) -> None:
        algo, reward, device = self.algo, self.reward, self.policy.loading.device
        if reward.asks_judge and (self.judge.score == "utility") != reward.rates_turns:
            wanted = "utility" if reward.rates_turns else "progress, success, rating or video"
            raise ValueError(
                f"reward.per {reward.per} is asked with judge.score {wanted}, got {self.judge.score}: the utility is "
                "that of one turn or chunk, the others are about an episode; with reward.clip growing a turn has the "
                "gain of these"
            )
        if device.startswith("cuda:") and (self.num_engine_replicas or algo.num_learners):
            raise ValueError(
                f"{device} is a GPU as the run's own process counts them; learners and replicas each see the one that "
                "Ray assigns to them: set the policy's device to cuda, and CUDA_VISIBLE_DEVICES for the run's own "
                "process"
            )
        is_taught = self.sft.weighting == "condition"
        if is_taught != self.policy.conditioned and not (self.policy.conditioned and self.sft.start_from):
            raise ValueError(
                "policy.conditioned asks for what sft.weighting condition teaches, and one has no effect without the "
                f"other, got {self.policy.conditioned} and {self.sft.weighting}; set both or neither"
            )
        # the device is for the run's own process; all others use the GPU that Ray assigns, if any
        starved = [role.gpu_setting for role in self.roles if role.gpu_setting and not role.gpus]
        if device == "cuda" and starved:
            raise ValueError(
                "the policy's device is cuda, and processes that compute with it are given no GPU; set "
                f"{', '.join(starved)}, or leave the device auto"
            )
        if algo.staleness and not (algo.env_runners or self.num_engine_replicas or reward.scores):
            raise ValueError(
                f"algo.staleness {algo.staleness} has no effect where the run's own process plays and nobody scores; "
                "set --engine.num-replicas for replies, --algo.env-runners for chunks, or --algo.staleness 0"
            )

    def without_effect(self) -> Iterator[tuple[object, str, tuple[str, ...]]]:
        reward, algo, sft = self.reward, self.algo, self.sft
        advantage, unasked = algo.advantage, ("judge.*", "serve.*", "goal_image", "env.draw_path")
        unscored = (*unasked, "reward.num_frames", "reward.frame_px", "reward.flip_images", "reward.monitor.*")
        is_critic = (advantage.estimator, advantage.values) == ("gae", "state")
        by_other, who = reward.scores and not reward.asks_judge, f"reward.teacher {reward.teacher}"
        yield not reward.scores, f"reward.source {reward.source}", unscored
        yield not reward.scores and is_critic, "a critic, which learns from all groups", ("algo.rounds",)
        yield by_other, who, (*unasked, "reward.monitor.min_auc")
        yield by_other and advantage.scorer_noise != "measured", who, ("reward.monitor.preflight",)
        uncorrected = ("algo.loss.correction_cap", "algo.loss.beyond_cap")
        yield self.correction == "none", f"algo.loss.correction {algo.loss.correction}", uncorrected
        of_expert = ("sft.turns", "sft.p_wrong", "sft.episodes", "sft.noise", "sft.p_perturb")  # who does not play then
        of_updates = ("sft.lr", "sft.batch_size", "sft.weight_decay", "sft.label_width")
        yield sft.demonstrations, "sft.demonstrations", of_expert
        yield not sft.updates, "sft.updates 0", of_updates
        others = tuple(f"sft.{setting.name}" for setting in fields(sft) if setting.name != "start_from")
        yield sft.start_from, "sft.start_from", others

    @property
    def correction(self) -> str:
        """`algo.loss.correction`, with `auto` resolved for this run's engine."""
        return "none" if self.algo.loss.correction == "auto" else self.algo.loss.correction

    def own_roles(self) -> list[Role]:
        algo, gpus = self.algo, float(self.algo.gpus_per_learner)
        return [
            Role(
                name="env runners", count=algo.env_runners, cpus=1.0, gpus=algo.gpus_per_env_runner,
                setting="--algo.env-runners", gpu_setting="--algo.gpus-per-env-runner 1",
            ),
            # each runner has workers of its own, as does the run's own process if it plays itself
            Role(
                name="env workers", count=algo.env_workers * max(1, algo.env_runners), cpus=1.0,
                setting="--algo.env-workers",
            ),
            Role(
                name=LEARNER_ROLE, count=algo.num_learners, cpus=0.0 if gpus else 1.0,  # RLlib asks for a core or a GPU
                gpus=gpus, gpu_type=algo.gpu_type, setting="--algo.num-learners, --algo.gpus-per-learner", learns=True,
                gpu_setting="--algo.gpus-per-learner 1",
            ),
        ]  # fmt: skip

    def folders(self) -> dict[str, tuple[str, str]]:
        return {
            "sft.demonstrations": (self.sft.demonstrations, "demonstrations.json"),
            "sft.start_from": (self.sft.start_from, "algorithm/policy.json"),
        }

    def check_objects(self, *, has_started: bool) -> None:
        from rlvlm.algorithms.policy_gradient.advantages import find_estimator  # torch, as every run needs it
        from rlvlm.algorithms.policy_gradient.losses import find_policy_loss
        from rlvlm.rewards.scorers import read_scores

        find_estimator(self.algo.advantage.estimator)
        find_policy_loss(self.algo.loss.policy)
        if self.policy.is_own:
            find_own(self.policy)
        if self.measured:
            read_scores(Path(self.measured), self.task)
        if not has_started:
            self.check_start()

    @abstractmethod
    def check_start(self) -> None:
        """Raises UsageError if what the supervised start reads does not suit the run."""

    @property
    def reward_name(self) -> str:
        """Name of the reward after that of the estimator."""
        return f"{self.algo.advantage.estimator}, {super().reward_name}"

    @property
    def title(self) -> str:
        """Title that also names the policy's head, where it is not the usual one of the kind."""
        head = self.policy.head
        words = "" if head == type(self.policy)().head else f"{head.rpartition(':')[2]} policy, "
        return f"{self.task}: {words}{self.reward_name}, seed {self.seed}"

    @property
    def measured(self) -> str:
        return self.reward.measured
