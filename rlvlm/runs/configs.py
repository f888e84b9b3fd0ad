"""The configs of all pipelines by name, and a run's `config.yaml`, which says which one it has."""

import importlib
from typing import Any

from rlvlm.core.errors import UsageError
from rlvlm.core.yaml_text import read_yaml
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.settings import read_settings, to_yaml
from rlvlm.runs.policy.config import PolicyRunConfig
from rlvlm.runs.preference.config import PreferenceRunConfig
from rlvlm.runs.vla.config import VLARunConfig

CONFIGS: dict[str, type[RunConfig]] = {
    config.pipeline: config for config in (PreferenceRunConfig, PolicyRunConfig, VLARunConfig)
}


def config_text(config: RunConfig) -> str:
    """The text of `config.yaml`."""
    return f"pipeline: {config.pipeline}\n{to_yaml(config)}"


def read_config_text(text: str, name: str = "the configuration") -> RunConfig:
    """The config that `config_text` wrote; one without a pipeline is of rlvlm 0.1, which knew preferences only.

    Raises:
        UsageError: not YAML, an unknown pipeline or key, a value of the wrong type, or one that the config refuses.
    """
    tree: Any = read_yaml(text, name)
    pipeline = str(tree.pop("pipeline", PreferenceRunConfig.pipeline)) if isinstance(tree, dict) else ""
    if ":" not in pipeline and pipeline not in CONFIGS:
        raise UsageError(
            f"the configuration is for a pipeline {pipeline!r}; known here: {', '.join(CONFIGS)}",
            "use the version of rlvlm that wrote it (environment.json names it)",
        )
    kind = load_own(pipeline).config_class if ":" in pipeline else CONFIGS[pipeline]
    try:
        return read_settings(kind, tree)
    except UsageError as error:
        raise UsageError(f"{name}: {error}", error.fix) from error


def load_own(reference: str) -> Any:
    """The pipeline class of one's own that `package.module:CLASS` names, as the `pipeline` of its config does.

    Raises:
        UsageError: there is none.
    """
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, AttributeError) as error:
        fix = "start it where the module can be imported, e.g. with PYTHONPATH"
        raise UsageError(f"cannot load the pipeline {reference!r}: {error}", fix) from error
