"""This sitting of a sweep, seen from the process that holds it: listens to Tune, keeps the records, feeds the table."""

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial

from rlvlm.core.console.signals import StopRequest
from rlvlm.sweeps.config import SweepConfig
from rlvlm.sweeps.folder import State, SweepFolder, TrialRecord
from rlvlm.sweeps.halving import Halving
from rlvlm.sweeps.plan import TrialPlan
from rlvlm.sweeps.progress_table import ProgressTable


class SweepCallback(Callback):
    """Tune's callback.

    Args:
        folder: of the sweep.
        sweep: as it was started.
        plans: all runs, by key.
        table: shows them.
        stop: whether a signal asked for an end; this takes Tune's own handlers over.
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
        self._stop = stop
        self._tune_ends: Any = None
        self.records = table.records = folder.records(list(plans.values()))
        self._halving = self._remembered(sweep) if sweep.halving else {}

    def retry(self, keys: Sequence[str]) -> None:
        """Forgets that these failed before: they are tried again."""
        for key in keys:
            if self.records[key].state is State.FAILED:
                self._note(key, State.SAVED if self.records[key].env_steps else State.WAITING)

    def fail(self, keys: Sequence[str], cause: str) -> None:
        """Notes runs that cannot be started."""
        for key in keys:
            self._note(key, State.FAILED, cause=cause)

    def is_stopping(self) -> bool:
        """Whether a signal asked for an end."""
        return bool(self._stop)

    def is_halted(self, key: str, result: dict[str, Any]) -> bool:
        """Whether the sweep's halving ends a run at this report; a run that is over anyway is not halted."""
        if "score" not in result:
            return False
        halving = self._halving.get(self._plans[key].task)
        is_out = halving is not None and halving.is_halted(key, result["evaluated_at"], result["score"])
        if not is_out or result["done"]:
            return False
        self._note(key, State.HALTED)
        return True

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Takes the signals over, which Tune claims for itself when it starts."""
        if self._tune_ends is None:
            self._tune_ends = signal.getsignal(signal.SIGUSR1)
            self._stop.take_over()

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Ends Tune once every run that was under way is saved."""
        if self._stop and not any(trial.status == Trial.RUNNING for trial in trials):
            self._tune_ends(signal.SIGUSR1, None)

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Notes a run as running."""
        self._note(trial.config["trial"], State.RUNNING)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """Notes where a run is."""
        key = trial.config["trial"]
        if self.records[key].state is State.HALTED:
            return
        state = State(result["reason"]) if result["done"] else State.RUNNING
        self._note(key, state, env_steps=result["env_steps"], score=result.get("score"))
        self._table.update(key, self.records[key], result["steps_per_s"], result.get("evaluated_at", 0))

    def on_trial_save(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Notes a run that was paused as saved."""
        if self.records[trial.config["trial"]].state is State.RUNNING:
            self._note(trial.config["trial"], State.SAVED)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Notes a run as failed, with its cause; the others go on."""
        self._note(trial.config["trial"], State.FAILED, cause=cause_of(trial))

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles callbacks with its own state, and the live objects belong to this process."""
        return {}

    def _note(self, key: str, state: State, **news: Any) -> None:
        known, plan = self.records[key], self._plans[key]
        kept = {"env_steps": known.env_steps, "score": known.score} | {k: v for k, v in news.items() if v is not None}
        record = TrialRecord(task=plan.task, source=plan.source, seed=plan.seed, state=state, **kept)
        self.records[key] = record
        if state is not known.state:
            self._folder.write_records(list(self.records.values()))
            self._table.change(key, record)

    def _remembered(self, sweep: SweepConfig) -> dict[str, Halving]:
        """A halving per task, which knows the evaluations of all sittings so far."""
        assert sweep.halving is not None
        found: dict[str, Halving] = {}
        for key, plan in self._plans.items():
            halving = found.setdefault(plan.task, Halving(sweep.halving, plan.config.steps))
            for steps, score in zip(*self._folder.evaluations(plan), strict=True):
                halving.is_halted(key, steps, float(score))
        return found


def cause_of(trial: Trial) -> str:
    """What ended a run, in one line: the last one that Tune has noted, which is a RunError's own words.

    It is read from Tune's file in this process's own folder: the pickled error is not in its place yet when Tune calls.
    """
    file = trial.error_file
    lines = Path(file).read_text().split("\n") if file else []
    noted = [line.strip() for line in lines if line.strip()]
    return re.sub(r"^rlvlm\.core\.errors\.\w+: ", "", noted[-1]) if noted else "its process ended"
