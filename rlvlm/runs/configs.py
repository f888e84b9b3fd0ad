"""The configs of all pipelines by name, and a run's `config.yaml`, which says which one it has."""

from typing import Any

import yaml

from rlvlm.errors import UsageError
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.settings import read_settings, to_yaml
from rlvlm.runs.policy.config import PolicyRunConfig
from rlvlm.runs.preference.config import PreferenceRunConfig

CONFIGS: dict[str, type[RunConfig]] = {config.pipeline: config for config in (PreferenceRunConfig, PolicyRunConfig)}


def config_text(config: RunConfig) -> str:
    """The text of `config.yaml`."""
    return f"pipeline: {config.pipeline}\n{to_yaml(config)}"


def read_config_text(text: str) -> RunConfig:
    """The config that `config_text` wrote; one without a pipeline is of rlvlm 0.1, which knew preferences only.

    Raises:
        UsageError: not YAML, an unknown pipeline or key, a value of the wrong type, or one that the config refuses.
    """
    try:
        tree: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"the configuration is not YAML: {error}", "restore the file, or start a new run") from error
    name = tree.pop("pipeline", PreferenceRunConfig.pipeline) if isinstance(tree, dict) else ""
    if name not in CONFIGS:
        raise UsageError(
            f"the configuration is for a pipeline {name!r}; known here: {', '.join(CONFIGS)}",
            "use the version of rlvlm that wrote it (environment.json names it)",
        )
    return read_settings(CONFIGS[name], tree)
