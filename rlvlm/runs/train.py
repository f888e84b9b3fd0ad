"""A run from its first step to its last, or to the signal that stops it; and on from where it stopped."""

import errno
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial

from rlvlm.core import metrics
from rlvlm.core.console.panel import RunConsole
from rlvlm.core.console.quiet import quiet_output
from rlvlm.core.console.signals import StopRequest
from rlvlm.core.errors import EXIT_DONE, EXIT_PREEMPTED, MachineError, NumericsError, RunError, UsageError
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.checkpoints import Checkpoint, RunState, newest_sound
from rlvlm.runs.folder.label_store import label_store
from rlvlm.runs.folder.rows import DECODINGS
from rlvlm.runs.folder.run_folder import RunFolder
from rlvlm.runs.folder.settings import differences, flat
from rlvlm.runs.loop import StoppedEarly, Training
from rlvlm.runs.pipelines import pipeline_of
from rlvlm.runs.processes.memory import MemoryWatch
from rlvlm.runs.processes.private_ray import ray_session
from rlvlm.runs.session import judge_session


def start_run(folder: RunFolder, config: RunConfig) -> int:
    """Runs `config` in its new folder and returns the exit code.

    Raises:
        RunError: it cannot start or go on; a folder in which nothing happened yet is taken away again.
    """
    try:
        return _run_training(folder, config, ())
    except RunError:
        if not folder.has_begun():
            folder.remove()
        raise


def resume_run(folder: RunFolder, config: RunConfig) -> int:
    """Goes on with a run exactly where its newest sound checkpoint is, or from its start where there is none yet.

    Raises:
        RunError: it cannot go on.
    """
    return _run_training(folder, config, folder.checkpoints.newest_first())


@contextmanager
def open_training(
    folder: RunFolder,
    config: RunConfig,
    checkpoint: Checkpoint | None,
    console: RunConsole,
    stop: StopRequest | None = None,
) -> Iterator[Training]:
    """The run loop of `folder` with all it stands on, where `checkpoint` left it (None: at the start).

    Raises:
        StoppedEarly: `stop` was asked for before the start was done.
        RunError: something that it needs does not start, or the checkpoint is of a run with other settings.
    """
    before = RunState(env_steps=0, wall_s=0.0, peak_rss_mb=0.0) if checkpoint is None else checkpoint.state
    check_settings(before, config)
    console.phase("starting Ray and the judge" if config.asks_judge else "starting Ray")
    with ExitStack() as stack:
        memory = stack.enter_context(MemoryWatch(before.peak_rss_mb))
        port = config.track.dashboard_port if config.track.dashboard else None
        stack.enter_context(ray_session(port, num_workers=config.num_workers))
        make_judge = stack.enter_context(judge_session(config, partial(label_store, folder, config), folder.ledger))
        pipeline = pipeline_of(config)
        algorithm = stack.enter_context(pipeline.open_algorithm(config, make_judge))
        folder.cut(-1 if checkpoint is None else before.env_steps)
        if checkpoint is not None:
            algorithm.load_checkpoint(str(checkpoint.algorithm))
        training = Training(
            folder=folder,
            config=config,
            algorithm=algorithm,
            pipeline=pipeline,
            console=console,
            memory=memory,
            before=before,
        )
        if stop is not None:
            stop.take_over()  # starting Ray has put its own handlers in place
        if checkpoint is None:
            training.begin(stop)
        console.phase(f"training in {folder.path}")
        yield training


def choose_sound(checkpoints: Iterable[Checkpoint], console: RunConsole) -> Checkpoint | None:
    """The first of `checkpoints` that is as it was written; says which are not, and what is lost by that.

    Raises:
        CorruptCheckpoint: there are some, and none is sound.
    """
    candidates, damages = list(checkpoints), []
    chosen = newest_sound(candidates, damages.append)
    for damage in damages:
        console.line(f"damaged checkpoint: {damage}")
    if chosen is not None and chosen.step < candidates[0].step:
        lost = candidates[0].step - chosen.step
        console.line(f"going on from step {chosen.step:,}: the {lost:,} steps after it are lost and trained again")
    return chosen


def check_settings(before: RunState, config: RunConfig) -> None:
    """Raises UsageError where a setting that says what is learned is not what it was before."""
    changed = differences(before.settings, flat(config))
    odd = [name for name in changed if not any(fnmatchcase(name, pattern) for pattern in config.may_change)]
    if odd:
        told = "; ".join(f"{name} is {changed[name]}" for name in odd)
        raise UsageError(
            f"config.yaml says something else than the run had at step {before.env_steps:,}: {told}",
            "put that back, or start a new run with it",
        )


@contextmanager
def convert_errors(folder: RunFolder) -> Iterator[None]:
    """Turns whatever a run's outermost frame meets into a RunError: its words are for the user, the file for us.

    Raises:
        RunError: with the cause; the traceback of the unexpected lies in the run's folder, and so does what was there
            when a number was not finite.
    """
    try:
        yield
    except NumericsError as error:
        folder.keep_evidence(error)
        error.fix += f"\nwhat was met lies in {folder.numerics}; the checkpoints are from before it"
        raise
    except RunError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise _crash(folder, error) from error
        fix = f"free some space, then go on: {folder.resume_command}"
        raise MachineError(f"the disk of {folder.path} is full", fix) from error
    except Exception as error:
        raise _crash(folder, error) from error


def _run_training(folder: RunFolder, config: RunConfig, checkpoints: Iterable[Checkpoint]) -> int:
    """Trains from the first sound one of `checkpoints` (none: from the start) to the end or a signal, with the folder
    locked.
    """
    with ExitStack() as stack:
        stack.enter_context(folder.locked())
        stop = stack.enter_context(StopRequest())
        terminal = stack.enter_context(quiet_output(folder.log))
        console = stack.enter_context(RunConsole(terminal, config.title, config.steps, pipeline_of(config).rows))
        stop.log = console.line
        stack.enter_context(convert_errors(folder))
        try:
            with open_training(folder, config, choose_sound(checkpoints, console), console, stop) as training:
                try:
                    is_done = _train(training, stop)
                except RunError:
                    if newest := next(iter(folder.checkpoints.newest_first()), None):
                        console.line(f"saved up to step {newest.step:,}; go on with: {folder.resume_command}")
                    raise
        except StoppedEarly:
            console.line(f"stopped before there was anything to save; start over with: {folder.resume_command}")
            return EXIT_PREEMPTED
        _print_summary(folder, console)
    return EXIT_DONE if is_done else EXIT_PREEMPTED


def _train(training: Training, stop: StopRequest) -> bool:
    """Goes on until the last step, and returns True, or until `stop`; a checkpoint is saved in both cases."""
    try:
        while not (training.is_over or stop):
            training.advance()
        training.save()
    except RunError as error:
        training.finish(type(error).__name__)
        raise
    training.finish("done" if training.is_over else stop.signal_name)
    return training.is_over


def _print_summary(folder: RunFolder, console: RunConsole) -> None:
    summary = folder.summary()
    rate = summary["final_success_rate"]
    success = "not evaluated" if rate is None else f"success {rate:.0%} (mean of the last evaluations)"
    if shares := (summary.get("decodings") or {}).get("at the end"):
        told = {what: names for what, names in DECODINGS.items() if names[0] in shares}
        success = ", ".join(
            f"{what} {shares[greedy]:.0%} greedy and {shares[sampled]:.0%} sampled"
            for what, (greedy, sampled) in told.items()
        )
    console.line(f"{summary['exit_reason']}: {summary['env_steps']:,} steps in {summary['wall_s']:.0f} s, {success}")
    if folder.config().max_queries and not summary["queries"] and summary["exit_reason"] == "done":
        counts = [int(row.get(metrics.QUERIES_LOOK_ALIKE, 0)) for row in folder.metrics.read()]
        console.line("nobody was asked anything, so no reward was learned")
        if counts and counts[-1]:
            console.line(f"{counts[-1]:,} pairs were drawn, and both sides of each looked alike: nothing moved yet")
    if summary["exit_reason"] == "done":
        console.line(f"look at {folder.card}")
    else:
        console.line(f"saved; go on with: {folder.resume_command}")


def _crash(folder: RunFolder, error: Exception) -> RunError:
    """The unexpected, with its traceback put into the run's folder."""
    folder.crash.write_text("".join(traceback.format_exception(error)))
    return RunError(f"unexpected {type(error).__name__}: {error}", f"the traceback is in {folder.crash}")
