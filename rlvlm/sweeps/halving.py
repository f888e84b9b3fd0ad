"""Who runs next, and who stops: asked by Tune at every report of a run."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from rlvlm.sweeps.config import HalvingConfig


class Halving:
    """ASHA over the runs of one task: a score says nothing about the runs of another.

    It remembers runs by their keys, so those of earlier sittings take part in what is decided in this one.

    Args:
        config: the rungs.
        total_steps: env steps of the task's runs.
    """

    def __init__(self, config: HalvingConfig, total_steps: int) -> None:
        # Any: it is called directly and given only what it reads, a run's name and its result.
        self._asha: Any = ASHAScheduler(
            time_attr="env_steps",
            metric="score",
            mode="max",
            max_t=max(total_steps, config.first_rung),
            grace_period=config.first_rung,
            reduction_factor=config.keep_one_in,
            stop_last_trials=False,
        )
        self._members: dict[str, SimpleNamespace] = {}

    def is_halted(self, key: str, env_steps: int, score: float) -> bool:
        """Takes in an evaluation, and says whether the run has to stop."""
        if key not in self._members:
            self._members[key] = SimpleNamespace(trial_id=key)
            self._asha.on_trial_add(None, self._members[key])
        result = {"env_steps": env_steps, "score": score}
        return self._asha.on_trial_result(None, self._members[key], result) == TrialScheduler.STOP


class SweepScheduler(FIFOScheduler):
    """First come, first served; pauses every run once `is_stopping`, and stops those that `is_halted` names.

    Args:
        is_stopping: whether the sweep has been asked to stop.
        is_halted: whether a run, named by its key, has to stop at this report.
    """

    def __init__(self, is_stopping: Callable[[], bool], is_halted: Callable[[str, dict[str, Any]], bool]) -> None:
        super().__init__()
        self._is_stopping = is_stopping
        self._is_halted = is_halted

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Goes on, pauses (which saves the run), or stops."""
        if self._is_halted(trial.config["trial"], result):
            return TrialScheduler.STOP
        return TrialScheduler.PAUSE if self._is_stopping() else TrialScheduler.CONTINUE

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """The next that waits; none once the sweep stops."""
        return None if self._is_stopping() else super().choose_trial_to_run(tune_controller)

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles schedulers with its own state, and the live objects belong to this process."""
        return {}
