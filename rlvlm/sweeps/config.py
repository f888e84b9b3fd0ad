"""What a sweep compares: a YAML file of `tune_configs/`, read strictly. Imports neither torch nor ray."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvlm.core.disk import shipped
from rlvlm.core.errors import UsageError
from rlvlm.runs.settings import from_yaml

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One of the things compared: settings that all its runs share, on every task."""

    title: str
    """Its name in tables and legends."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of a run's configuration by dotted name, e.g. `reward.teacher: oracle`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetConfig:
    """What every run may spend, so that sources are compared at equal cost."""

    steps: int | None = None
    """Env steps of each run; null takes each task's own."""
    queries: int | None = None
    """Most queries of each run; null takes each task's own."""
    may_differ: bool = False
    """Whether the sources of a task may have different budgets, because the budget is what is compared."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"budget.steps must be >= 1 or null, got {self.steps}")
        if self.queries is not None and self.queries < 0:
            raise ValueError(f"budget.queries must be >= 0 or null, got {self.queries}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatConfig:
    """When a run may end before its last step: its curve has long been flat. Its exit reason is then `flat`."""

    share: float = 1 / 3
    """How long it must have been flat, as a share of the run's whole length, in (0, 1)."""
    tolerance: float = 0.02
    """Largest difference between two scores of a flat curve, in the score's unit, >= 0."""
    after: float = 1 / 3
    """Share of the run's length that does not count: a run that has not begun to learn is not flat, in [0, 1)."""

    def __post_init__(self) -> None:
        if not (0 < self.share < 1 and 0 <= self.after < 1 and self.tolerance >= 0):
            raise ValueError(
                "need flat.share in (0, 1), after in [0, 1) and tolerance >= 0, got "
                f"{self.share}, {self.after} and {self.tolerance}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class HalvingConfig:
    """ASHA: of the runs of a task that reach a rung, those in the lower part of the scores are halted.

    It is for a search among many sources; the last score of a halted run is no final one.

    Source: Li et al. 2020, arXiv:1810.05934.
    """

    first_rung: int = 5_000
    """Env steps before a run may be halted; later rungs are `keep_one_in` times further each."""
    keep_one_in: int = 2
    """One run in this many passes a rung, >= 2."""

    def __post_init__(self) -> None:
        if self.first_rung < 1 or self.keep_one_in < 2:
            raise ValueError(
                f"need halving.first_rung >= 1 and keep_one_in >= 2, got {self.first_rung} and {self.keep_one_in}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceConfig:
    """What each run takes of the machine or cluster; as many run side by side as there is room for."""

    cpus: float = 1.0
    """CPU cores per run, > 0."""
    gpus: float = 0.0
    """Share of a GPU per run, >= 0."""
    judge_cpus: float = 0.0
    """CPU cores set aside for each judge's replica; 0: it works while the run that asked waits."""
    max_trials: int = 0
    """Most concurrent runs; 0: as many as the resources allow."""
    retries: int = 1
    """How often a failed run is restarted from its newest checkpoint."""

    def __post_init__(self) -> None:
        if self.cpus <= 0 or self.gpus < 0 or self.judge_cpus < 0:
            raise ValueError(
                "need resources.cpus > 0, gpus >= 0 and judge_cpus >= 0, got "
                f"{self.cpus}, {self.gpus} and {self.judge_cpus}"
            )
        if self.max_trials < 0 or self.retries < 0:
            raise ValueError(f"need resources.max_trials >= 0 and retries >= 0, got {self.max_trials}, {self.retries}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig:
    """A whole comparison: every task with every source and every seed."""

    title: str
    """What is compared, in one line; heads the report."""
    tasks: tuple[str, ...]
    """Names of tasks."""
    sources: dict[str, SourceConfig]
    """What is compared, by the name of its folder."""
    seeds: tuple[int, ...]
    """Seeds of each pair of task and source."""
    task_seeds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Other seeds for one task, by its name: more where a task is cheap or matters most. A task's
    runs all count in means over tasks, so one with more seeds weighs more there."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of every run, by dotted name."""
    task_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of all runs of one task, by the task's name."""
    resources: ResourceConfig = field(default_factory=ResourceConfig)
    flat: FlatConfig | None = None
    """Whether a run may end early once its curve is flat; null: never."""
    halving: HalvingConfig | None = None
    """Whether the worse runs are halted half-way; null: never."""
    smoke: bool = False
    """Shorten every run to minutes: all parts run, nothing is trained to convergence."""

    def __post_init__(self) -> None:
        named = {name: list(getattr(self, name)) for name in ("tasks", "sources", "seeds")}
        named |= {f"task_seeds.{task}": list(seeds) for task, seeds in self.task_seeds.items()}
        for name, values in named.items():
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must name at least one, and none twice, got {values}")
        for name in self.sources:
            if not _NAME.fullmatch(name):
                raise ValueError(f"the source {name!r} must be letters, digits, '-', '_' and '.', it names a folder")
        for name in ("task_seeds", "task_settings"):
            unknown = [task for task in getattr(self, name) if task not in self.tasks]
            if unknown:
                raise ValueError(f"{name} has {unknown[0]}, which is not among the tasks {', '.join(self.tasks)}")

    def seeds_of(self, task: str) -> tuple[int, ...]:
        """Seeds of a task's runs."""
        return self.task_seeds.get(task, self.seeds)


def read_sweep(file: Path) -> SweepConfig:
    """The sweep that a file describes.

    Raises:
        UsageError: it cannot be read, has an unknown key, or a value that breaks a rule.
    """
    try:
        return from_yaml(SweepConfig, file.read_text(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}", "name a YAML file like those of tune_configs/") from error
    except UsageError as error:
        raise UsageError(str(error) if str(file) in str(error) else f"{file}: {error}", error.fix) from error


def find_sweep_file(name: str) -> Path:
    """The file that `name` means: a path, or one of `tune_configs/` by its name.

    Raises:
        UsageError: there is none.
    """
    path = Path(name)
    # a word without a suffix is the name of a sweep that ships, also beside a folder of that name (`--out NAME`)
    if path.suffix or path.is_file():
        return path
    known = {file.stem: file for file in sorted(shipped("tune_configs").glob("*.yaml"))}
    if name not in known:
        raise UsageError(
            f"there is no sweep {name!r}; ready ones: {', '.join(sorted(known))}",
            "give a YAML file, e.g. rlvlm sweep tune_configs/reward_sources.yaml",
        )
    return known[name]
