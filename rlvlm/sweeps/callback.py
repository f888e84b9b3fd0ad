"""A sweep's callback and scheduler for Tune, in the sweep's process: which run is next or stops, records, progress
table.

Tune pickles callbacks and schedulers with its own state. These keep nothing there: their live objects belong to this
process, and the next start reads the progress from the run folders.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from rlvlm.algorithms.heartbeat import StoppedActors
from rlvlm.core.console.signals import StopRequest
from rlvlm.sweeps.config import HalvingConfig, SweepConfig
from rlvlm.sweeps.folder import State, SweepFolder, TrialRecord
from rlvlm.sweeps.plan import TrialPlan
from rlvlm.sweeps.progress_table import ProgressTable


class Halving:
    """ASHA over the runs of one task; scores of different tasks are not comparable.

    It remembers runs by their keys, so that runs of earlier starts of the sweep count too.
    """

    def __init__(self, config: HalvingConfig, total_steps: int) -> None:
        # Any: called directly, with only what it reads, a run's name and its result
        self._asha: Any = ASHAScheduler(
            time_attr="env_steps",
            metric="score",
            mode="max",
            max_t=max(total_steps, config.first_rung),
            grace_period=config.first_rung,
            reduction_factor=config.keep_one_in,
            stop_last_trials=False,  # a run that reaches its budget is done, and not halted
        )
        self._members: dict[str, SimpleNamespace] = {}

    def is_halted(self, key: str, env_steps: int, score: float) -> bool:
        """Takes in an evaluation, and returns whether the run has to stop."""
        if key not in self._members:
            self._members[key] = SimpleNamespace(trial_id=key)
            self._asha.on_trial_add(None, self._members[key])
        # ASHA halts a run that is below the best 1/keep_one_in of those that reached the same rung before it
        result = {"env_steps": env_steps, "score": score}
        return self._asha.on_trial_result(None, self._members[key], result) == TrialScheduler.STOP


class SweepCallback(Callback):
    """Tune's callback: keeps the records of all runs, shows them in `table`, and returns the signals that Tune claims
    to `stop`.
    """

    def __init__(
        self,
        *,
        folder: SweepFolder,
        sweep: SweepConfig,
        plans: Mapping[str, TrialPlan],
        table: ProgressTable,
        stop: StopRequest,
    ) -> None:
        self._folder = folder
        self._plans = plans
        self._table = table
        self.stop = stop
        self._tune_ends: Any = None
        self._stopped = StoppedActors()
        self.records = table.records = folder.records(list(plans.values()))
        self._halving: dict[str, Halving] = {}
        for key, plan in plans.items() if sweep.halving else ():
            assert sweep.halving is not None
            halving = self._halving.setdefault(plan.task, Halving(sweep.halving, plan.config.steps))
            for steps, score in zip(*folder.evaluations(plan), strict=True):  # evaluations of earlier starts
                halving.is_halted(key, steps, float(score))

    def tell_stop(self, line: str) -> None:
        """Shows `line` at a signal, and the runs that are waited for."""
        running = [key for key, record in self.records.items() if record.state is State.RUNNING]
        names = ", ".join(running[:4]) + (f" and {len(running) - 4} more" if len(running) > 4 else "")
        self._table.line(f"{line}\nwaiting for {len(running)} runs to end their round and save: {names}")

    def retry(self, keys: Sequence[str]) -> None:
        """Resets failed runs among `keys`, so that they are tried again."""
        for key in keys:
            if self.records[key].state is State.FAILED:
                self._note(key, State.SAVED if self.records[key].env_steps else State.WAITING)

    def fail(self, keys: Sequence[str], cause: str) -> None:
        """Records runs that cannot be started."""
        for key in keys:
            self._note(key, State.FAILED, cause=cause)

    def is_halted(self, key: str, result: dict[str, Any]) -> bool:
        """Returns whether the sweep's halving ends a run at this report; a run that is over anyway is not halted."""
        if "score" not in result:
            return False
        halving = self._halving.get(self._plans[key].task)
        is_out = halving is not None and halving.is_halted(key, result["evaluated_at"], result["score"])
        if not is_out or result["done"]:
            return False
        self._note(key, State.HALTED)
        return True

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Takes back the signals, which Tune claims at its start."""
        # once: by now the handler is Tune's
        if self._tune_ends is None:
            self._tune_ends = signal.getsignal(signal.SIGUSR1)
            self.stop.take_over()

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Ends runs whose process is stopped, for which Tune would wait for ever, and ends Tune once every run is saved
        after a stop request.
        """
        actors = {trial.config["trial"]: trial.temporary_state.ray_actor for trial in trials}
        for key, lost in self._stopped.end({key: actor for key, actor in actors.items() if actor}).items():
            self._table.line(f"{key} {lost.what}; it is ended and tried again, as a run whose process died")
        if self.stop and not any(trial.status == Trial.RUNNING for trial in trials):
            # Tune's own handler, which ends its loop after the current step
            self._tune_ends(signal.SIGUSR1, None)

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Records a run as running."""
        self._note(trial.config["trial"], State.RUNNING)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """Records a run's progress."""
        key = trial.config["trial"]
        if self.records[key].state is State.HALTED:
            return  # the scheduler, which Tune asks first, has decided on this very report
        state = State(result["reason"]) if result["done"] else State.RUNNING
        self._note(key, state, env_steps=result["env_steps"], score=result.get("score"))
        self._table.update(key, self.records[key], result["steps_per_s"], result.get("evaluated_at", 0))

    def on_trial_save(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Records a paused run as saved."""
        if self.records[trial.config["trial"]].state is State.RUNNING:
            self._note(trial.config["trial"], State.SAVED)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Records a run as failed, with its cause; the others go on."""
        self._note(trial.config["trial"], State.FAILED, cause=cause_of(trial))

    def __getstate__(self) -> dict[str, Any]:
        """Returns an empty state, for the reason in the module's docstring."""
        return {}

    def _note(self, key: str, state: State, **news: Any) -> None:
        known, plan = self.records[key], self._plans[key]
        # a report without a score, before the first evaluation, does not overwrite a known one
        kept = {"env_steps": known.env_steps, "score": known.score} | {k: v for k, v in news.items() if v is not None}
        record = TrialRecord(task=plan.task, source=plan.source, seed=plan.seed, state=state, **kept)
        self.records[key] = record
        if state is not known.state:
            self._folder.write_records(list(self.records.values()))
            self._table.change(key, record)


class SweepScheduler(FIFOScheduler):
    """Runs trials in order; pauses every run once the sweep is asked to stop, and stops halted ones."""

    def __init__(self, callback: SweepCallback) -> None:
        super().__init__()
        self._callback = callback

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Returns whether the run continues, pauses (which saves it) or stops."""
        if self._callback.is_halted(trial.config["trial"], result):
            return TrialScheduler.STOP
        return TrialScheduler.PAUSE if self._callback.stop else TrialScheduler.CONTINUE

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Returns the next waiting trial; None once the sweep stops."""
        return None if self._callback.stop else super().choose_trial_to_run(tune_controller)

    def __getstate__(self) -> dict[str, Any]:
        """Returns an empty state, for the reason in the module's docstring."""
        return {}


def cause_of(trial: Trial) -> str:
    """Returns the error that ended a run, in one line: the last one that Tune noted, which is a RunError's message.

    It is read from Tune's file in this process's own folder: the pickled error is not yet in place when Tune calls.
    """
    file = trial.error_file
    lines = Path(file).read_text().split("\n") if file else []
    noted = [line.strip() for line in lines if line.strip()]
    return re.sub(r"^rlvlm\.core\.errors\.\w+: ", "", noted[-1]) if noted else "its process ended"
