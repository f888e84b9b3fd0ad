"""What every run's configuration has, whatever its kind (`rlvlm.runs.kinds`); the command line overrides its fields.

Imports only the packages' config files, never torch or ray: `rlvlm --help` starts at once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import tyro

from rlvlm.core.checks import check_interval, check_least
from rlvlm.core.errors import UsageError
from rlvlm.envs.config import KIND_CONFIGS, EnvConfig
from rlvlm.envs.registry import check_env_settings, find_task, task_env
from rlvlm.judges.config import JudgeConfig
from rlvlm.runs.settings import flat
from rlvlm.serving.config import PlacementConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How the policy is evaluated on the true task."""

    every_steps: int = 2_500
    """Env steps between evaluations."""
    episodes: int = 5
    """Episodes per evaluation, with the deterministic policy."""
    num_envs: int = 0
    """Envs in turns that evaluations play at once, whose replies are sampled as one batch: the more, the sooner the
    episodes are played, as far as the GPU has room. 0: as many as rollouts, `algo.num_envs`."""

    def __post_init__(self) -> None:
        check_least(self, "eval", 1, "every_steps", "episodes")
        check_least(self, "eval", 0, "num_envs")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackConfig:
    """What else a run stores and shows besides its folder."""

    log_every_steps: int = 1_000
    """Env steps between rows of metrics.jsonl, and between lines where there is no live panel."""
    checkpoint_every_steps: int = 5_000
    """Env steps between checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept, besides the best."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; online needs a key."""
    wandb_project: str = "rlvlm"
    """Its project."""
    dashboard: bool = False
    """Whether a Ray started by the run opens its dashboard."""
    dashboard_port: int = 8265
    """Port of that dashboard, on the loopback address."""
    bench: str = ""
    """bench.json of the run's judge (`rlvlm judge-bench`): the run's card shows its figures beside its own. Empty: that
    of a teacher `measured`, if any."""

    def __post_init__(self) -> None:
        check_least(self, "track", 1, "log_every_steps", "checkpoint_every_steps", "keep_checkpoints")
        check_interval(self, "track", "[1, 65535]", "dashboard_port")


JUDGE_ROLE = "the judge"
GOAL_IMAGE = "goal_image.png"
"""In a run's folder: what its judge is shown beside every question."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """Processes of a run that do the same."""

    name: str
    count: int = 1
    cpus: float = 0.0
    """CPU cores of each."""
    gpus: float = 0.0
    """GPUs of each; below 1 it shares a GPU."""
    setting: str
    """The setting that makes them fewer, or ask for less."""
    gpu_setting: str = ""
    """That gives each a GPU, where they compute with the policy."""
    is_own: bool = False
    """Whether it is the run's own process, which stays where it is."""
    is_served: bool = False
    """Whether Ray Serve places them, and not RLlib."""
    learns: bool = False
    """Whether they hold the policy that is trained, with its gradients."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(ABC):
    """What the configuration of every run has. Its kind, which is that of the task's env, adds sections of its own and
    says what differs: a run is a `StepsRun`, a `TurnsRun` or a `ChunksRun` of `rlvlm.runs.kinds`.
    """

    kind: ClassVar[str] = ""
    """That of the task's env: steps, turns or chunks."""
    algorithm: ClassVar[str] = ""
    """The algorithm that learns."""
    may_change: ClassVar[tuple[str, ...]] = (
        *("steps", "eval.*", "track.*"),
        # what a judge, an engine and the run itself run on
        *("serve.*", "engine.*", "judge.store", "judge.device", "judge.attention", "judge.batch_size", "judge.api.*"),
        *("judge.engine.python", "judge.engine.tensor_parallel", "judge.engine.memory_share", "judge.engine.cache_gib"),
        *("*.device", "*.threads", "*.env_runners", "*.env_workers", "*.num_learners", "*.gpus_per_*", "*.cache_mib"),
        *("*.shard", "*.compute_dtype", "*.recompute", "*.microbatch_tokens"),
        # what an error advises to change: of a loss that is not finite, and of a judge that fails or is fooled
        *("algo.*lr", "reward_model.lr", "*.kl_weight"),
        *("*.without_answer", "*.fallback_judge", "*.on_alarm", "*.max_invalid_share"),
    )
    """Patterns of the settings that a run may be resumed with after they were changed. The others say what it is."""
    task: tyro.conf.Suppress[str]
    """Name of the task in `rlvlm.envs.registry`."""
    goal: str = ""
    """Goal phrase of the prompt; empty: the task's own."""
    goal_image: str = ""
    """File with an image of the goal, which the judge is shown with every question; a copy stays in the run's folder.
    Empty: none."""
    steps: int = 20_000
    """Env steps of the run."""
    seed: int = 0
    """Seeds env, networks, sampling and queries."""
    out: Path | None = None
    """The run's folder; by default runs/TASK/<time>."""
    reward: Any = None
    """Where the reward comes from."""
    algo: Any = None
    """How the policy learns from it."""
    env: EnvConfig = None  # pyright: ignore[reportAssignmentType]
    """The task's env; by default as the task sets it up."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    serve: PlacementConfig = field(default_factory=PlacementConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        if self.env is None:
            with suppress(UsageError):  # of a task that is not there, or cannot be imported
                object.__setattr__(self, "env", task_env(self.task))
        if not isinstance(self.env, KIND_CONFIGS[self.kind]):
            if self.env is not None and type(self.env) is not EnvConfig:
                raise ValueError(f"env is a {type(self.env).__name__}, which does not go with a run in {self.kind}")
            steps: dict[str, Any] = {} if self.env is None else {"episode_steps": self.env.episode_steps}
            object.__setattr__(self, "env", KIND_CONFIGS[self.kind](**steps))
        check_least(self, "", 1, "steps")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be 0 to 2^32 - 1, got {self.seed}")
        # every comparison with a bound lets NaN pass, and NaN alone differs from itself
        leaves = {name: value if isinstance(value, list) else [value] for name, value in flat(self).items()}
        if names := [name for name, values in leaves.items() if any(value != value for value in values)]:
            raise ValueError(f"{', '.join(names)} must be a number, got nan")
        check_env_settings(self.task, self.env)
        # Serve gives a call up after `serve.timeout_s`; by then the API itself must have answered or been given up
        judge, api = self.judge, self.judge.api
        longest_s = math.ceil(judge.batch_size / api.concurrency) * api.deadline_s
        if judge.is_remote and longest_s >= self.serve.timeout_s:
            raise ValueError(
                f"{judge.batch_size} questions, {api.concurrency} at a time, may take {longest_s:g} s, serve.timeout_s "
                f"is {self.serve.timeout_s:g}; raise it, or judge.api.concurrency, or lower judge.api.deadline_s"
            )
        is_started = self.reward.asks_judge and not self.serve.app
        if is_started and judge.device.startswith("cuda") and not self.serve.num_gpus:
            raise ValueError(
                f"judge.device is {judge.device}, and Ray gives the judge's replica no GPU; set --serve.num-gpus 1, or "
                "a share such as 0.5, or leave judge.device auto"
            )
        self.check()

    # What a kind says.

    @abstractmethod
    def check(self) -> None:
        """Raises ValueError where settings of two sections contradict each other, or one leaves another without effect
        that no recipe has; see also `why_unused`.
        """

    @abstractmethod
    def without_effect(self) -> Iterator[tuple[Any, str, tuple[str, ...]]]:
        """Yields what leaves what without effect: whether it does so in this run, the setting that is why, and patterns
        of those that have none then.
        """

    @abstractmethod
    def smoke(self) -> Self:
        """This run, shortened to minutes: all parts run, nothing is trained to convergence. Long episodes are fewer."""

    def starting_for(self, settings: Mapping[str, Any]) -> Self:
        """This run with the preset that `settings` name, whose name alone would be a false label."""
        named = settings.get("algo.preset", self.preset)
        return self if named == self.preset else self.with_preset(str(named))

    def with_preset(self, preset: str) -> Self:
        """This run with the estimator, the loss and the rollouts of a preset; all else stays as the recipe has it.

        Raises:
            UsageError: there is no such preset for this kind.
        """
        raise UsageError(
            f"algo.preset {preset} is for envs in turns and chunks, {self.task} is one in {self.kind}", "leave it out"
        )

    @abstractmethod
    def own_roles(self) -> list[Role]:
        """The processes that a run starts beside its own and the judge's; some may have a count of 0."""

    @abstractmethod
    def networks(self) -> dict[str, tuple[str, str, str]]:
        """Networks in the run's own process, by the section of the command line that names each: device, model (a hub
        name or a folder; empty where it needs none) and the model's revision.
        """

    @abstractmethod
    def folders(self) -> dict[str, tuple[str, str]]:
        """Folders that settings name, beside those of models, by setting: path, and a file that must be in it."""

    def models(self) -> dict[str, str]:
        """Models by the setting that names them, empty where it names none."""
        return {"judge.model": self.judge.model} if self.reward.asks_judge else {}

    def notes(self) -> list[str]:
        """What a user should know before the run starts, of what differs by kind."""
        return []

    def check_policy(self) -> None:  # noqa: B027 - most kinds have none
        """Raises UsageError unless the files of a policy's model go with the env, which may be made for that."""

    @abstractmethod
    def check_objects(self) -> None:
        """Raises UsageError unless what settings name by `module:NAME`, a measured judge's table and the policy that
        the run starts from can be read; imports torch.
        """

    @abstractmethod
    def judge_knows(self) -> list[str]:
        """The tasks of which the judge knows this run's kind of question; empty where it is a general model."""

    @property
    def max_queries(self) -> int:
        """Most questions that a run can ask, by its sessions to the last step and its budget; 0 without a teacher."""
        # one for each turn or episode, and the shortest has one step
        return self.steps if self.reward.asks_judge else 0

    @property
    def reward_name(self) -> str:
        """Where the reward comes from, short enough for a legend, e.g. `judge labels, image reward`."""
        judge = self.serve.app or self.judge.backend
        return self.reward.title(judge, " (random weights)" if self.reward.asks_judge and self.judge.is_random else "")

    @property
    def learns_reward(self) -> bool:
        """Whether a reward model is fitted to a teacher's answers."""
        return False

    @property
    def asks_person(self) -> bool:
        """Whether a person answers queries of this run at the page of `rlvlm labels ask`."""
        return False

    @property
    def compares(self) -> bool:
        """Whether a judge of this run is asked to compare, and not to score."""
        return False

    @property
    def measured(self) -> str:
        """File of a measured judge's figures that a teacher simulates; empty where there is none."""
        return ""

    @property
    def num_learners(self) -> int:
        """Processes that learn; 0: the run's own does."""
        return 0

    @property
    def num_engine_replicas(self) -> int:
        """Replicas behind Serve that sample for the policy; 0: the run's own process, or env runners, do."""
        return 0

    @property
    def plays_expert(self) -> bool:
        """Whether the task's scripted expert plays demonstrations, where an env need not have one."""
        return False

    @property
    def large_policy(self) -> Any:
        """The section of a policy that comes trained, with its model; None where the policy is small."""
        return None

    @property
    def preset(self) -> str:
        """`algo.preset`, empty where there is none."""
        return ""

    @property
    def segment_steps(self) -> int:
        """Images of each side of a comparison."""
        return 1

    def script_options(self) -> dict[str, Any]:
        """How a run has the task's script play its demonstrations, as `rlvlm collect` calls it."""
        return {}

    def bench_options(self) -> list[str]:
        """Options of `rlvlm judge-bench`, beside the judge's, with which it asks as this run does."""
        return []

    # What all have in common.

    @property
    def roles(self) -> list[Role]:
        """The processes that a run starts beside its own. A judge that runs already is not the run's."""
        found, serve = self.own_roles(), self.serve
        if self.reward.asks_judge and not serve.app:
            found.append(
                Role(
                    name=JUDGE_ROLE, count=serve.num_replicas, is_served=True,
                    cpus=serve.num_cpus, gpus=serve.num_gpus,
                    setting="--serve.num-replicas, --serve.num-gpus, or --serve.app for a judge that runs already",
                )
            )  # fmt: skip
        return [role for role in found if role.count]

    @property
    def worker_places(self) -> tuple[dict[str, float], ...]:
        """What Ray has to set aside for each process beside the run's own, judges left out."""
        places = [
            {name: amount for name, amount in (("CPU", role.cpus), ("GPU", role.gpus)) if amount}
            for role in self.roles
            if not role.is_served
            for _ in range(role.count)
        ]
        replicas = self.num_engine_replicas
        # a core for each replica whatever it asks for, and one for Serve's own actors
        return (*places, *({"CPU": 1.0},) * (replicas + bool(replicas)))

    def why_unused(self, name: str) -> str | None:
        """The setting that leaves the one of that dotted name without effect; None where it has one. A recipe may have
        such a setting all the same; setting one on the command line is an error.
        """
        pocket = "the pocket judge, which is small and has no 4-bit weights"
        drawn = (self.policy_env, self.judge_env if self.reward.asks_judge else self.policy_env)
        reasons = [settings.without_effect() for settings in drawn]
        tables = (
            *self.without_effect(),
            (self.asks_pocket_judge, pocket, ("judge.quantization",)),
            *((setting in reasons[1], why, (f"env.{setting}",)) for setting, why in reasons[0].items()),
        )
        for holds, why, patterns in tables:
            if holds and any(fnmatchcase(name, pattern) for pattern in patterns):
                return why
        return None

    @property
    def asks_pocket_judge(self) -> bool:
        """Whether the run's judge is one that ships with its weights."""
        return self.reward.asks_judge and self.judge.ships_weights and not self.serve.app

    @property
    def judge_goal(self) -> str:
        """The judge's goal: `goal`, else the task's own phrase, or its sentence for judges that want one."""
        if self.goal:
            return self.goal
        task = find_task(self.task)
        return (task.goal_state if self.judge.reads_states else "") or task.goal

    @property
    def policy_env(self) -> EnvConfig:
        """The env that is played, drawn as the policy wants it: lightly for small networks, which learn from such
        images, and for a model that comes trained as the benchmark draws it.
        """
        return self.env.for_model(is_pocket=not self.models().get("policy.model"))

    @property
    def judge_env(self) -> EnvConfig:
        """The same env, drawn as the judge wants it."""
        return self.env.for_model(is_pocket=not self.reward.asks_judge or self.asks_pocket_judge)

    @property
    def goal_file(self) -> Path | None:
        """The image of the goal that the judge is shown: the copy in the run's folder, once there is one."""
        if not self.goal_image or not self.reward.asks_judge:
            return None
        copy = self.out / GOAL_IMAGE if self.out else None
        return copy if copy and copy.exists() else Path(self.goal_image).expanduser()

    def labels(self, own: Path) -> Path:
        """Folder of the judge's label store: the shared one of `judge.store`, else the run's `own`."""
        return Path(self.judge.store).expanduser() if self.judge.store else own

    @property
    def title(self) -> str:
        """One line that names the run, e.g. `drawer_open: judge labels, image reward, seed 0`."""
        return f"{self.task}: {self.reward_name}, seed {self.seed}"


Section = TypeVar("Section")


def at_most(section: Section, **bounds: int) -> Section:
    """A config section with each named field cut to its bound where it lies above."""
    return replace(section, **{name: min(getattr(section, name), bound) for name, bound in bounds.items()})  # pyright: ignore[reportArgumentType, reportCallIssue] - sections are dataclasses
