"""A watched judge in Stable-Baselines3: `model.learn(60_000, callback=WatchCallback(watch, "watch.html"))`."""
# pyright: reportMissingImports=false
# only those who use SB3 have it

from pathlib import Path

from stable_baselines3.common.callbacks import BaseCallback

from rlvlm.reports.watch import Watch


class WatchCallback(BaseCallback):
    """Logs the watch's figures with each rollout, and writes its page at the end.

    Args:
        watch: watch whose judge rewards.
        report: file of the page; empty writes none.
        stops: whether an alarm ends the training.
    """

    def __init__(self, watch: Watch, report: str | Path = "", *, stops: bool = False) -> None:
        super().__init__()
        self._watch, self._report, self._stops = watch, report, stops

    def _on_step(self) -> bool:
        return not (self._stops and self._watch.alarm)

    def _on_rollout_end(self) -> None:
        for name, value in self._watch.figures().items():
            self.logger.record(name, value)

    def _on_training_end(self) -> None:
        if self._report:
            self._watch.report(self._report)
