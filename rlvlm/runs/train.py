"""The training of a run, from its first step or a checkpoint to its last step or a stop signal."""

import math
import shutil
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    WorkerCrashedError,
)

from rlvlm.algorithms.base import BaseAlgorithm
from rlvlm.algorithms.checkpoint import CorruptCheckpoint, Saving, check_folder
from rlvlm.algorithms.evaluation import Evaluation
from rlvlm.core import metrics
from rlvlm.core.console.panel import RunConsole
from rlvlm.core.console.quiet import quiet_output
from rlvlm.core.console.signals import StoppedEarly, StopRequest
from rlvlm.core.disk import write_whole
from rlvlm.core.errors import (
    EXIT_DONE,
    EXIT_PREEMPTED,
    FULL,
    JudgeUnavailable,
    MachineError,
    NumericsError,
    RunError,
    first_line,
)
from rlvlm.core.memory import MemoryWatch
from rlvlm.judge_bench.preflight import JudgeRefused
from rlvlm.judges.build import check_goal_image, open_person
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.goal_image import with_goal_image
from rlvlm.judges.judge import Judge
from rlvlm.labels.store import LabelStore
from rlvlm.runs.files.checkpoints import Checkpoint, RunState, newest_sound, resolved
from rlvlm.runs.files.folder import RunFolder, label_store, read_state
from rlvlm.runs.files.played import write_played
from rlvlm.runs.files.records import Recorder
from rlvlm.runs.files.scores import DECODINGS, evaluation_rank, evaluation_row
from rlvlm.runs.files.summary import run_readme, summarise
from rlvlm.runs.files.trackers import Trackers
from rlvlm.runs.settings.config import JUDGE_ROLE, RunConfig
from rlvlm.runs.settings.tree import differences, flat
from rlvlm.runs.start.build import film_draw, goal_image, imported_meanwhile, open_algorithm
from rlvlm.runs.start.networks import sent_bytes
from rlvlm.runs.start.placement import HeldPlaces, placed
from rlvlm.runs.start.preflight import bench_command, check_judge_knows
from rlvlm.runs.start.ray_session import ray_session
from rlvlm.vlms.engines.remote import describe_server

SPEED_ROUNDS = 12
"""Number of rounds of training over which the displayed speed is averaged."""
EVAL_METRICS = {
    "success_rate": metrics.EVAL_SUCCESS_RATE,
    "success_at_end": metrics.EVAL_SUCCESS_AT_END,
    "episode_return": metrics.EVAL_EPISODE_RETURN,
    "learned_return": metrics.EVAL_LEARNED_RETURN,
    "final_progress": metrics.EVAL_PROGRESS,
}
"""Columns of `eval.csv` that are also metrics."""
NUM_VIDEOS = 2
"""Number of episodes of the last evaluation that are filmed."""


Listener = Callable[[RunFolder], None]
"""Called with the folder of a run that has ended or stopped, its tables complete: draws its pages, for example."""


_SAVES = "finishing what is under way, then saving"
_STARTS = "stopping the start of the run, of which supervised updates are kept and all else is made anew"
"""What a run does at a signal, while it trains and while it starts."""


class Training:
    """The run loop: train, evaluate, log, save.

    On resume, `algorithm` is already restored, and `before` is the run loop's own state at the same moment.
    """

    def __init__(
        self,
        *,
        folder: RunFolder,
        config: RunConfig,
        algorithm: BaseAlgorithm,
        console: RunConsole,
        memory: MemoryWatch,
        before: RunState,
        listener: Listener,
    ) -> None:
        self._folder = folder
        self._config = config
        self._algorithm = algorithm
        self._console = console
        self._memory = memory
        self._before = before
        self._listener = listener
        # a run's folder may be moved, so is not a setting
        self._settings = {name: value for name, value in flat(config).items() if name != "out"}
        self._changes = list(before.changes)
        self._started = time.monotonic()
        self._trackers = Trackers(folder, config)
        for note in (self._trackers.trouble, *config.kind.notes(config), algorithm.image_note):
            if note:
                console.line(note)
        for name, change in differences(before.settings, self._settings).items():
            self._changes.append(f"from step {before.env_steps:,} on {name} is {change}")
            console.line(self._changes[-1])
        # opened late: a run whose teacher is no judge has no store
        labels = partial(label_store, folder, config)
        self._recorder = Recorder(
            folder, labels, algorithm.draw_for_judge, config.judge_goal, algorithm.paint_for_judge
        )
        # time and step of the last rounds, for a recent speed, because rounds get slower or faster
        self._recent = deque([(before.wall_s, before.env_steps)], maxlen=SPEED_ROUNDS)
        self._last_evaluation = Evaluation(episodes=[])

    @property
    def state(self) -> RunState:
        """Returns the present state of the run loop."""
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
        """Returns env steps per second over the last rounds."""
        (first_s, first_step), (last_s, last_step) = self._recent[0], self._recent[-1]
        return (last_step - first_step) / max(last_s - first_s, 1e-3)

    def begin(self, stop: StopRequest | None = None) -> None:
        """Runs the start of training. If it already trained the policy, evaluates and saves it as step 0: the curve
        then shows the effect of training, and a start that was never improved on stays the best checkpoint.

        Raises:
            StoppedEarly: `stop` was requested meanwhile; it is checked at each log line.
        """

        def log(line: str) -> None:
            self._console.phase(line)
            if stop:
                raise StoppedEarly

        unfinished = self._folder.unfinished_start
        try:
            if unfinished.exists():
                check_folder(unfinished)
        except CorruptCheckpoint as error:
            self._console.line(f"the supervised start is made anew: {error}")
            shutil.rmtree(unfinished)
        try:
            is_started = self._algorithm.prepare(log, unfinished)
        except JudgeRefused as error:
            error.fix = f"look closer: {bench_command(self._config)}\n{error.fix}"
            raise
        if stop is not None:
            stop.promise = _SAVES
        if is_started:
            is_best = self._evaluate()
            self._log(is_due=True)
            self._save_meanwhile(is_best)
            self._folder.checkpoints.settle(self._console.line, waits=True)
            self._recent.clear()  # remaining time is estimated from training rounds alone
            self._recent.append((self.state.wall_s, self.state.env_steps))
        if any(self._folder.checkpoints.newest_first()):
            shutil.rmtree(unfinished, ignore_errors=True)

    def advance(self) -> None:
        """Runs one round: train, evaluate, log; saves if a checkpoint is due, as at the last step."""
        before = self._algorithm.env_steps
        self._algorithm.train()
        self._folder.checkpoints.settle(self._console.line)
        config = self._config
        # finish learning from running rollouts first: evaluation and checkpoint must be of the same moment
        if any(self._crosses(p, before) for p in (config.eval.every_steps, config.track.checkpoint_every_steps)):
            self._algorithm.flush_pending()
        if self.is_over:
            self._algorithm.finish()
        self._recorder.keep(self._algorithm.drain_records())
        is_due = self.is_over or self._crosses(config.eval.every_steps, before)
        # evaluated before logging, so that this step's row has the figures
        is_best = is_due and self._evaluate()
        self._log(is_due or self._crosses(config.track.log_every_steps, before))
        if self.is_over:
            self.save(is_best)
        elif is_best or self._crosses(config.track.checkpoint_every_steps, before):
            self._save_meanwhile(is_best)

    def save(self, is_best: bool = False) -> None:
        """Saves a checkpoint of the present state, unless there is one already, and returns once it is complete.

        Raises:
            MachineError, OSError: writing failed.
        """
        self._folder.checkpoints.settle(self._console.line, waits=True)
        self._folder.checkpoints.save(self.state, self._begin_checkpoint, is_best)

    def _save_meanwhile(self, is_best: bool) -> None:
        """Begins a checkpoint of the present state, which is written while training goes on."""
        checkpoints = self._folder.checkpoints
        checkpoints.save_meanwhile(self.state, self._begin_checkpoint, is_best, self._console.line)

    def _begin_checkpoint(self, folder: Path) -> Saving:
        saving = self._algorithm.begin_checkpoint(folder, resolved(folder.parent.with_name("last")) / folder.name)
        self._recorder.keep(self._algorithm.drain_records())  # those that came in while saving waited for them
        return saving

    def finish(self, exit_reason: str, *, has_pages: bool = True) -> None:
        """Completes a checkpoint that is being written, writes summary and videos, lets the listener draw the folder,
        and closes the trackers.

        Args:
            exit_reason: `done`, or why it stopped earlier; only a finished run is filmed.
            has_pages: False only writes the summary, e.g. while a caller waits and the run will continue.
        """
        try:
            self._folder.checkpoints.settle(self._console.line, waits=True)
        except RunError as error:  # the run may be ending by this very error
            self._console.line(f"the checkpoint being written is not saved: {error}")
        if not has_pages:
            self._folder.write_summary(summarise(self._folder, self._config, self.state, exit_reason))
            self._trackers.close()
            return
        self._console.phase("writing plots, videos and pages")
        from rlvlm.runs.files.video import write_videos  # slow to import

        # a run that was stopped will go on, and is filmed at its end
        films = list(self._last_evaluation.episodes[:NUM_VIDEOS]) if exit_reason == "done" else []
        try:
            films = self._algorithm.rewarded(films)
        except JudgeUnavailable as error:
            self._console.line(f"the videos show the true reward: {error}")
        folder, config, state = self._folder, self._config, self.state
        summary = summarise(folder, config, state, exit_reason)
        folder.write_summary(summary)
        if films:
            with film_draw(config, self._algorithm.draw) as draw:
                write_videos(folder.videos, films, state.env_steps, draw, self._last_evaluation.has_success)
        write_played(folder, config, self._algorithm)
        self._listener(folder)
        files = sorted(str(file.relative_to(folder.path)) for file in folder.path.rglob("*") if file.is_file())
        card = run_readme(config, summary, folder.environment(), folder.command(), files)
        write_whole(folder.readme, card)  # last, because it links to the others
        self._trackers.close()

    def _evaluate(self) -> bool:
        """Evaluates the present policy, and returns whether no earlier evaluation was better."""
        self._console.phase("evaluating", is_line=False)
        self._last_evaluation = self._algorithm.evaluate_policy(self._config.eval.episodes)
        state = self.state
        row = evaluation_row(self._last_evaluation, state.env_steps, state.wall_s)
        rows = self._folder.evaluations.read()
        self._folder.evaluations.append([row])
        return evaluation_rank(row) > max(map(evaluation_rank, rows), default=(-1.0, 0.0, 0.0))

    def _log(self, is_due: bool) -> None:
        """Shows the present state; if `is_due`, also as a log line and in the metrics."""
        state = self.state
        self._recent.append((state.wall_s, state.env_steps))
        row = self._algorithm.report() | {
            metrics.ENV_STEPS: state.env_steps,
            metrics.WALL_S: state.wall_s,
            metrics.STEPS_PER_S: self.steps_per_s,
            metrics.PEAK_RSS_MB: state.peak_rss_mb,
        }
        evaluations = self._folder.evaluations.read()
        if evaluations and int((newest := evaluations[-1])["step"]) == state.env_steps:
            row |= {metric: float(newest[name]) for name, metric in EVAL_METRICS.items() if newest[name]}
            row |= self._last_evaluation.metrics
        if is_due:
            self._trackers.log(row)
        self._console.update(row, is_due)

    def _crosses(self, period: int, before: int) -> bool:
        return self._algorithm.env_steps // period > before // period


@contextmanager
def judge_session(
    config: RunConfig, open_store: Callable[[], LabelStore], ledger: Path, places: HeldPlaces
) -> Iterator[Callable[[], Judge] | None]:
    """Yields a function that makes the judge's client, while its Serve app runs; None for runs that ask no judge.

    The client has a memory: after a crash, questions asked since the last checkpoint are answered from the store, for
    free and with the same answers; so are questions that other runs asked the same judge, if they share a store.

    Args:
        config: config of the run.
        open_store: opens the store of answers in the asking process; must pickle.
        ledger: file in which a paid judge counts its spending, unless `judge.api.ledger` names another: the run's
            budget holds across replicas and `rlvlm resume`.
        places: where the judge's replicas go.

    Raises:
        JudgeUnavailable: the judge cannot be loaded, or the app named in `serve.app` is not running.
        UsageError: that app's judge does not know the task, or gets no goal image, or the image is invalid.
    """
    if not config.reward.asks_judge:
        yield None
        return
    if config.judge.is_human and not config.serve.app:
        # no replica, which would be considered dead while people think; questions and answers are on disk
        shown = goal_image(config)
        yield lambda: with_goal_image(open_person(config.judge, open_store().folder), shown)
        return
    from rlvlm.serving.apps import start_judge  # Serve is slow to import, and many runs ask no judge
    from rlvlm.serving.monitoring import show_cache

    judge = replace(config.judge, api=config.judge.api.with_paths(ledger))
    places.release([JUDGE_ROLE])
    with start_judge(judge, config.serve, name=config.task, placing=places.placing(JUDGE_ROLE)) as running:
        if config.serve.app:
            # a running app reports itself which judge it is
            backend, _, model = running.stamp.judge.partition(":")
            if config.goal_file:
                check_goal_image(backend, "" if model == backend else model, "")
            if backend == "pocket":
                asked = replace(config.judge, backend=backend, model="" if model == backend else model)
                check_judge_knows(replace(config, judge=asked))
        image = goal_image(config)
        yield lambda: with_goal_image(CachedJudge(running, open_store(), show_cache(config.task)), image)


@contextmanager
def open_training(
    folder: RunFolder,
    config: RunConfig,
    checkpoint: Checkpoint | None,
    console: RunConsole,
    stop: StopRequest | None = None,
    listener: Listener = lambda _: None,
) -> Iterator[Training]:
    """Yields the run loop of `folder` with everything it needs, restored from `checkpoint` (None: at the start).

    Raises:
        StoppedEarly: `stop` was requested before the start was done.
        RunError: a part does not start, or the checkpoint belongs to a run with other settings.
    """
    config = replace(config, out=folder.path)  # for a default name too
    before = RunState(env_steps=0, wall_s=0.0, peak_rss_mb=0.0)
    if checkpoint is not None:  # now: the rest takes a minute, and an older checkpoint may have other settings
        before = read_state(checkpoint, config)
    # before anything is sent to it
    if (
        config.reward.asks_judge
        and not config.serve.app
        and (server := describe_server(config.judge.backend, config.judge.api))
    ):
        console.line(f"the judge asks {server}")
    console.phase("starting Ray and the judge" if config.reward.asks_judge else "starting Ray")
    with ExitStack() as stack:
        memory = stack.enter_context(MemoryWatch(before.peak_rss_mb))
        port = config.track.dashboard_port if config.track.dashboard else None

        def tell_lost(what: str) -> None:
            console.line(f"{what}; go on with: {folder.resume_command}")

        def log(what: str) -> None:
            console.phase(what)
            if stop:
                raise StoppedEarly

        workers = math.ceil(sum(role.count * max(1.0, role.cpus) for role in config.roles))
        with imported_meanwhile(config):
            dashboard = stack.enter_context(
                ray_session(
                    port, num_workers=workers, log=console.phase, on_lost=tell_lost, weights_bytes=sent_bytes(config)
                )
            )
        if dashboard:
            console.line(dashboard)
        places = stack.enter_context(placed(config, log))
        open_store = partial(label_store, folder, config)
        make_judge = stack.enter_context(judge_session(config, open_store, folder.ledger, places))
        algorithm = stack.enter_context(open_algorithm(config, make_judge, places))
        # after a kill the logs extend beyond the checkpoint; the rest is written again
        folder.cut(-1 if checkpoint is None else before.env_steps)
        if checkpoint is not None:
            algorithm.load_checkpoint(str(checkpoint.algorithm))
        training = Training(
            folder=folder,
            config=config,
            algorithm=algorithm,
            console=console,
            memory=memory,
            before=before,
            listener=listener,
        )
        if stop is not None:
            stop.take_over()  # starting Ray has installed its own handlers
        if checkpoint is None:
            training.begin(stop)
        start = f" from step {before.env_steps:,}" if before.env_steps else ""
        console.phase(f"training in {folder.path}{start}")
        yield training


def choose_sound(checkpoints: Iterable[Checkpoint], console: RunConsole) -> Checkpoint | None:
    """Returns the first of `checkpoints` that is intact; reports corrupt ones, and the work lost by that.

    Raises:
        CorruptCheckpoint: there are checkpoints, but all are corrupt.
    """
    candidates, damages = list(checkpoints), []
    chosen = newest_sound(candidates, damages.append)
    for damage in damages:
        console.line(f"damaged checkpoint: {damage}")
    if chosen is not None and chosen.step < candidates[0].step:
        lost = candidates[0].step - chosen.step
        console.line(f"resuming from step {chosen.step:,}: the {lost:,} steps after it are lost and trained again")
    return chosen


@contextmanager
def convert_errors(folder: RunFolder) -> Iterator[None]:
    """Converts any error of a run to a RunError: a message for the user, the traceback in a file.

    Raises:
        RunError: with the cause; tracebacks of unexpected errors are in the run's folder, and so is the evidence of a
            number that was not finite.
    """
    try:
        yield
    except NumericsError as error:
        folder.keep_evidence(error)
        error.fix += f"\nthe values are in {folder.numerics}; the checkpoints are older"
        raise
    except RunError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            fix = f"free some space, then go on: {folder.resume_command}"
            raise MachineError(f"the disk of {folder.path} is full", fix) from error
        if isinstance(error, (ObjectStoreFullError, OutOfDiskError)):
            what = f"Ray's object store and the disk that it spills to are full: {first_line(error)}"
            fix = "free the disk of Ray's folder or of /dev/shm, or start nodes with a larger --object-store-memory"
            raise MachineError(what, f"{fix}; then: {folder.resume_command}") from error
        folder.crash.write_text("".join(traceback.format_exception(error)))
        fix = f"the traceback is in {folder.crash}"
        if isinstance(error, (RayActorError, NodeDiedError, ObjectLostError, WorkerCrashedError)):
            # where nothing waits for a return, as while the run starts
            what = f"a process of the run, or its node, is gone: {type(error).__name__}"
            fix = f"look for what ends it (memory?), then: {folder.resume_command}\n{fix}"
            raise MachineError(what, fix) from error
        raise RunError(f"unexpected {type(error).__name__}: {error}", fix) from error


def start_run(folder: RunFolder, config: RunConfig, listener: Listener = lambda _: None) -> int:
    """Runs `config` in its new folder and returns the exit code; the listener gets the folder at the end.

    Raises:
        RunError: it cannot start or continue; a folder in which nothing happened yet is removed again.
    """
    with folder.locked():  # until the folder is gone: a folder held by another process is never removed
        try:
            return _run_held(folder, config, listener)  # from no checkpoint
        except RunError:
            if not folder.has_begun():
                folder.remove()
            raise


def resume_run(folder: RunFolder, config: RunConfig, listener: Listener = lambda _: None) -> int:
    """Resumes a run exactly at its newest intact checkpoint, or from the start if there is none yet, until its end or a
    signal, with the folder locked; returns the exit code.

    Raises:
        RunError: it cannot continue.
    """
    with folder.locked():
        return _run_held(folder, config, listener)


def _run_held(folder: RunFolder, config: RunConfig, listener: Listener) -> int:
    """Does the work of `resume_run` in a folder that this process holds."""
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        terminal = stack.enter_context(quiet_output(folder.log))
        console = stack.enter_context(RunConsole(terminal, config.title, config.steps, config.kind.panel))
        stop.log, stop.advice = console.line, folder.resume_command
        # inside the lock, so that its files in the folder belong to this run
        stack.enter_context(convert_errors(folder))
        checkpoint = choose_sound(folder.checkpoints.newest_first(), console)
        stop.promise = _STARTS if checkpoint is None else _SAVES
        try:
            with open_training(folder, config, checkpoint, console, stop, listener) as training:
                try:
                    while not (training.is_over or stop):
                        training.advance()
                    training.save()
                except RunError as error:
                    # no checkpoint of the present state: the next start must not begin with the fault
                    training.finish(type(error).__name__)
                    if newest := next(iter(folder.checkpoints.newest_first()), None):
                        console.line(f"saved up to step {newest.step:,}; resume with: {folder.resume_command}")
                    raise
                training.finish("done" if training.is_over else stop.signal_name)
                is_done = training.is_over
        except StoppedEarly:
            is_kept = folder.unfinished_start.exists()
            what = "saved the supervised start; go on" if is_kept else "nothing was there to save; start over"
            console.line(f"stopped early: {what} with: {folder.resume_command}")
            return EXIT_PREEMPTED
        print_summary(folder, console)
    return EXIT_DONE if is_done else EXIT_PREEMPTED


def print_summary(folder: RunFolder, console: RunConsole) -> None:
    """Prints a run's result in one line, and where to look or how to continue."""
    summary = folder.summary()
    rate = summary["success"]
    success = "not evaluated"
    if not summary["has_success"]:
        success = f"return {summary['final_episode_return']:.4g} (the env does not define success)"
    elif rate is not None:
        at_any = float(folder.evaluations.read()[-1]["success_rate"])  # of the same evaluation
        success = f"success {rate:.0%} (at the end of episodes, last evaluation; at any step {at_any:.0%})"
    # if sampled play was evaluated too, both matter: greedy play may get stuck where sampled play goes on
    if shares := (summary.get("decodings") or {}).get("at the end"):
        measured = {what: names for what, names in DECODINGS.items() if names[0] in shares}
        success = ", ".join(
            f"{what} {shares[greedy]:.0%} greedy and {shares[sampled]:.0%} sampled"
            for what, (greedy, sampled) in measured.items()
        )
    console.line(f"{summary['exit_reason']}: {summary['env_steps']:,} steps in {summary['wall_s']:.0f} s, {success}")
    config = folder.config()
    if config.kind.max_queries(config) and not summary["queries"] and summary["exit_reason"] == "done":
        rows = folder.metrics.read()
        counts = [int(row.get(metrics.QUERIES_LOOK_ALIKE, 0)) for row in rows]
        waiting = int(rows[-1].get(metrics.QUERIES_OPEN, 0)) if rows else 0
        why = f"{waiting:,} queries wait for a person, and none was answered" if waiting else "no query was asked"
        console.line(f"{why}, so no reward was learned")
        if counts and counts[-1]:
            console.line(f"{counts[-1]:,} pairs were drawn, and both sides of each looked alike: nothing had moved yet")
    if summary["exit_reason"] == "done":
        console.line(f"look at {folder.readme}")
    else:
        console.line(f"saved; resume with: {folder.resume_command}")
