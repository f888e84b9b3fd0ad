"""The runs of envs in steps."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self

from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.core.errors import UsageError
from rlvlm.core.references import is_reference
from rlvlm.envs.config import StepEnvConfig
from rlvlm.pocket.models import known_tasks
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig, check_learning, published_name
from rlvlm.rewards.config import SOURCES, TEACHERS, StepRewardConfig
from rlvlm.runs.config import Role, RunConfig, at_most


@dataclass(frozen=True, kw_only=True)
class StepsRun(RunConfig):
    """A small policy that acts in every step, trained by SAC; its reward may be learned from a teacher's answers
    (PEBBLE).
    """

    kind: ClassVar[str] = "steps"
    algorithm: ClassVar[str] = "sac"
    reward: StepRewardConfig = field(default_factory=StepRewardConfig)
    feedback: FeedbackConfig = field(  # pyright: ignore[reportIncompatibleVariableOverride] - here every run has one
        default_factory=FeedbackConfig
    )
    """Queries to the teacher, from whose answers a reward is learned."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """Settings of the learned reward."""
    algo: SACConfig = field(default_factory=SACConfig)
    """Settings of SAC, including its networks."""
    env: StepEnvConfig = None  # pyright: ignore[reportAssignmentType]
    """Settings of the task's env; by default the task's own."""

    def check(self) -> None:
        check_learning(self.reward, self.feedback, self.reward_model)
        if self.reward.first_teacher == "published":
            published_name(self.task)
        is_about_clips = self.reward.source == "preference" and self.feedback.segment_steps > 1
        if self.asks_pocket_judge and is_about_clips:
            raise ValueError(
                "the pocket judge knows single images only, so feedback.segment_steps must be 1, "
                f"got {self.feedback.segment_steps}; longer segments need judge.backend transformers"
            )
        if self.env.draw_path and self.reward.source == "judged":
            raise ValueError(
                "env.draw_path has no effect with reward.source judged, which scores each image once, however it was "
                "come to; use reward.source preference or score"
            )

    def without_effect(self) -> Iterator[tuple[object, str, tuple[str, ...]]]:
        reward = self.reward
        who = f"reward.source {reward.source}" + (f", reward.teacher {reward.teacher}" if reward.is_learned else "")
        yield not reward.asks_judge, f"{who}, which serves no judge", ("serve.*", "goal_image")
        yield reward.teacher != "mixed", who, ("reward.mixed_judge", "feedback.mixed.*")
        yield reward.source == "environment", "reward.source environment, which asks no judge", ("judge.*",)
        yield not (reward.asks_judge or reward.may_ask_person), f"{who}, which looks at no image", ("env.draw_path",)
        yield True, "an env in steps, of which evaluations play one", ("eval.num_envs",)

    def smoke(self) -> Self:
        return replace(
            at_most(self, steps=3_000),
            feedback=at_most(self.feedback, first_step=1_000, every_steps=500, queries=20),
            reward_model=at_most(self.reward_model, min_updates=20, max_updates=20),
            algo=at_most(self.algo, seed_steps=500, critic_reset_updates=20),
            eval=at_most(self.eval, every_steps=1_000, episodes=2),
            track=at_most(self.track, checkpoint_every_steps=1_000, log_every_steps=250),
        )

    def own_roles(self) -> list[Role]:
        return [Role(name="env runners", count=self.algo.env_runners, cpus=1.0, setting="--algo.env-runners")]

    def networks(self) -> dict[str, tuple[str, str, str]]:
        found = {"algo": (self.algo.placed_on, "", "")}
        return found | {"reward-model": (self.reward_model.device, "", "")} if self.reward.is_learned else found

    def notes(self) -> list[str]:
        if self.asks_person and self.steps > self.feedback.first_step:
            return [f"answer the queries of this run with: rlvlm labels ask {self.out or 'RUN'}; it does not wait"]
        if not self.reward.is_learned or self.steps > self.feedback.first_step:
            return []
        return [
            f"nothing would be asked: the first feedback is due at step {self.feedback.first_step:,} "
            f"(--feedback.first-step), and the run ends at step {self.steps:,} (--steps)"
        ]

    def check_objects(self, *, has_started: bool) -> None:  # noqa: ARG002 - there is no supervised start
        from rlvlm.preferences.queries import find_strategy  # torch, as every run needs it
        from rlvlm.preferences.teachers import load_teacher, read_shares
        from rlvlm.rewards.build import load_source

        reward = self.reward
        if reward.source not in SOURCES and is_reference(reward.source, "reward.source"):
            load_source(reward.source)
        if reward.teacher not in TEACHERS and is_reference(reward.teacher, "reward.teacher"):
            load_teacher(reward.teacher)
        find_strategy(self.feedback.sampling)
        if self.measured:
            try:
                read_shares(Path(self.measured), self.task)
            except ValueError as error:
                raise UsageError(str(error), "rlvlm judge-bench writes one") from error

    def judge_knows(self) -> list[str]:
        return list(known_tasks()) if self.judge.knows_few_tasks else []

    @property
    def max_queries(self) -> int:
        feedback = self.feedback
        if not self.reward.is_learned or self.steps <= feedback.first_step:
            return 0
        # a session at the very last step would teach nothing
        sessions = (self.steps - 1 - feedback.first_step) // feedback.every_steps + 1
        return min(sessions * feedback.queries, feedback.max_queries)

    @property
    def asks_person(self) -> bool:
        reward = self.reward
        return reward.may_ask_person and (reward.teacher == "human" or self.feedback.mixed.person == "human")

    @property
    def measured(self) -> str:
        return self.feedback.measured
