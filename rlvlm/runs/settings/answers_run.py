"""The common part of runs of envs in turns and in chunks."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.sft_config import ChunkSFTConfig, ReplySFTConfig
from rlvlm.policies.own import find_own
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.rewards.config import TurnRewardConfig
from rlvlm.runs.settings.config import Kind, Role, RunConfig
from rlvlm.serving.config import LEARNER_ROLE

if TYPE_CHECKING:
    from rlvlm.algorithms.base import BaseConfig
    from rlvlm.algorithms.policy_gradient.algorithm_config import MakeEngine
    from rlvlm.core.steps import Frames
    from rlvlm.judges.judge import MakeJudge


@dataclass(frozen=True, kw_only=True)
class AnswersRun(RunConfig):
    """Settings common to `TurnsRun` and `ChunksRun`: a large policy whose sampled answers, replies or chunks of
    actions, are trained by a policy gradient.
    """

    algorithm: ClassVar[str] = "policy_gradient"
    reward: TurnRewardConfig = field(default_factory=TurnRewardConfig)
    policy: PolicyConfig | VLAConfig
    """Settings of the network that acts."""
    sft: ReplySFTConfig | ChunkSFTConfig
    """Settings of the supervised start."""
    algo: PolicyGradientConfig = field(default_factory=PolicyGradientConfig)
    """Settings of estimator, loss, rollouts and updates; `algo.preset` selects a combination."""

    @property
    def correction(self) -> str:
        """`algo.loss.correction`, with `auto` resolved for this run's engine."""
        return "none" if self.algo.loss.correction == "auto" else self.algo.loss.correction


Run = TypeVar("Run", bound=AnswersRun)


class AnswersKind(Kind[Run]):
    """See `AnswersRun`."""

    def check(self, run: Run) -> None:
        algo, reward, device = run.algo, run.reward, run.policy.loading.device
        if reward.asks_judge and (run.judge.score == "utility") != reward.rates_turns:
            wanted = "utility" if reward.rates_turns else "progress, success, rating or video"
            raise ValueError(
                f"reward.per {reward.per} is asked with judge.score {wanted}, got {run.judge.score}: the utility is "
                "that of one turn or chunk, the others are about an episode; with reward.clip growing a turn has the "
                "gain of these"
            )
        algo.check_with(run.policy, reward, is_served=run.num_engine_replicas > 0)
        run.sft.check_policy(run.policy)
        # the device is for the run's own process; all others use the GPU that Ray assigns, if any
        starved = [role.gpu_setting for role in run.roles if role.gpu_setting and not role.gpus]
        if device == "cuda" and starved:
            raise ValueError(
                "the policy's device is cuda, and processes that compute with it are given no GPU; set "
                f"{', '.join(starved)}, or leave the device auto"
            )

    def without_effect(self, run: Run) -> Iterator[tuple[object, str, tuple[str, ...]]]:
        reward, algo, sft = run.reward, run.algo, run.sft
        advantage, unasked = algo.advantage, ("judge.*", "serve.*", "goal_image", "env.draw_path")
        unscored = (*unasked, "reward.num_frames", "reward.frame_px", "reward.flip_images", "reward.monitor.*")
        is_critic = (advantage.estimator, advantage.values) == ("gae", "state")
        by_other, who = reward.scores and not reward.asks_judge, f"reward.teacher {reward.teacher}"
        yield not reward.scores, f"reward.source {reward.source}", unscored
        yield not reward.scores and is_critic, "a critic, which learns from all groups", ("algo.rounds",)
        yield by_other, who, (*unasked, "reward.monitor.min_auc")
        yield by_other and advantage.scorer_noise != "measured", who, ("reward.monitor.preflight",)
        uncorrected = ("algo.loss.correction_cap", "algo.loss.beyond_cap")
        yield run.correction == "none", f"algo.loss.correction {algo.loss.correction}", uncorrected
        of_expert = ("sft.turns", "sft.p_wrong", "sft.episodes", "sft.noise", "sft.p_perturb")  # who does not play then
        of_updates = ("sft.lr", "sft.batch_size", "sft.weight_decay", "sft.label_width")
        yield sft.demonstrations, "sft.demonstrations", of_expert
        yield not sft.updates, "sft.updates 0", of_updates
        others = tuple(f"sft.{setting.name}" for setting in fields(sft) if setting.name != "start_from")
        yield sft.start_from, "sft.start_from", others

    def own_roles(self, run: Run) -> list[Role]:
        algo, gpus = run.algo, float(run.algo.gpus_per_learner)
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

    def check_objects(self, run: Run, *, has_started: bool) -> None:  # noqa: ARG002 - see the kinds
        from rlvlm.algorithms.policy_gradient.advantages import find_estimator  # torch, as every run needs it
        from rlvlm.algorithms.policy_gradient.losses import find_policy_loss
        from rlvlm.rewards.scorers import read_scores

        find_estimator(run.algo.advantage.estimator)
        find_policy_loss(run.algo.loss.policy)
        if run.policy.is_own:
            find_own(run.policy)
        if measured := self.measured(run):
            read_scores(Path(measured), run.task)

    def algorithm(
        self, run: Run, make_judge: "MakeJudge | None", make_engine: "MakeEngine | None", image: "Frames | None"
    ) -> "BaseConfig":
        from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig

        make_fallback = None
        if run.reward.fallback_judge:
            from rlvlm.serving.client import answering_judge  # slow to import, and rarely used

            make_fallback = partial(answering_judge, run.reward.fallback_judge, image)
        return PolicyGradientAlgorithmConfig().settings(
            task=run.task, algo=replace(run.algo, loss=replace(run.algo.loss, correction=run.correction)), sft=run.sft,
            total_steps=run.steps, reward=run.reward, goal=run.goal, make_judge=make_judge,
            make_fallback_judge=make_fallback, refuses_faulty=run.judge.refuses_faulty, make_engine=make_engine,
            **self.acting(run),
        )  # fmt: skip

    @abstractmethod
    def acting(self, run: Run) -> dict[str, Any]:
        """Returns the settings of `algorithm` about the policy and its envs, by name."""

    def measured(self, run: Run) -> str:
        return run.reward.measured
