"""A watched judge in TRL: `GRPOTrainer(..., callbacks=[WatchCallback(watch, "watch.html")])`, or any HF trainer."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from rlvlm.reports.watch import Watch


class WatchCallback(TrainerCallback):
    """Adds the watch's figures to the trainer's logs, and writes its page at the end.

    Trackers come before a trainer's own callbacks: to log there too, put this one first,
    `trainer.callback_handler.callbacks.insert(0, callback)`.

    Args:
        watch: watch whose judge rewards.
        report: file of the page; empty writes none.
        stops: whether an alarm ends the training.
    """

    def __init__(self, watch: Watch, report: str | Path = "", *, stops: bool = False) -> None:
        self._watch, self._report, self._stops = watch, report, stops

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: object,
    ) -> None:
        figures = self._watch.figures()
        if logs is not None:
            logs |= figures
        if state.log_history:
            state.log_history[-1] |= figures

    def on_step_end(self, args: object, state: object, control: TrainerControl, **_: object) -> None:
        control.should_training_stop = control.should_training_stop or (self._stops and bool(self._watch.alarm))

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None:
        if self._report:
            self._watch.report(self._report)
