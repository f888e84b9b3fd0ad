"""Default configuration of SoftGym's tasks."""

from rlvlm.envs.config import StepEnvConfig
from rlvlm.runs.settings.steps_run import StepsRun


def stock() -> StepsRun:
    """Returns the run of any of SoftGym's tasks, not tuned."""
    return StepsRun(task="", steps=100_000, env=StepEnvConfig(episode_steps=100))
