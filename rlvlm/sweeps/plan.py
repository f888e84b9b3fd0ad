"""The runs of a sweep, each with its complete configuration, and the judges that they share."""

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvlm.core.errors import UsageError
from rlvlm.runs.settings.config import RunConfig
from rlvlm.runs.settings.config_file import current_names
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import changed_leaves, option_words, override, to_yaml
from rlvlm.sweeps.config import SweepConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPlan:
    """One run of a sweep."""

    task: str
    source: str
    seed: int
    config: RunConfig
    """Complete configuration, except for the folder."""

    @property
    def key(self) -> str:
        """Name of the run in the sweep, and path of its folder below the sweep's."""
        return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', self.task)}/{self.source}/seed_{self.seed}"

    @property
    def label(self) -> str:
        """Display name."""
        return f"{self.task}  {self.source}  seed {self.seed}"


def expand(sweep: SweepConfig) -> list[TrialPlan]:
    """Returns the runs of a sweep, seed by seed, so that a sweep cut short has compared as much as possible.

    Raises:
        UsageError: a setting is wrong, or the sources of a task have different budgets.
    """
    # the first seed of every task, then the second: tasks may have different numbers of seeds
    rounds = itertools.zip_longest(*map(sweep.seeds_of, sweep.tasks))
    plans = [
        _plan(sweep, task, source, seed)
        for seeds in rounds
        for task, seed in zip(sweep.tasks, seeds, strict=True)
        if seed is not None
        for source in sweep.sources
    ]
    for task in () if sweep.budget.may_differ else sweep.tasks:
        runs = [plan.config for plan in plans if plan.task == task]
        steps = {config.steps for config in runs}
        queries = {config.kind.max_queries(config) for config in runs} - {0}  # sources that ask no judge use none
        for what, spent in (("env steps", steps), ("queries", queries)):
            if len(spent) > 1:
                raise UsageError(
                    f"the sources of {task} have different budgets of {what}: {min(spent):,} to {max(spent):,}",
                    "set it once in budget:, or say budget: {may_differ: true}",
                )
    return plans


def run_configs(plans: Sequence[TrialPlan]) -> list[RunConfig]:
    """Returns the configuration of one seed of each task and source."""
    return list({(plan.task, plan.source): plan.config for plan in plans}.values())


def notes_of_plans(plans: Sequence[TrialPlan]) -> list[str]:
    """Returns notes about the runs for the user, once for all seeds; none of them prevents a start."""
    notes = [f"{plan.task}, {plan.source}: {note}" for plan in plans for note in plan.config.kind.notes(plan.config)]
    return list(dict.fromkeys(notes))


def shared_judges(plans: Sequence[TrialPlan], judge_cpus: float, folder: Path) -> dict[str, RunConfig]:
    """Returns one run's configuration per Serve app to start for `plans`, by the app's name."""
    # by the app's name: the last of the runs that ask the same judge represents all
    configs = [plan.config for plan in plans if plan.config.reward.asks_judge and not plan.config.serve.app]
    return {
        app_name(config, folder): replace(config, serve=replace(config.serve, num_cpus=judge_cpus))
        for config in configs
    }


def app_name(config: RunConfig, folder: Path) -> str:
    """Returns the Serve app of a run of the sweep in `folder`: one for all runs that ask the same judge."""
    if config.serve.app:
        return config.serve.app
    # the folder separates the judges of two sweeps on one cluster; equal judges of one sweep are one app
    settings = f"{to_yaml(config.judge)}{to_yaml(config.serve)}{folder.resolve()}"
    return f"sweep-{config.judge.backend}-{hashlib.sha256(settings.encode()).hexdigest()[:10]}"


def alone_command(config: RunConfig) -> list[str]:
    """Returns the command line that runs `config` without the sweep, except for settings without effect."""
    start = recipe(config.task, has_checkpoint=config.large_policy is not None)
    start = start.starting_for({"algo.preset": config.algo.preset})
    changed = changed_leaves(replace(start, out=None), replace(config, out=None))
    in_force = {name: value for name, (_, value) in changed.items() if config.why_unused(name) is None}
    return ["rlvlm", "run", config.task, *option_words(in_force)]


def _plan(sweep: SweepConfig, task: str, source: str, seed: int) -> TrialPlan:
    # the more specific wins: sweep, then task, then source
    settings: dict[str, Any] = {}
    for part in (sweep.settings, sweep.task_settings.get(task, {}), sweep.sources[source].settings):
        settings |= current_names(part, f"source {source} on {task}")
    budget = {"steps": sweep.budget.steps, "feedback.max_queries": sweep.budget.queries}
    set_here = {name: value for name, value in budget.items() if value is not None} | {"seed": seed}
    if taken := [name for name in settings if name in (*set_here, "task", "out")]:
        raise UsageError(
            f"the setting {taken[0]} is set by the sweep itself",
            "take it out of the settings, or, for steps and queries, out of the budget",
        )
    try:
        config = override(recipe(task, has_checkpoint=bool(settings.get("policy.model"))), settings | set_here)
    except UsageError as error:
        raise UsageError(f"source {source} on {task}: {error}", error.fix) from error
    return TrialPlan(task=task, source=source, seed=seed, config=config.smoke() if sweep.smoke else config)
