"""`rlvlm sweep`: runs unfinished runs, several at a time, until all are finished, or until a signal."""

import logging
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from ray import tune

from rlvlm.core.console.quiet import quiet_output
from rlvlm.core.console.signals import StopRequest
from rlvlm.core.errors import EXIT_DONE, EXIT_PREEMPTED, JudgeUnavailable
from rlvlm.runs.files.folder import trust_option
from rlvlm.runs.settings.config import Role, RunConfig
from rlvlm.runs.start.placement import nodes
from rlvlm.runs.start.ray_session import ray_session
from rlvlm.serving.apps import start_judge, start_serve
from rlvlm.sweeps.callback import SweepCallback, SweepScheduler
from rlvlm.sweeps.config import SweepConfig
from rlvlm.sweeps.folder import FILE, FINISHED, State, SweepFolder, held_sweep
from rlvlm.sweeps.plan import TrialPlan, app_name, expand, notes_of_plans, run_configs, shared_judges
from rlvlm.sweeps.progress_table import ProgressTable
from rlvlm.sweeps.room import num_at_once, num_slots, roles_of_a_run, roles_of_judges
from rlvlm.sweeps.trial import SweepTrial
from rlvlm.vlms.engines.remote import describe_server

EXIT_SOME_FAILED = 1
_TUNE = "tune"


def run_sweep(path: Path, sweep: SweepConfig, dashboard_port: int | None = None) -> int:
    """Starts the sweep in `path`, or resumes it, and returns the exit code; for `dashboard_port` see `ray_session`.

    Returns:
        0 when every run is finished, 1 when some failed, 75 when a signal stopped it after saving.

    Raises:
        RunError: the sweep cannot start.
    """
    plans = {plan.key: plan for plan in expand(sweep)}
    with ExitStack() as stack:
        folder, notes = stack.enter_context(held_sweep(path, sweep))
        stop = stack.enter_context(StopRequest())
        terminal = stack.enter_context(quiet_output(folder.log))
        table = stack.enter_context(ProgressTable(terminal, sweep.title, plans))
        for note in notes:
            table.line(note)
        callback = SweepCallback(folder=folder, sweep=sweep, plans=plans, table=table, stop=stop)
        place = shlex.quote(str(folder.path)) + trust_option(folder.path / FILE, *run_configs([*plans.values()]))
        stop.log, stop.advice = callback.tell_stop, f"rlvlm resume {place}"
        waiting = [key for key, record in callback.records.items() if record.state not in FINISHED]
        if waiting:
            callback.retry(waiting)
            for note in notes_of_plans([plans[key] for key in waiting]):
                table.line(note)
            table.phase(f"starting Ray; {len(waiting)} of {len(plans)} runs to go")
            run = roles_of_a_run(sweep.resources, [plans[key].config for key in waiting])
            asked = shared_judges([plans[key] for key in waiting], sweep.resources.judge_cpus, folder.path)
            dashboard = stack.enter_context(
                ray_session(
                    dashboard_port,
                    num_workers=num_slots(roles_of_judges([*asked.values()]), run) - 2,
                    log=table.phase, on_lost=lambda what: table.line(f"{what}; go on with: {stop.advice}"),
                )
            )  # fmt: skip
            if dashboard:
                table.line(dashboard)
            stop.take_over()
            judges = stack.enter_context(_judges(asked, folder, [plans[key] for key in waiting], callback, table))
            table.phase("running")
            # runs whose judge did not load have failed already
            able = [key for key in waiting if callback.records[key].state is not State.FAILED]
            if able and not stop:
                at_once = num_at_once(roles_of_judges(judges), run, len(able), nodes())
                if any(role.is_served for role in run):
                    start_serve()  # here: a run would start it in its own reservation, where it has no place
                else:
                    at_once = len(able)  # Tune's reservations hold all that they need, on a cluster that grows too
                _tune(folder, sweep, able, callback, run, at_once)
            table.phase("ending the judges and Ray")
        return _print_summary(table, callback, folder, place, stop)


def _tune(
    folder: SweepFolder,
    sweep: SweepConfig,
    waiting: Sequence[str],
    callback: SweepCallback,
    run: Sequence[Role],
    at_once: int,
) -> None:
    """Runs a new Tuner over the unfinished runs, until they are finished or a signal comes; `Tuner.restore` takes no
    further runs, and has forgotten the rungs of ASHA. Progress is read from the run folders, however the last one
    ended.

    Args:
        folder: folder of the sweep.
        sweep: its settings.
        waiting: names of the unfinished runs.
        callback: keeps their records.
        run: processes of one run.
        at_once: maximum number of runs side by side.
    """
    # runs write their own tables, and work in the sweep's start directory, so that relative paths mean the same
    os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_CHDIR_TO_TRIAL_DIR": "0"}
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # Ctrl-C is ours: every run is saved first
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    # Tune would only append to its notes of the last start
    shutil.rmtree(folder.path / _TUNE, ignore_errors=True)
    resources = sweep.resources
    # learners and env runners are placed in the trial's reservation, and wait for ever if they do not fit
    places = tune.PlacementGroupFactory([{"CPU": role.cpus, "GPU": role.gpus} for role in run if not role.is_served])
    tune.Tuner(
        tune.with_resources(SweepTrial, places),
        # names alone: a trial's run is read from the sweep's own file, in the process that runs it
        param_space={"sweep": str(folder.path), "trial": tune.grid_search(list(waiting))},
        tune_config=tune.TuneConfig(
            scheduler=SweepScheduler(callback),
            max_concurrent_trials=min(at_once, resources.max_trials or at_once),
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name=_TUNE,
            storage_path=str(folder.path),
            callbacks=[callback],
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=resources.retries),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    ).fit()


@contextmanager
def _judges(
    asked: Mapping[str, RunConfig],
    folder: SweepFolder,
    plans: Sequence[TrialPlan],
    callback: SweepCallback,
    table: ProgressTable,
) -> Iterator[list[RunConfig]]:
    """Starts the Serve apps that the runs share, for the context, and yields the configs of those that run; each counts
    its spending in the sweep's folder. If a judge cannot be loaded or placed, its runs have failed; the others go on.

    Args:
        asked: see `shared_judges`.
        folder: folder of the sweep.
        plans: the runs.
        callback: notes which runs have failed.
        table: shows what is loading.
    """
    running = []
    with ExitStack() as stack:
        for app, config in asked.items():
            if server := describe_server(config.judge.backend, config.judge.api):
                table.line(f"the judge asks {server}")
            table.phase(f"loading the judge {config.judge.backend} {config.judge.model}".rstrip())
            judge = replace(config.judge, api=config.judge.api.with_paths(folder.ledger(app)))
            try:
                stack.enter_context(start_judge(judge, config.serve, name=app, app=app))
                running.append(config)
            except JudgeUnavailable as error:
                asking = [plan for plan in plans if plan.config.reward.asks_judge]
                users = [plan.key for plan in asking if app_name(plan.config, folder.path) == app]
                callback.fail(users, f"{error} ({error.fix})")
        yield running


def _print_summary(
    table: ProgressTable, callback: SweepCallback, folder: SweepFolder, place: str, stop: StopRequest
) -> int:
    """Prints how the sweep ended and how to resume it in `place`, and returns the exit code."""
    records = list(callback.records.values())
    folder.write_records(records)
    failed = [record for record in records if record.state is State.FAILED]
    if all(record.state in FINISHED for record in records):
        table.line(f"all {len(records)} runs are finished; compare them with: rlvlm report {place}")
        return EXIT_DONE
    if stop:
        table.line(f"{stop.signal_name}: saved; resume with: rlvlm resume {place}")
        return EXIT_PREEMPTED
    for record in failed:
        table.line(f"failed: {record.task}  {record.source}  seed {record.seed}: {record.cause}")
    table.line(f"try those that failed again with: rlvlm resume {place}")
    return EXIT_SOME_FAILED
