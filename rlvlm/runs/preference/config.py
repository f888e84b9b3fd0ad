"""A whole run of the first pipeline: a state policy, and a reward from a judge, a teacher or the env.

Imports only the rooms' config files, never torch or ray: `rlvlm --help` starts at once.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self

from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.core.errors import UsageError
from rlvlm.pocket.judge.config import trained_tasks
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig, check_learning, published_name
from rlvlm.rewards.config import RewardConfig
from rlvlm.runs.config import Network, RunConfig, at_most


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceRunConfig(RunConfig):
    """A whole run."""

    pipeline: ClassVar[str] = "preference"
    reward: RewardConfig = field(default_factory=RewardConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    algo: SACConfig = field(default_factory=SACConfig)

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        check_learning(self.reward, self.feedback, self.reward_model)
        if self.reward.teacher == "published":
            published_name(self.task)
        is_about_clips = self.reward.source == "preference" and self.feedback.segment_steps > 1
        if self.asks_judge and not self.serve.app and not self.judge.reads_clips and is_about_clips:
            raise ValueError(
                "the pocket judge knows single images only, so feedback.segment_steps must be 1, "
                f"got {self.feedback.segment_steps}; longer segments need judge.backend transformers"
            )

    @property
    def asks_judge(self) -> bool:
        """Whether a VLM is asked at all."""
        return self.reward.asks_judge

    @property
    def max_queries(self) -> int:
        """Most queries the run can ask: its sessions before the end, up to its budget; 0 where nobody is asked."""
        feedback = self.feedback
        if not self.reward.is_learned or self.steps <= feedback.first_step:
            return 0
        sessions = (self.steps - 1 - feedback.first_step) // feedback.every_steps + 1
        return min(sessions * feedback.queries, feedback.max_queries)

    @property
    def notes(self) -> tuple[str, ...]:
        """That nothing will be learned from anybody, where the first feedback comes after the end."""
        if not self.reward.is_learned or self.steps > self.feedback.first_step:
            return ()
        return (
            f"nobody will be asked: the first feedback is due at step {self.feedback.first_step:,} "
            f"(--feedback.first-step), and the run ends at step {self.steps:,} (--steps)",
        )

    def check_files(self) -> None:
        """Passes where the table of a measured judge can be read; raises UsageError where it cannot."""
        if self.feedback.measured:
            from rlvlm.preferences.answers.measured import read_shares  # numpy is not for those who only ask for help

            try:
                read_shares(Path(self.feedback.measured))
            except ValueError as error:
                raise UsageError(str(error), "rlvlm judge-report writes one") from error

    @property
    def judge_knows(self) -> list[str]:
        """The pocket judge's tasks, where it is the one that ships."""
        return trained_tasks() if self.judge.knows_few_tasks else []

    @property
    def networks(self) -> dict[str, Network]:
        """SAC's, and the learned reward."""
        learner = {"algo": Network(self.algo.device)}
        return learner | ({"reward-model": Network(self.reward_model.device)} if self.reward.is_learned else {})

    @property
    def num_workers(self) -> int:
        """Env runners."""
        return self.algo.env_runners

    @property
    def reward_name(self) -> str:
        """Where the reward comes from, short enough for a legend, e.g. `judge labels, image reward`."""
        marked = " (random weights)" if self.asks_judge and self.judge.is_random else ""
        if self.reward.source == "judged":
            return f"{self.judge_name} score{marked}"
        if not self.reward.is_learned:
            return f"{self.reward.source} reward"
        answers = {"preference": "labels", "score": "scores"}[self.reward.source]
        return f"{self.reward.teacher}{marked} {answers}, {self.reward.model} reward"

    @property
    def env_name(self) -> str:
        """Start, robot and length of an episode."""
        return f"start {self.env.start}, robot {self.env.robot}, {self.env.episode_steps} steps per episode"

    def smoke(self) -> Self:
        """This run cut to minutes: every part of it happens, nothing is learnt to the end."""
        return replace(
            at_most(self, steps=3_000),
            feedback=at_most(self.feedback, first_step=1_000, every_steps=500, queries=20),
            reward_model=at_most(self.reward_model, min_updates=20, max_updates=20),
            algo=at_most(self.algo, seed_steps=500, critic_reset_updates=20),
            eval=at_most(self.eval, every_steps=1_000, episodes=2),
            track=at_most(self.track, checkpoint_every_steps=1_000, log_every_steps=250),
        )
