"""Configuration of a sweep: a YAML file of `tune_configs/`, read strictly. Imports neither torch nor ray."""

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rlvlm.core.checks import Bound, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check_bounds
from rlvlm.core.disk import shipped
from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import read_text
from rlvlm.core.leads import CodeRef
from rlvlm.runs.settings.tree import from_yaml

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One of the compared sources: settings that all its runs share, on every task."""

    title: str
    """Name in tables and legends."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of a run's configuration by dotted name, e.g. `reward.teacher: oracle`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetConfig:
    """Budget of every run, so that sources are compared at equal cost."""

    steps: PositiveInt | None = None
    """Env steps of each run; null takes each task's own."""
    queries: NonNegativeInt | None = None
    """Maximum number of queries of each run; null takes each task's own."""
    may_differ: bool = False
    """Whether the sources of a task may have different budgets, if the budget is what is compared."""

    def __post_init__(self) -> None:
        check_bounds(self, "budget")


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatConfig:
    """Early end of runs whose curve has long been flat, with the exit reason `flat`."""

    share: Annotated[float, Bound("(0, 1)")] = 1 / 3
    """Share of the run's whole length for which the curve must have been flat, in (0, 1)."""
    tolerance: NonNegativeFloat = 0.02
    """Largest difference between two scores of a flat curve, in the score's unit, >= 0."""
    after: Annotated[float, Bound("[0, 1)")] = 1 / 3
    """Share of the run's length, in [0, 1), that does not count: a run that has not begun to learn is not flat."""

    def __post_init__(self) -> None:
        check_bounds(self, "flat")


@dataclass(frozen=True, kw_only=True, slots=True)
class HalvingConfig:
    """ASHA: of the runs of a task that reach a rung, those with lower scores are halted.

    It is for a search among many sources; the last score of a halted run is not a final one.

    Source: Li et al. 2020, arXiv:1810.05934.
    """

    first_rung: PositiveInt = 5_000
    """Env steps before a run may be halted; each later rung is `keep_one_in` times further."""
    keep_one_in: Annotated[int, Bound(">= 2")] = 2
    """One run in this many passes a rung, >= 2."""

    def __post_init__(self) -> None:
        check_bounds(self, "halving")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceConfig:
    """Resources of each run; as many run side by side as fit."""

    cpus: PositiveFloat = 1.0
    """CPU cores per run, > 0."""
    gpus: NonNegativeFloat = 0.0
    """Share of a GPU per run, >= 0."""
    judge_cpus: NonNegativeFloat = 0.0
    """CPU cores reserved for each judge's replica; 0 for none: it works while the run that asks it waits."""
    max_trials: NonNegativeInt = 0
    """Maximum number of concurrent runs; 0: as many as the resources allow."""
    retries: NonNegativeInt = 1
    """Number of restarts of a failed run from its newest checkpoint."""

    def __post_init__(self) -> None:
        check_bounds(self, "resources")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig:
    """A whole comparison: every task with every source and every seed."""

    title: str
    """Subject of the comparison, in one line; heads the report."""
    tasks: tuple[CodeRef, ...]
    """Names of tasks."""
    sources: dict[str, SourceConfig]
    """Compared sources, by folder name."""
    seeds: tuple[int, ...]
    """Seeds of each pair of task and source."""
    task_seeds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Other seeds for a task, by its name: more if a task is cheap or matters most. Means over tasks count all of a
    task's runs, so a task with more seeds has more weight."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of every run, by dotted name."""
    task_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of all runs of one task, by the task's name."""
    resources: ResourceConfig = field(default_factory=ResourceConfig)
    flat: FlatConfig | None = None
    """Early end of runs whose curve is flat; null: never."""
    halving: HalvingConfig | None = None
    """Halving of the worse runs half-way; null: never."""
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
        """Returns the seeds of a task's runs."""
        return self.task_seeds.get(task, self.seeds)


def read_sweep(file: Path) -> SweepConfig:
    """Reads the sweep in a file.

    Raises:
        UsageError: the file cannot be read, has an unknown key, or a value that breaks a rule.
    """
    try:
        return from_yaml(SweepConfig, read_text(file), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}", "name a YAML file like those of tune_configs/") from error
    except UsageError as error:
        raise UsageError(str(error) if str(file) in str(error) else f"{file}: {error}", error.fix) from error


def find_sweep_file(name: str) -> Path:
    """Returns the file of a sweep: `name` is a path, or the name of a file of `tune_configs/`.

    Raises:
        UsageError: there is none.
    """
    path = Path(name)
    # a name without a suffix is that of a shipped sweep, even beside a folder of that name (`--out NAME`)
    if path.suffix or path.is_file():
        return path
    known = {file.stem: file for file in sorted(shipped("tune_configs").glob("*.yaml"))}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise UsageError(
            f"there is no sweep {name!r}; ready ones: {', '.join(sorted(known))}",
            f"did you mean rlvlm sweep {near[0]}?" if near else "give a YAML file like those of tune_configs/",
        )
    return known[name]
