"""What the configs of all runs share: one frozen tree says everything, and the command line overrides its fields.

Imports only the rooms' config files, never torch or ray: `rlvlm --help` starts at once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import tyro

from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import check_unused, task_goal, task_goal_state
from rlvlm.judges.config import JudgeConfig
from rlvlm.serving.config import PlacementConfig


@dataclass(frozen=True, slots=True)
class NamedFolder:
    """A folder that a setting names."""

    path: str
    """Empty where the setting names none."""
    holds: str
    """File by which a folder of that kind is told."""


@dataclass(frozen=True, slots=True)
class Network:
    """A network that the run's own process holds."""

    device: str
    """auto, cpu, cuda or cuda:N."""
    model: str = ""
    """Hub name or folder of its weights; empty where it needs none."""
    revision: str = ""
    """Commit of a hub model."""


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
    """What every run has, whatever it learns from. Each pipeline's own config adds its sections to it."""

    pipeline: ClassVar[str]
    """Stands in `config.yaml`: which config, and so which pipeline, the run has; one of your own is named by
    `package.module:CLASS`."""
    may_change: ClassVar[tuple[str, ...]] = (
        *("steps", "eval.*", "track.*"),
        *("serve.*", "engine.*", "judge.store", "judge.device", "judge.attention", "judge.batch_size", "judge.api.*"),
        *("judge.engine.python", "judge.engine.tensor_parallel", "judge.engine.memory_share", "judge.engine.cache_gib"),
        *("*.device", "*.threads", "*.env_runners", "*.num_learners", "*.gpus_per_learner", "*.cache_mib"),
        *("algo.*lr", "reward_model.lr", "*.kl_weight"),
        *("*.without_answer", "*.fallback_judge", "*.on_alarm", "*.most_unreadable"),
    )
    """Patterns of the settings that a run may be resumed with after they were changed in its `config.yaml`: how far it
    goes, what is seen of it, what it runs on, and what its own errors tell to change. The others say what it is."""
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
    eval: EvalConfig = field(default_factory=EvalConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be >= 1, got {self.steps}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be 0 to 2^32 - 1, got {self.seed}")
        if names := ", ".join(_not_numbers(self)):  # which every comparison with a bound lets pass
            raise ValueError(f"{names} must be a number, got nan")
        check_unused(self.task, self.env)
        judge, api = self.judge, self.judge.api
        longest_s = math.ceil(judge.batch_size / api.concurrency) * api.deadline_s
        if judge.is_remote and longest_s >= self.serve.timeout_s:
            raise ValueError(
                f"{judge.batch_size} questions, {api.concurrency} at a time, may take {longest_s:g} s, serve.timeout_s "
                f"is {self.serve.timeout_s:g}; raise it, or judge.api.concurrency, or lower judge.api.deadline_s"
            )

    @property
    def asks_judge(self) -> bool:
        """Whether a VLM is asked at all."""
        raise NotImplementedError("each pipeline's config says so")

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before the run starts; nothing of it stops one."""
        return ()

    @property
    def unused_settings(self) -> dict[str, str]:
        """Patterns of settings that have no effect in this run, with the setting that is why. A recipe may have them
        all the same; whoever sets one on the command line is told.
        """
        return {}

    def why_unheeded(self, name: str) -> str | None:
        """The setting that leaves the one of that dotted name without effect; None where it has one."""
        return next((why for pattern, why in self.unused_settings.items() if fnmatchcase(name, pattern)), None)

    @property
    def max_queries(self) -> int:
        """Most questions that a run can ask, by its sessions to the last step and its budget; 0 where nobody is."""
        raise NotImplementedError("each pipeline's config says so")

    @property
    def judge_knows(self) -> list[str]:
        """The tasks of which the judge knows this run's kind of question; empty where it is a general model."""
        return []

    @property
    def models(self) -> dict[str, str]:
        """The models that the run loads, by the setting that names each: a hub name, a folder, or empty."""
        return {"judge.model": self.judge.model} if self.asks_judge else {}

    @property
    def folders(self) -> dict[str, NamedFolder]:
        """Folders that the run reads, by the setting that names each."""
        return {}

    def check_files(self) -> None:
        """Passes where the files that settings name can be read.

        Raises:
            UsageError: says which cannot, and what it should hold.
        """

    @property
    def networks(self) -> dict[str, Network]:
        """What the run's own process holds, by the section of the command line that names it."""
        return {}

    @property
    def num_workers(self) -> int:
        """Processes beside the learner's for which the run needs a place."""
        raise NotImplementedError("each pipeline's config says so")

    @property
    def reward_name(self) -> str:
        """Where the reward comes from, short enough for a legend, e.g. `judge labels, image reward`."""
        raise NotImplementedError("each pipeline's config says so")

    def smoke(self) -> Self:
        """This run cut to minutes: every part of it happens, nothing is learnt to the end."""
        raise NotImplementedError("each pipeline's config says so")

    @property
    def judge_goal(self) -> str:
        """What the judge is told: `goal`, else the task's own phrase, or its sentence for judges that want one."""
        return self.goal or (task_goal_state if self.judge.reads_states else task_goal)(self.task)

    @property
    def judge_name(self) -> str:
        """Who is asked, in a word: the running Serve app of `serve.app`, or the backend."""
        return self.serve.app or self.judge.backend

    @property
    def env_name(self) -> str:
        """How the env is set up, for the run's card."""
        return f"{self.env.episode_steps} steps per episode"

    def labels(self, own: Path) -> Path:
        """Folder of the judge's label store: the shared one of `judge.store`, else the run's `own`."""
        return Path(self.judge.store).expanduser() if self.judge.store else own

    @property
    def title(self) -> str:
        """One line that names the run, e.g. `drawer_open: judge labels, image reward, seed 0`."""
        return f"{self.task}: {self.reward_name}, seed {self.seed}"


def _not_numbers(section: Any, place: str = "") -> Iterator[str]:
    """Names of all settings, of sections within sections too, that are NaN."""
    for one in fields(section):
        value, name = getattr(section, one.name), f"{place}{one.name}"
        if is_dataclass(value):
            yield from _not_numbers(value, f"{name}.")
        elif any(
            isinstance(part, float) and math.isnan(part) for part in (value if isinstance(value, tuple) else (value,))
        ):
            yield name


Section = TypeVar("Section")


def at_most(section: Section, **bounds: int) -> Section:
    """A config section with each named field cut to its bound where it lies above."""
    return replace(section, **{name: min(getattr(section, name), bound) for name, bound in bounds.items()})  # pyright: ignore[reportArgumentType, reportCallIssue] - sections are dataclasses
