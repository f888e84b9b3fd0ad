"""Settings shared by runs of all kinds (`rlvlm.runs.settings.kinds`); the command line overrides the fields.

Imports only the packages' config files, never torch or ray, so that `rlvlm --help` starts at once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

import tyro

from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.core.checks import Bound, NonNegativeInt, PositiveFloat, PositiveInt, check_bounds
from rlvlm.core.console.panel import PanelRow
from rlvlm.core.errors import UsageError
from rlvlm.core.leads import CodeRef, FilePath
from rlvlm.envs.config import KIND_CONFIGS, EnvConfig
from rlvlm.envs.registry import check_env_settings, find_task, task_env
from rlvlm.judges.config import JudgeConfig
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.rewards.config import RewardConfig
from rlvlm.runs.settings.tree import flat
from rlvlm.serving.config import JUDGE_ROLE, JUDGE_SETTING, PLACE_TIMEOUT_S, PlacementConfig, Role, ServedEngineConfig

if TYPE_CHECKING:  # --help should wait for neither torch nor Ray, nor for NumPy
    from rlvlm.algorithms.base import BaseConfig
    from rlvlm.algorithms.evaluation import Players
    from rlvlm.algorithms.policy_gradient.algorithm_config import MakeEngine
    from rlvlm.core.steps import Frames
    from rlvlm.judges.judge import MakeJudge


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation of the policy on the true task."""

    every_steps: PositiveInt = 2_500
    """Env steps between evaluations."""
    episodes: PositiveInt = 5
    """Episodes per evaluation, with the deterministic policy."""
    num_envs: NonNegativeInt = 0
    """Envs in turns that evaluations play at once, whose replies are sampled as one batch: the more, the sooner the
    episodes are played, as far as the GPU has room. 0: as many as rollouts, `algo.num_envs`."""

    def __post_init__(self) -> None:
        check_bounds(self, "eval")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackConfig:
    """Metrics and checkpoints that a run stores and shows."""

    log_every_steps: PositiveInt = 1_000
    """Env steps between rows of metrics.jsonl, and between log lines if there is no live panel."""
    checkpoint_every_steps: PositiveInt = 5_000
    """Env steps between checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep, besides the best."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases mode; online needs a key."""
    wandb_project: str = "rlvlm"
    """Project in Weights & Biases."""
    dashboard: bool = False
    """Whether to open the dashboard of a Ray started by the run."""
    dashboard_port: Annotated[int, Bound("[1, 65535]")] = 8265
    """Port of that dashboard, on the loopback address."""
    bench: FilePath = ""
    """bench.json of the run's judge (`rlvlm judge-bench`), whose figures the run's card compares with its own. Empty:
    that of a teacher `measured`, if any."""

    def __post_init__(self) -> None:
        check_bounds(self, "track")


GOAL_IMAGE = "goal_image.png"
"""File in a run's folder with the goal image shown to its judge with every question."""
Section = TypeVar("Section")
TASKS_OWN: Any = None
"""Stands for the settings of the task's own env until a run is made."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings that every run has. A run is a `StepsRun`, a `TurnsRun` or a `ChunksRun` of `rlvlm.runs.settings.kinds`,
    after the kind of the task's env: each narrows the types of these sections and adds its own.
    """

    kind: ClassVar["Kind[Any]"]
    """Kind of the task's env: steps, turns or chunks. It says what follows from a run's settings."""
    algorithm: ClassVar[str]
    """Name of the learning algorithm."""
    may_change: ClassVar[tuple[str, ...]] = (
        *("steps", "place_timeout_s", "eval.*", "track.*"),
        # what a judge, an engine and the run itself run on
        *("serve.*", "engine.*", "judge.store", "judge.device", "judge.attention", "judge.batch_size", "judge.api.*"),
        *("judge.engine.python", "judge.engine.tensor_parallel", "judge.engine.memory_share", "judge.engine.cache_gib"),
        *("*.device", "*.threads", "*.env_runners", "*.env_workers", "*.num_learners", "*.gpu*", "*.cache_mib"),
        *("*.shard", "*.compute_dtype", "*.recompute", "*.microbatch_tokens"),
        # what an error advises to change: of a loss that is not finite, and of a judge that fails or is fooled
        *("algo.*lr", "reward_model.lr", "*.kl_weight"),
        *("*.without_answer", "*.fallback_judge", "*.on_alarm", "*.max_invalid_share"),
    )
    """Patterns of the settings that may change when a run is resumed. The others define what it is."""
    task: tyro.conf.Suppress[CodeRef]
    """Name of the task in `rlvlm.envs.registry`."""
    goal: str = ""
    """Goal phrase of the prompt; empty: the task's own."""
    goal_image: FilePath = ""
    """File with an image of the goal, shown to the judge with every question; a copy is stored in the run's folder.
    Empty: none."""
    steps: PositiveInt = 20_000
    """Env steps of the run."""
    seed: Annotated[int, Bound(f"[0, {2**32 - 1}]")] = 0
    """Seed of env, networks, sampling and queries."""
    out: Path | None = None
    """Folder of the run; by default runs/TASK/<time>."""
    place_timeout_s: PositiveFloat = PLACE_TIMEOUT_S
    """Maximum wait on a cluster for nodes that its autoscaler adds, and for places that others hold, seconds."""
    reward: RewardConfig
    """Source of the reward."""
    algo: SACConfig | PolicyGradientConfig
    """Settings of learning from the reward."""
    env: EnvConfig = TASKS_OWN
    """Settings of the task's env; by default the task's own."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    serve: PlacementConfig = field(default_factory=PlacementConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        check_bounds(self, "")
        if self.env is None:
            with suppress(UsageError):  # the task does not exist, or cannot be imported
                object.__setattr__(self, "env", task_env(self.task))
        kind = self.kind.name
        if not isinstance(self.env, KIND_CONFIGS[kind]):
            if self.env is not None and type(self.env) is not EnvConfig:
                raise ValueError(f"env is a {type(self.env).__name__}, which does not go with a run in {kind}")
            steps: dict[str, Any] = {} if self.env is None else {"episode_steps": self.env.episode_steps}
            object.__setattr__(self, "env", KIND_CONFIGS[kind](**steps))
        # NaN passes every comparison with a bound, and only NaN differs from itself
        leaves = {name: value if isinstance(value, list) else [value] for name, value in flat(self).items()}
        if names := [name for name, values in leaves.items() if any(value != value for value in values)]:
            raise ValueError(f"{', '.join(names)} must be a number, got nan")
        check_env_settings(self.task, self.env)
        # Serve gives up a call after `serve.timeout_s`; the API must have answered or failed by then
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
        self.kind.check(self)

    def section(self, of: type[Section]) -> Section | None:
        """Returns the section of that class, which only some kinds of runs have; None if this one has none."""
        return next((value for value in vars(self).values() if isinstance(value, of)), None)

    def smoke(self) -> Self:
        """Returns this run shortened to minutes: all parts run, nothing converges. Long episodes are fewer."""
        return self.kind.smoke(self)

    def starting_for(self, settings: Mapping[str, Any]) -> Self:
        """Returns this run with the preset in `settings`, because the name alone would be a false label."""
        named = settings.get("algo.preset", self.algo.preset)
        return self if named == self.algo.preset else self.kind.with_preset(self, str(named))

    @property
    def num_engine_replicas(self) -> int:
        """Number of replicas behind Serve that sample for the policy; 0: the run's process, or env runners, do."""
        engine = self.section(ServedEngineConfig)
        return engine.num_replicas if engine else 0

    @property
    def large_policy(self) -> PolicyConfig | VLAConfig | None:
        """Section of a policy that starts pretrained, with its model; None for a small policy."""
        acts = self._policy
        return acts if acts and acts.model else None

    @property
    def _policy(self) -> PolicyConfig | VLAConfig | None:
        return self.section(PolicyConfig) or self.section(VLAConfig)

    @property
    def roles(self) -> list[Role]:
        """Returns the processes that a run starts besides its own; a judge that already runs is not included."""
        found, serve = self.kind.own_roles(self), self.serve
        if self.reward.asks_judge and not serve.app:
            found.append(serve.role(JUDGE_ROLE, JUDGE_SETTING))
        return [role for role in found if role.count]

    @property
    def worker_places(self) -> tuple[dict[str, float], ...]:
        """Returns the resources that Ray must reserve for each process besides the run's own, without those that Serve
        places.
        """
        return tuple(
            {name: amount for name, amount in (("CPU", role.cpus), ("GPU", role.gpus)) if amount}
            for role in self.roles
            if not role.is_served
            for _ in range(role.count)
        )

    def why_unused(self, name: str) -> str | None:
        """Returns the setting that makes the one of that dotted name useless; None if it has an effect. A recipe may
        contain such a setting anyway; setting it on the command line is an error.
        """
        pocket = "the pocket judge, which is small and has no 4-bit weights"
        drawn = (self.policy_env, self.judge_env if self.reward.asks_judge else self.policy_env)
        reasons = [settings.without_effect() for settings in drawn]
        tables = (
            *self.kind.without_effect(self),
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
        """Goal of the judge: `goal`, else the task's own phrase, or its sentence for judges that need one."""
        if self.goal:
            return self.goal
        task = find_task(self.task)
        return (task.goal_state if self.judge.reads_states else "") or task.goal

    @property
    def policy_env(self) -> EnvConfig:
        """Settings of the env for the policy: drawn lightly for small networks, which are trained on such images, and
        as in the benchmark for pretrained models.
        """
        return self.env.for_model(is_pocket=self.large_policy is None)

    @property
    def judge_env(self) -> EnvConfig:
        """Settings of the same env, drawn for the judge."""
        return self.env.for_model(is_pocket=not self.reward.asks_judge or self.asks_pocket_judge)

    @property
    def goal_file(self) -> Path | None:
        """File of the goal image shown to the judge: the copy in the run's folder, once it exists."""
        if not self.goal_image or not self.reward.asks_judge:
            return None
        copy = self.out / GOAL_IMAGE if self.out else None
        return copy if copy and copy.exists() else Path(self.goal_image).expanduser()

    def labels(self, own: Path) -> Path:
        """Returns the folder of the judge's label store: the shared one of `judge.store`, else the run's `own`."""
        return Path(self.judge.store).expanduser() if self.judge.store else own

    @property
    def reward_name(self) -> str:
        """Returns the estimator, if any, and the source of the reward, short enough for a legend, e.g. `judge labels,
        image reward`.
        """
        learns, judge = self.section(PolicyGradientConfig), self.serve.app or self.judge.backend
        mark = " (random weights)" if self.reward.asks_judge and self.judge.is_random else ""
        return (f"{learns.advantage.estimator}, " if learns else "") + self.reward.title(judge, mark)

    @property
    def title(self) -> str:
        """Returns a line that names the run, e.g. `drawer_open: judge labels, image reward, seed 0`, and the policy's
        head where it is not the usual one of the kind.
        """
        acts = self._policy
        head = f"{acts.head.rpartition(':')[2]} policy, " if acts and acts.head != type(acts)().head else ""
        return f"{self.task}: {head}{self.reward_name}, seed {self.seed}"


Run = TypeVar("Run", bound=RunConfig)


class Kind(ABC, Generic[Run]):
    """What differs between runs of envs in steps, turns and chunks; one object each in `rlvlm.runs.settings.kinds`.

    Args:
        run: class of its runs.
    """

    name: ClassVar[str]
    """Kind of the task's env, as in `Task.kind`: steps, turns or chunks."""
    panel: ClassVar[Sequence[PanelRow]]
    """Rows of the live panel of its runs."""

    def __init__(self, run: type[Run]) -> None:
        self.run = run
        run.kind = self

    @abstractmethod
    def check(self, run: Run) -> None:
        """Raises ValueError if settings of two sections contradict each other, or one makes another useless in a way
        that no recipe has; see also `without_effect`.
        """

    @abstractmethod
    def without_effect(self, run: Run) -> Iterator[tuple[object, str, tuple[str, ...]]]:
        """Yields rules for useless settings: whether the rule applies to this run, the setting that causes it, and
        patterns of the settings that then have no effect.
        """

    @abstractmethod
    def smoke(self, run: Run) -> Run:
        """See `RunConfig.smoke`."""

    def with_preset(self, run: Run, preset: str) -> Run:
        """Returns a run with the estimator, the loss and the rollouts of another preset; the rest stays as in the
        recipe.

        Raises:
            UsageError: this kind has no such preset.
        """
        raise UsageError(
            f"algo.preset {preset} is for envs in turns and chunks, {run.task} is one in {self.name}", "leave it out"
        )

    @abstractmethod
    def own_roles(self, run: Run) -> list[Role]:
        """Returns the processes that a run starts besides its own and the judge's; some may have a count of 0."""

    @abstractmethod
    def networks(self, run: Run) -> dict[str, tuple[str, str, str]]:
        """Returns the networks in the run's own process, by the section of the command line: device, model (hub name or
        folder; empty if it needs none) and the model's revision.
        """

    @abstractmethod
    def notes(self, run: Run) -> list[str]:
        """Returns what a user should know before the run starts."""

    def check_policy(self, run: Run) -> None:  # noqa: B027 - a small policy has none
        """Raises UsageError unless the files of a policy's model match the env, which may be made for the check."""

    @abstractmethod
    def check_objects(self, run: Run, *, has_started: bool) -> None:
        """Raises UsageError if objects named by `module:NAME` or a measured judge's table cannot be read or, in a run
        that has not started, what its supervised start reads does not suit it; imports torch.
        """

    def judge_knows(self, run: Run) -> list[str]:  # noqa: ARG002 - no turn is refused for its judge
        """Returns the tasks that the judge knows, for this run's kind of question; empty for a general model."""
        return []

    def max_queries(self, run: Run) -> int:
        """Returns the maximum number of questions of a run, from its sessions and budget; 0 without a teacher."""
        # one per turn or episode, and the shortest episode has one step
        return run.steps if run.reward.asks_judge else 0

    def asks_person(self, run: Run) -> bool:  # noqa: ARG002 - a person is not waited for in turns and chunks
        """Whether a person answers queries of a run on the page of `rlvlm labels ask`."""
        return False

    @abstractmethod
    def algorithm(
        self, run: Run, make_judge: "MakeJudge | None", make_engine: "MakeEngine | None", image: "Frames | None"
    ) -> "BaseConfig":
        """Returns RLlib's settings of the run's algorithm, see `start.build.algorithm_settings`; imports RLlib.

        Args:
            run: the run.
            make_judge: makes the judge's client; None if no judge is used.
            make_engine: makes the client of a policy's sampling engine; None: the run's own process samples.
            image: [1, H, W, 3] image of the goal that a judge is shown; None: none.
        """

    @abstractmethod
    def players(self, run: Run, checkpoint: Path) -> "Players":
        """Returns the policy in a checkpoint's folder, and the players it is compared with; imports torch."""

    @abstractmethod
    def measured(self, run: Run) -> str:
        """Returns the file of the measured judge that a teacher simulates; empty if there is none."""


def at_most(section: Section, **bounds: int) -> Section:
    """Returns a config section with each named field reduced to its bound if it is larger."""
    return replace(section, **{name: min(getattr(section, name), bound) for name, bound in bounds.items()})  # pyright: ignore[reportArgumentType, reportCallIssue] - sections are dataclasses
