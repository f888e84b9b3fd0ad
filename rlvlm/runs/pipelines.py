"""The pipelines by the name of their config. Imports what they all stand on: for whoever is about to train or play."""

from rlvlm.runs.config import RunConfig
from rlvlm.runs.configs import load_own
from rlvlm.runs.pipeline import Pipeline
from rlvlm.runs.policy.pipeline import PolicyPipeline
from rlvlm.runs.preference.pipeline import PreferencePipeline
from rlvlm.runs.vla.pipeline import VLAPipeline

_PIPELINES: dict[str, type[Pipeline]] = {"preference": PreferencePipeline, "policy": PolicyPipeline, "vla": VLAPipeline}


def pipeline_of(config: RunConfig) -> Pipeline:
    """What does the runs of `config` in their own way."""
    return (load_own(config.pipeline) if ":" in config.pipeline else _PIPELINES[config.pipeline])()
