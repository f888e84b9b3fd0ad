"""One run of a sweep as a Tune trial: the run loop of `python -m rlvlm.run`, in a process that Tune places."""

import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from ray.tune import Trainable
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from rlvlm.algorithms.heartbeat import start_heartbeat
from rlvlm.core.console.panel import RunConsole
from rlvlm.core.console.quiet import quiet_output
from rlvlm.core.errors import RunError, UsageError
from rlvlm.pages.run import write_run_pages
from rlvlm.runs.files.folder import RunFolder, check_trust, create_folder
from rlvlm.runs.start.preflight import check_before_run
from rlvlm.runs.train import Training, choose_sound, convert_errors, open_training
from rlvlm.sweeps.config import FlatConfig
from rlvlm.sweeps.folder import ENDED, State, SweepFolder
from rlvlm.sweeps.plan import TrialPlan, alone_command, app_name

REPORT_S = 1.0
"""Longest time between two reports to Tune, in seconds, plus the current round: reports tell a run that the sweep
stops."""
_HOLDING = Retrying(
    stop=stop_after_delay(60), wait=wait_fixed(1), retry=retry_if_exception_type(UsageError), reraise=True
)
"""Retry for a run's folder: after a kill, the process that held it may need a moment to end."""


class SweepTrial(Trainable):
    """Resumes its run from the newest checkpoint in the run's own folder, however it was stopped before.

    Tune keeps no checkpoints of it: `config` names the sweep's folder and the run, and everything else is there.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Opens the run; a finished one only reports that."""
        start_heartbeat()
        self._sweep = SweepFolder(Path(config["sweep"]))
        self._flat = self._sweep.config().flat
        self._plan: TrialPlan = self._sweep.plans()[config["trial"]]
        found = self._sweep.run(self._plan)
        if found is not None and not found.has_begun():
            with found.locked():
                found.remove()  # it failed before its first step, and may have been planned anew
            found = None
        if found is None:
            run = replace(self._plan.config, out=self._sweep.run_path(self._plan))
            found = create_folder(run, alone_command(self._plan.config), datetime.now())
        self._folder: RunFolder = found
        self._training: Training | None = None
        self._is_written = False
        self._stack = ExitStack()
        reason = str(found.summary().get("exit_reason", ""))
        self._reason = reason if reason in ENDED else ""
        if self._reason:
            return
        try:
            self._training = self._open()
        except BaseException:
            # Tune calls no `cleanup` after a failed setup
            self._stack.close()
            raise

    def step(self) -> dict[str, Any]:
        """Trains until the next evaluation, the end or the time of a report, and returns the run's progress."""
        training, deadline = self._training, time.monotonic() + REPORT_S
        if training is None:
            return self._report()
        try:
            with convert_errors(self._folder):
                self._end_if_over(training)  # killed after its last step, before its summary
                while not self._reason:
                    # reports are due at evaluations, by which the sweep's halving decides, and occasionally in between
                    known = len(self._folder.evaluations.read())
                    training.advance()
                    has_news = len(self._folder.evaluations.read()) > known
                    self._end_if_over(training)
                    if has_news or time.monotonic() > deadline:
                        break
        except RunError as error:
            self._write_down(training, type(error).__name__)  # and no checkpoint: the next try must not begin there
            raise
        return self._report()

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Saves the run into its own folder, as after a signal; Tune gets only the step."""
        if self._training is not None:
            self._training.save()
            # plots of many runs would keep several cores busy, so they are made when the runs have ended
            self._write_down(self._training, "paused", has_pages=False)
        return {"env_steps": self._env_steps}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Does nothing: `setup` has resumed the run's own checkpoint."""

    def cleanup(self) -> None:
        """Saves anything unsaved, e.g. after the sweep halts a run, and ends the run's processes."""
        with self._stack:
            if self._training is not None and not self._is_written:
                self._training.save()
                self._write_down(self._training, "stopped")

    @property
    def _env_steps(self) -> int:
        # a finished run was not opened again
        state = self._training.state if self._training else None
        return state.env_steps if state else int(self._folder.summary()["env_steps"])

    def _open(self) -> Training:
        """Returns the run loop at the newest checkpoint, with the run's folder locked."""
        # the user who started the sweep trusted its imports; another node does not know that
        check_trust([self._folder.path], trust=True)
        config = self._folder.config()
        if config.reward.asks_judge:  # the judge that the sweep has started for all runs that ask it
            config = replace(config, serve=replace(config.serve, app=app_name(config, self._sweep.path)))
        with convert_errors(self._folder):
            check_before_run(config, has_started=bool(self._folder.checkpoints.newest_first()))
            _HOLDING(lambda: self._stack.enter_context(self._folder.locked()))
            # the run's own log: several runs share the sweep's terminal
            log = self._stack.enter_context(open(self._folder.log, "a", buffering=1))
            self._stack.enter_context(quiet_output(self._folder.log))
            console = self._stack.enter_context(RunConsole(log, config.title, config.steps, config.kind.panel))
            newest = choose_sound(self._folder.checkpoints.newest_first(), console)
            training = open_training(self._folder, config, newest, console, listener=write_run_pages)
            return self._stack.enter_context(training)

    def _write_down(self, training: Training, exit_reason: str, *, has_pages: bool = True) -> None:
        """Writes the summary, and plots and pages; nothing of the run is saved afterwards."""
        self._is_written = True
        training.finish(exit_reason, has_pages=has_pages)

    def _end_if_over(self, training: Training) -> None:
        """Records the end of the run if it is over: at its last step, or with a flat curve."""
        if training.is_over:
            self._reason = State.DONE
        elif self._flat is not None:
            steps, found = self._sweep.evaluations(self._plan)
            if is_flat(steps, found, self._plan.config.steps, self._flat):
                training.save()  # no later step will: the current policy is the one to play and serve
                self._reason = State.FLAT
        if self._reason:
            self._write_down(training, self._reason)

    def _report(self) -> dict[str, Any]:
        """Returns the run's progress, with a score after the first evaluation."""
        steps, found = self._sweep.evaluations(self._plan)
        latest = {"evaluated_at": steps[-1], "score": float(found[-1])} if steps else {}
        speed = self._training.steps_per_s if self._training else 0.0
        return {
            "env_steps": self._env_steps,
            "steps_per_s": speed,
            "reason": self._reason,
            "done": bool(self._reason),
            **latest,
        }


def is_flat(steps: ArrayLike, scores: ArrayLike, total_steps: int, config: FlatConfig) -> bool:
    """Returns whether the newest scores have been flat for as long as `config` asks.

    Args:
        steps: [N] env steps of the evaluations, rising.
        scores: [N] in the score's unit.
        total_steps: env steps of the whole run.
        config: duration, tolerance and first step.

    Returns:
        True if there is an evaluation at or after `after` of the run, at least `share` of the run before the newest,
        and all scores from there on lie within `tolerance` of each other.
    """
    steps, scores = np.asarray(steps, float), np.asarray(scores, float)
    if not len(steps):
        return False
    # the curve is flat from the last evaluation before this step on, if that is late enough to count
    first = steps[-1] - config.share * total_steps
    begins = np.flatnonzero((steps <= first) & (steps >= config.after * total_steps))
    return bool(len(begins)) and float(np.ptp(scores[begins[-1] :])) <= config.tolerance
