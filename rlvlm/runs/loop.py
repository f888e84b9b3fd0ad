"""The run loop: train, look, write down, save. Opened and driven by `train`, and by a sweep's trials."""

import time
from collections import deque
from pathlib import Path

from rlvlm.algorithms.contract import RunAlgorithm
from rlvlm.algorithms.evaluation import Evaluation
from rlvlm.core import metrics
from rlvlm.core.console.panel import RunConsole
from rlvlm.core.console.signals import StopRequest
from rlvlm.core.errors import JudgeUnavailable, MachineError
from rlvlm.runs.artifacts.write import NUM_VIDEOS, VIDEO_PX, write_artifacts
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.checkpoints import RunState
from rlvlm.runs.folder.rows import evaluation_rank, evaluation_row
from rlvlm.runs.folder.run_folder import RunFolder
from rlvlm.runs.folder.settings import differences, flat
from rlvlm.runs.folder.trackers import Trackers
from rlvlm.runs.pipeline import Pipeline
from rlvlm.runs.processes.memory import MemoryWatch

SPEED_ROUNDS = 12
"""Rounds of training over which the speed shown is taken."""


class StoppedEarly(Exception):  # noqa: N818 - no error
    """A signal asked the run to stop before there was anything to save."""


class Training:
    """The run loop: train, look, write down, save.

    Args:
        folder: everything is written there.
        config: of the run.
        algorithm: built, and restored where the run goes on.
        pipeline: of the run; its recorder and pages.
        console: shows it.
        memory: watched meanwhile.
        before: the state it goes on from.
    """

    def __init__(
        self,
        *,
        folder: RunFolder,
        config: RunConfig,
        algorithm: RunAlgorithm,
        pipeline: Pipeline,
        console: RunConsole,
        memory: MemoryWatch,
        before: RunState,
    ) -> None:
        self._folder = folder
        self._config = config
        self._algorithm = algorithm
        self._console = console
        self._memory = memory
        self._before = before
        self._settings = {name: value for name, value in flat(config).items() if name != "out"}
        self._changes = list(before.changes)
        self._started = time.monotonic()
        self._trackers = Trackers(folder, config)
        for note in (self._trackers.trouble, *config.notes):
            if note:
                console.line(note)
        for name, told in differences(before.settings, self._settings).items():
            self._changes.append(f"from step {before.env_steps:,} on {name} is {told}")
            console.line(self._changes[-1])
        self._pipeline = pipeline
        self._recorder = pipeline.open_recorder(folder, config, algorithm.draw)
        self._recent = deque([(before.wall_s, before.env_steps)], maxlen=SPEED_ROUNDS)
        self._last_evaluation = Evaluation(episodes=[])

    @property
    def state(self) -> RunState:
        """Where the run is now."""
        wall_s = self._before.wall_s + time.monotonic() - self._started
        return RunState(
            env_steps=self._algorithm.env_steps,
            wall_s=wall_s,
            peak_rss_mb=self._memory.peak_mb,
            settings=self._settings,
            changes=tuple(self._changes),
        )

    @property
    def is_over(self) -> bool:
        """Whether the last step has been taken."""
        return self._algorithm.env_steps >= self._config.steps

    @property
    def steps_per_s(self) -> float:
        """Env steps per second of the last rounds."""
        (first_s, first_step), (last_s, last_step) = self._recent[0], self._recent[-1]
        return (last_step - first_step) / max(last_s - first_s, 1e-3)

    def begin(self, stop: StopRequest | None = None) -> None:
        """What comes before the first round. Where it taught something, that is evaluated and saved as step 0: the
        curve shows what training added, and a start that nothing improved on stays the best checkpoint.

        Raises:
            StoppedEarly: `stop` was asked for meanwhile; it is looked at where there is a line to tell.
        """

        def tell(line: str) -> None:
            self._console.phase(line)
            if stop:
                raise StoppedEarly

        if self._algorithm.prepare(tell):
            is_best = self._evaluate()
            self._log(is_due=True)
            self._try_to_save(is_best)
            self._recent.clear()  # what is left is predicted from rounds of training alone
            self._recent.append((self.state.wall_s, self.state.env_steps))

    def advance(self) -> None:
        """One round: train, look, write down; save where it is due, as it is at the last step."""
        before = self._algorithm.env_steps
        self._algorithm.train()
        if self.is_over:
            self._algorithm.finish()
        self._recorder.keep(self._algorithm.drain_records())
        is_due = self.is_over or self._crosses(self._config.eval.every_steps, before)
        is_best = is_due and self._evaluate()
        self._log(is_due or self._crosses(self._config.track.log_every_steps, before))
        if self.is_over:
            self.save(is_best)
        elif is_best or self._crosses(self._config.track.checkpoint_every_steps, before):
            self._try_to_save(is_best)

    def save(self, is_best: bool = False) -> None:
        """Saves a checkpoint of now; where there is one already, nothing happens.

        Raises:
            MachineError, OSError: the disk refuses.
        """
        self._folder.checkpoints.save(self.state, self._write_checkpoint, is_best)

    def finish(self, exit_reason: str) -> None:
        """Writes summary, plots, videos and pages, and ends what counts along.

        Args:
            exit_reason: `done`, or why it stopped earlier; only a run that is done is filmed.
        """
        self._console.phase("writing plots, videos and pages")
        films = list(self._last_evaluation.episodes[:NUM_VIDEOS]) if exit_reason == "done" else []
        try:
            films = self._algorithm.rewarded(films)
        except JudgeUnavailable as error:
            self._console.line(f"the films show the true reward: {error}")
        write_artifacts(
            self._folder,
            self._config,
            self.state,
            exit_reason,
            films,
            lambda snapshots: self._algorithm.draw(snapshots, VIDEO_PX),
            lambda: self._pipeline.write_pages(self._folder, self._config),
        )
        self._trackers.close()

    def _try_to_save(self, is_best: bool) -> None:
        """Saves a checkpoint. Should the disk refuse one, training goes on and the next is tried."""
        try:
            self.save(is_best)
        except (MachineError, OSError) as error:
            self._console.line(f"checkpoint at step {self._algorithm.env_steps:,} not saved: {error}")

    def _evaluate(self) -> bool:
        """Evaluates the present policy, and returns whether no evaluation was better before."""
        self._console.phase("evaluating", is_line=False)
        self._last_evaluation = self._algorithm.evaluate_policy(self._config.eval.episodes)
        state = self.state
        row = evaluation_row(self._last_evaluation, state.env_steps, state.wall_s)
        rows = self._folder.evaluations.read()
        self._folder.evaluations.append([row])
        return evaluation_rank(row) > max(map(evaluation_rank, rows), default=(-1.0, 0.0))

    def _log(self, is_due: bool) -> None:
        """Shows where the run is; where `is_due`, on a line of its own and in the log."""
        state = self.state
        self._recent.append((state.wall_s, state.env_steps))
        row = self._algorithm.report() | {
            metrics.ENV_STEPS: state.env_steps,
            metrics.WALL_S: state.wall_s,
            metrics.STEPS_PER_S: self.steps_per_s,
            metrics.PEAK_RSS_MB: state.peak_rss_mb,
        }
        evaluations = self._folder.evaluations.read()
        if evaluations and int(evaluations[-1]["step"]) == state.env_steps:
            row |= _evaluation_metrics(evaluations[-1]) | dict(self._last_evaluation.metrics)
        if is_due:
            self._trackers.log(row)
        self._console.update(row, is_due)

    def _crosses(self, period: int, before: int) -> bool:
        return self._algorithm.env_steps // period > before // period

    def _write_checkpoint(self, folder: Path) -> None:
        self._algorithm.save_checkpoint(str(folder))
        self._recorder.keep(self._algorithm.drain_records())  # of what was waited for to be saved


def _evaluation_metrics(row: dict[str, str]) -> dict[str, float]:
    names = {
        "success_rate": metrics.EVAL_SUCCESS_RATE,
        "success_at_end": metrics.EVAL_SUCCESS_AT_END,
        "episode_return": metrics.EVAL_EPISODE_RETURN,
        "learned_return": metrics.EVAL_LEARNED_RETURN,
        "final_progress": metrics.EVAL_PROGRESS,
    }
    return {metric: float(row[name]) for name, metric in names.items() if row[name]}
