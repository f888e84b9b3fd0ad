"""The runs of envs in steps."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.core.errors import UsageError
from rlvlm.core.references import is_reference
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.registry import make_env
from rlvlm.pocket.models import known_tasks
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig, check_learning, published_name
from rlvlm.rewards.config import SOURCES, TEACHERS, StepRewardConfig
from rlvlm.runs.settings.config import TASKS_OWN, Kind, Role, RunConfig, at_most
from rlvlm.runs.settings.panels import STEPS_PANEL

if TYPE_CHECKING:
    from rlvlm.algorithms.base import BaseConfig
    from rlvlm.algorithms.evaluation import Players
    from rlvlm.algorithms.policy_gradient.algorithm_config import MakeEngine
    from rlvlm.core.steps import Frames
    from rlvlm.judges.judge import MakeJudge


@dataclass(frozen=True, kw_only=True)
class StepsRun(RunConfig):
    """A small policy that acts in every step, trained by SAC; its reward may be learned from a teacher's answers
    (PEBBLE).
    """

    algorithm: ClassVar[str] = "sac"
    reward: StepRewardConfig = field(default_factory=StepRewardConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    """Queries to the teacher, from whose answers a reward is learned."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """Settings of the learned reward."""
    algo: SACConfig = field(default_factory=SACConfig)
    """Settings of SAC, including its networks."""
    env: StepEnvConfig = TASKS_OWN


class StepsKind(Kind[StepsRun]):
    """See `StepsRun`."""

    name = "steps"
    panel = STEPS_PANEL

    def check(self, run: StepsRun) -> None:
        check_learning(run.reward, run.feedback, run.reward_model)
        if run.reward.first_teacher == "published":
            published_name(run.task)
        is_about_clips = run.reward.source == "preference" and run.feedback.segment_steps > 1
        if run.asks_pocket_judge and is_about_clips:
            raise ValueError(
                "the pocket judge knows single images only, so feedback.segment_steps must be 1, "
                f"got {run.feedback.segment_steps}; longer segments need judge.backend transformers"
            )
        if run.env.draw_path and run.reward.source == "judged":
            raise ValueError(
                "env.draw_path has no effect with reward.source judged, which scores each image once, however it was "
                "come to; use reward.source preference or score"
            )

    def without_effect(self, run: StepsRun) -> Iterator[tuple[object, str, tuple[str, ...]]]:
        reward = run.reward
        who = f"reward.source {reward.source}" + (f", reward.teacher {reward.teacher}" if reward.is_learned else "")
        yield not reward.asks_judge, f"{who}, which serves no judge", ("serve.*", "goal_image")
        yield reward.teacher != "mixed", who, ("reward.mixed_judge", "feedback.mixed.*")
        yield reward.source == "environment", "reward.source environment, which asks no judge", ("judge.*",)
        yield not (reward.asks_judge or reward.may_ask_person), f"{who}, which looks at no image", ("env.draw_path",)
        yield True, "an env in steps, of which evaluations play one", ("eval.num_envs",)

    def smoke(self, run: StepsRun) -> StepsRun:
        return replace(
            at_most(run, steps=3_000),
            feedback=at_most(run.feedback, first_step=1_000, every_steps=500, queries=20),
            reward_model=at_most(run.reward_model, min_updates=20, max_updates=20),
            algo=at_most(run.algo, seed_steps=500, critic_reset_updates=20),
            eval=at_most(run.eval, every_steps=1_000, episodes=2),
            track=at_most(run.track, checkpoint_every_steps=1_000, log_every_steps=250),
        )

    def own_roles(self, run: StepsRun) -> list[Role]:
        return [Role(name="env runners", count=run.algo.env_runners, cpus=1.0, setting="--algo.env-runners")]

    def networks(self, run: StepsRun) -> dict[str, tuple[str, str, str]]:
        found = {"algo": (run.algo.placed_on, "", "")}
        return found | {"reward-model": (run.reward_model.device, "", "")} if run.reward.is_learned else found

    def notes(self, run: StepsRun) -> list[str]:
        if self.asks_person(run) and run.steps > run.feedback.first_step:
            return [f"answer the queries of this run with: rlvlm labels ask {run.out or 'RUN'}; it does not wait"]
        if not run.reward.is_learned or run.steps > run.feedback.first_step:
            return []
        return [
            f"nothing would be asked: the first feedback is due at step {run.feedback.first_step:,} "
            f"(--feedback.first-step), and the run ends at step {run.steps:,} (--steps)"
        ]

    def check_objects(self, run: StepsRun, *, has_started: bool) -> None:  # noqa: ARG002 - there is no supervised start
        from rlvlm.preferences.queries import find_strategy  # torch, as every run needs it
        from rlvlm.preferences.teachers import load_teacher, read_shares
        from rlvlm.rewards.build import load_source

        reward = run.reward
        if reward.source not in SOURCES and is_reference(reward.source, "reward.source"):
            load_source(reward.source)
        if reward.teacher not in TEACHERS and is_reference(reward.teacher, "reward.teacher"):
            load_teacher(reward.teacher)
        find_strategy(run.feedback.sampling)
        if measured := self.measured(run):
            try:
                read_shares(Path(measured), run.task)
            except ValueError as error:
                raise UsageError(str(error), "rlvlm judge-bench writes one") from error

    def judge_knows(self, run: StepsRun) -> list[str]:
        return list(known_tasks()) if run.judge.knows_few_tasks else []

    def max_queries(self, run: StepsRun) -> int:
        feedback = run.feedback
        if not run.reward.is_learned or run.steps <= feedback.first_step:
            return 0
        # a session at the very last step would teach nothing
        sessions = (run.steps - 1 - feedback.first_step) // feedback.every_steps + 1
        return min(sessions * feedback.queries, feedback.max_queries)

    def asks_person(self, run: StepsRun) -> bool:
        reward = run.reward
        return reward.may_ask_person and (reward.teacher == "human" or run.feedback.mixed.person == "human")

    def algorithm(
        self, run: StepsRun, make_judge: "MakeJudge | None", make_engine: "MakeEngine | None", image: "Frames | None"
    ) -> "BaseConfig":
        from rlvlm.algorithms.sac_pebble.algorithm import SACPebbleConfig

        return SACPebbleConfig().settings(
            task=run.task, env_settings=run.env, sac=run.algo, reward=run.reward, feedback=run.feedback,
            reward_model=run.reward_model, judge=run.judge, goal=run.judge_goal, make_judge=make_judge,
            total_steps=run.steps,
        )  # fmt: skip

    def players(self, run: StepsRun, checkpoint: Path) -> "Players":
        """Returns the deterministic policy in an env of its own; if that has a single start, also from the random
        starts of its task, which training has not seen.
        """
        from rlvlm.algorithms.evaluation import Player, Players
        from rlvlm.algorithms.sac_pebble.player import StepsPlayer, load_policy
        from rlvlm.envs.images import FrameStore

        policy, env = load_policy(checkpoint), make_env(run.task, run.env, run.seed)
        others: dict[str, Player] = {}
        # generalisation: training used one start, evaluation may use all
        if run.env.start != "random":
            elsewhere = replace(run.env, start="random")
            others["policy, random starts"] = StepsPlayer(policy, make_env(run.task, elsewhere, run.seed))
        return Players(
            own=StepsPlayer(policy, env),
            draw=lambda snapshots, size_px: FrameStore(env, size_px).frames(snapshots),
            others=others,
            has_success=env.has_success,
        )

    def measured(self, run: StepsRun) -> str:
        return run.feedback.measured


STEPS = StepsKind(StepsRun)
