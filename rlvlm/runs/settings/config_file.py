"""A run's settings in files: writing and reading, including files of an earlier 0.2 and from other people.

They stand in `config.yaml`, in each checkpoint's `run.json` and in a sweep's file: whatever reads one of these asks
`_modernise` for today's names.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rlvlm.algorithms.policy_gradient.config import PRESETS
from rlvlm.core.errors import UsageError
from rlvlm.core.guests import current_section, guests
from rlvlm.core.trust import foreign_code, is_trusted
from rlvlm.core.yaml_text import read_yaml
from rlvlm.envs.config import current_settings
from rlvlm.envs.registry import find_task, own_settings
from rlvlm.policies.vlm.config import HEAD_OF_ACTS
from rlvlm.runs.settings.config import RunConfig
from rlvlm.runs.settings.kinds import KINDS
from rlvlm.runs.settings.tree import flat, nested, read_settings, to_yaml

_BEFORE_KINDS = {"sac": "steps", "ppo": "turns", "grpo": "chunks"}
"""Kinds by the `algorithm` that came first in `config.yaml` before kinds existed."""


_GONE: Mapping[str, Any] = {
    "algo.advantage.chunk_share": 1.0,
    "algo.random_hold": 0.5,
    "policy.pooling": "last",
}
"""Removed settings of an earlier 0.2, with the values that equal today's behaviour."""
RENAMED = {
    "algo.most_unreadable": "max_invalid_share",
    "algo.least_range": "min_range",
    "algo.largest_kl": "max_kl",
    "algo.final_lr": "min_lr_ratio",
    "algo.is_shrunk": "shrinkage",
    "algo.loss.largest_ratio": "max_ratio",
    "reward.monitor.least_auc": "min_auc",
    "reward.monitor.most_false_positives": "max_false_positives",
    "reward.monitor.claim": "success_threshold",
    "policy.smolvla": "lerobot",
    "policy.acts": "head",
    "judge.picture_px": "image_px",
    "reward_model.picture_px": "image_px",
}
"""Renamed settings of an earlier 0.2, with the last part of today's names."""


def config_text(config: RunConfig) -> str:
    """Returns the text of `config.yaml`."""
    return f"kind: {config.kind.name}\nalgorithm: {config.algorithm}\n{to_yaml(config)}"


def read_config_text(text: str, name: str = "the configuration") -> RunConfig:
    """Reads a config written by `config_text`, or one of an earlier 0.2, with an algorithm instead of a kind.

    Raises:
        UsageError: not YAML, an unknown kind or key, a value of the wrong type, or one that the config refuses.
    """
    tree: Any = read_yaml(text, name)
    kind, is_old = "steps", False
    if isinstance(tree, dict):
        is_old = "kind" not in tree
        algorithm = str(tree.pop("algorithm", "sac"))
        kind = str(tree.pop("kind", _BEFORE_KINDS.get(algorithm, algorithm)))
        if algorithm in ("ppo", "grpo") and isinstance(algo := tree.get("algo"), dict):
            advantage = algo.get("advantage")
            estimator = advantage.get("estimator", "gae") if isinstance(advantage, dict) else "gae"
            algo["preset"] = next(
                (name for name, (sets, _) in PRESETS.items() if sets["estimator"] == estimator), "ppo"
            )
        _modernise(tree, name)
    if kind not in KINDS:
        raise UsageError(
            f"{name} is of a kind {kind!r}; known here: {', '.join(KINDS)}",
            "use the version of rlvlm that wrote it (environment.json names it)",
        )
    try:
        task = str(tree.get("task", "")) if isinstance(tree, dict) else ""
        is_known = _is_known(task)
        like = KINDS[kind].run(task=task if is_known else "")
        if isinstance(tree, dict) and isinstance(env := tree.get("env"), dict):
            if is_old:  # before kinds, every file contained the settings of all families
                tree["env"] = own_settings(type(like.env), env)
            elif not is_known:
                tree["env"] = {name: env[name] for name in env if hasattr(like.env, name)}
        return read_settings(KINDS[kind].run, tree, like=like)
    except UsageError as error:
        raise UsageError(f"{name}: {error}", error.fix) from error


def read_saved_settings(settings: Mapping[str, Any], config: RunConfig, name: str) -> dict[str, Any]:
    """Returns the settings that a checkpoint was saved with under today's names; those that are new since are
    `config`'s.

    Args:
        settings: settings by dotted name, from `flat`, of this or an earlier 0.2.
        config: config of the same run.
        name: name of the file, for messages.

    Raises:
        UsageError: a setting has another meaning today, or a value that is refused.
    """
    if not settings:
        return {}
    tree = nested(settings)
    _modernise(tree, name)
    # before kinds, a checkpoint had the settings of all kinds of runs and all families of envs
    known = {field.name for field in fields(config)}
    tree = {section: value for section, value in tree.items() if section in known}
    tree["env"] = own_settings(type(config.env), tree.get("env", {}))
    try:
        found = flat(read_settings(type(config), tree, like=config))
    except UsageError as error:
        raise UsageError(f"{name}: {error}", error.fix) from error
    return {setting: value for setting, value in found.items() if setting != "out"}  # a run's folder may be moved


def current_names(settings: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Returns settings, whole sections among them, under today's names: each by its dotted name.

    Raises:
        UsageError: a setting is gone, and had an effect.
    """
    tree = nested(flat(settings))
    _modernise(tree, file)
    return flat(tree)


def _modernise(tree: dict[str, Any], file: str) -> None:
    """Renames settings to today's names, and drops removed ones, or raises UsageError if one had an effect."""
    for name, idle in _GONE.items():
        owner, last = _owner(tree, name)
        if owner is not None and last in owner and (value := owner.pop(last)) != idle:
            raise UsageError(
                f"{file} sets {name} {value}, which this version does not have",
                "use the version of rlvlm that wrote it (environment.json names it)",
            )
    for old, new in RENAMED.items():
        owner, last = _owner(tree, old)
        if owner is not None and last in owner:
            value = owner.pop(last)
            owner[new] = HEAD_OF_ACTS.get(value, value) if last == "acts" else value
    if isinstance(tree.get("env"), dict):
        tree["env"] = current_settings(tree["env"])
    for name in (name for guest in guests().values() for name in guest.settings):
        owner, last = _owner(tree, name)
        if owner is not None and isinstance(owner.get(last), dict):
            owner[last] = current_section(name, owner[last])


def _owner(tree: dict[str, Any], name: str) -> tuple[dict[str, Any] | None, str]:
    """Returns the section of `tree` for the setting `name`, None if there is none, and its key there."""
    *sections, last = name.split(".")
    owner: Any = tree
    for section in sections:
        owner = owner.get(section) if isinstance(owner, dict) else None
    return (owner if isinstance(owner, dict) else None), last


def _is_known(task: str) -> bool:
    """Returns whether the class of a task's settings is known here. A user's own module is imported for it if it is
    trusted; otherwise nothing can be played, and reports lack the settings that only it has.
    """
    if not is_trusted("", foreign_code([task]), {}):
        return False
    try:
        find_task(task)
    except UsageError:
        return False
    return True
