"""The configuration that a task starts from: the recipe decides which pipeline learns it."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from rlvlm.envs.registry import full_name, task_kind, task_recipe
from rlvlm.envs.task import Kind
from rlvlm.runs.config import RunConfig
from rlvlm.runs.policy import recipes as policy
from rlvlm.runs.preference import recipes as preference
from rlvlm.runs.vla import recipes as vla

RECIPES: Mapping[str, Callable[[], RunConfig]] = {**preference.RECIPES, **policy.RECIPES, **vla.RECIPES}
"""By task: one complete, tuned configuration each."""
FAMILY_RECIPES: Mapping[str, Callable[[str], RunConfig]] = {
    **preference.FAMILY_RECIPES,
    **policy.FAMILY_RECIPES,
    **vla.FAMILY_RECIPES,
}
"""For tasks named FAMILY/NAME, called with the task."""
_GENERAL: Mapping[Kind, Callable[[str], RunConfig]] = {
    "steps": preference.general,
    "turns": policy.general,
    "chunks": vla.general,
}
"""For all others, by what their envs are."""


def recipe(task: str) -> RunConfig:
    """The configuration a task starts from: ours, its family's, its own, or the general defaults with its name.

    Raises:
        UsageError: there is no such task; the message names the nearest.
    """
    task = full_name(task)
    own, family = task_recipe(task), task.partition("/")[0]
    if task in RECIPES:
        return RECIPES[task]()
    if family in FAMILY_RECIPES:
        return FAMILY_RECIPES[family](task)
    if own:
        module, _, function = own.partition(":")
        return replace(getattr(importlib.import_module(module), function)(), task=task)
    return _GENERAL[task_kind(task)](task)
