"""The pipelines by the name of their config; the one that is asked for is imported, and no other."""

from rlvlm.runs.config import RunConfig
from rlvlm.runs.configs import load_own
from rlvlm.runs.pipeline import Pipeline

_PIPELINES = {
    "preference": "rlvlm.runs.preference.pipeline:PreferencePipeline",
    "policy": "rlvlm.runs.policy.pipeline:PolicyPipeline",
    "vla": "rlvlm.runs.vla.pipeline:VLAPipeline",
}


def pipeline_of(config: RunConfig) -> Pipeline:
    """What does the runs of `config` in their own way.

    Raises:
        UsageError: there is no such pipeline of one's own.
    """
    return load_own(_PIPELINES.get(config.pipeline, config.pipeline))()
