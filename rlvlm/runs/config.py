"""One frozen tree that says everything about a run. The command line overrides its fields by dotted names.

Imports only the rooms' config files, never torch or ray: `rlvlm --help` starts at once.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import task_goal, task_goal_state
from rlvlm.judges.config import JudgeConfig
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig, check_learning
from rlvlm.rewards.config import RewardConfig
from rlvlm.serving.config import PlacementConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How the policy is judged on the true task."""

    every_steps: int = 2_500
    """Env steps between evaluations."""
    episodes: int = 5
    """Episodes per evaluation, with the deterministic policy."""

    def __post_init__(self) -> None:
        if self.every_steps < 1 or self.episodes < 1:
            raise ValueError(f"need eval.every_steps and episodes >= 1, got {self.every_steps} and {self.episodes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackConfig:
    """What is kept and shown besides the run's folder."""

    log_every_steps: int = 1_000
    """Env steps between rows of metrics.jsonl, and between lines where there is no live panel."""
    checkpoint_every_steps: int = 5_000
    """Env steps between checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept, besides the best."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; online needs a key."""
    dashboard: bool = False
    """Whether a Ray started by the run opens its dashboard."""
    dashboard_port: int = 8265
    """Port of that dashboard, on the loopback address."""

    def __post_init__(self) -> None:
        for name in ("log_every_steps", "checkpoint_every_steps", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"track.{name} must be >= 1, got {getattr(self, name)}")
        if not 1 <= self.dashboard_port <= 65_535:
            raise ValueError(f"track.dashboard_port must be 1 to 65535, got {self.dashboard_port}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole run."""

    task: tyro.conf.Suppress[str]
    """Name of the task in `rlvlm.envs.registry`."""
    goal: str = ""
    """Goal phrase of the prompt; empty takes the task's own."""
    steps: int = 20_000
    """Env steps of the run."""
    seed: int = 0
    """Seeds env, networks, sampling and queries."""
    out: Path | None = None
    """The run's folder; by default runs/TASK/<time>."""
    env: EnvConfig = field(default_factory=EnvConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    serve: PlacementConfig = field(default_factory=PlacementConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    algo: SACConfig = field(default_factory=SACConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be >= 1, got {self.steps}")
        check_learning(self.reward, self.feedback, self.reward_model)
        self._check_waits()
        is_about_clips = self.reward.source == "preference" and self.feedback.segment_steps > 1
        if self.asks_judge and not self.judge.reads_clips and is_about_clips:
            raise ValueError(
                "the pocket judge knows single pictures only, so feedback.segment_steps must be 1, "
                f"got {self.feedback.segment_steps}; longer segments need judge.backend transformers"
            )

    def _check_waits(self) -> None:
        """Raises ValueError where a batch of a remote judge may take longer than whoever asked for it waits."""
        judge, api = self.judge, self.judge.api
        longest_s = math.ceil(judge.batch_size / api.concurrency) * api.deadline_s
        if judge.is_remote and longest_s >= self.serve.timeout_s:
            raise ValueError(
                f"{judge.batch_size} questions, {api.concurrency} at a time, may take {longest_s:g} s, serve.timeout_s "
                f"is {self.serve.timeout_s:g}; raise it, or judge.api.concurrency, or lower judge.api.deadline_s"
            )

    @property
    def asks_teacher(self) -> bool:
        """Whether somebody answers queries in sessions."""
        return self.reward.is_learned

    @property
    def asks_judge(self) -> bool:
        """Whether a VLM is asked at all."""
        return self.reward.asks_judge

    @property
    def judge_goal(self) -> str:
        """What the judge is told: `goal`, else the task's own phrase, or its sentence for judges that want one."""
        return self.goal or (task_goal_state if self.judge.reads_states else task_goal)(self.task)

    def labels(self, own: Path) -> Path:
        """Folder of the judge's label store: the shared one of `judge.store`, else the run's `own`."""
        return Path(self.judge.store).expanduser() if self.judge.store else own

    @property
    def reward_name(self) -> str:
        """Where the reward comes from, short enough for a legend, e.g. `judge labels, image reward`."""
        marked = " (random weights)" if self.asks_judge and self.judge.is_random else ""
        if self.reward.source == "judged":
            return f"{self.judge.backend} score{marked}"
        if not self.reward.is_learned:
            return f"{self.reward.source} reward"
        answers = {"preference": "labels", "score": "scores"}[self.reward.source]
        return f"{self.reward.teacher}{marked} {answers}, {self.reward.model} reward"

    @property
    def title(self) -> str:
        """One line that names the run, e.g. `drawer_open: judge labels, image reward, seed 0`."""
        return f"{self.task}: {self.reward_name}, seed {self.seed}"
