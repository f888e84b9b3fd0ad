"""A sweep's folder, what is shown of its runs, and what becomes of them when a judge does not load."""

import io
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from rlvlm.core.console.signals import StopRequest
from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.runs.files.folder import create_folder
from rlvlm.sweeps import sweep as sitting
from rlvlm.sweeps.callback import SweepCallback
from rlvlm.sweeps.config import ResourceConfig, SourceConfig, SweepConfig
from rlvlm.sweeps.folder import FINISHED, State, SweepFolder, TrialRecord, find_sweep, held_sweep
from rlvlm.sweeps.plan import TrialPlan, expand, shared_judges
from rlvlm.sweeps.progress_table import ProgressTable

SWEEP = SweepConfig(
    title="a sweep",
    tasks=("drawer_open",),
    seeds=(0, 1),
    sources={"oracle": SourceConfig(title="", settings={"reward.teacher": "oracle"})},
)


def open_sweep(path: Path, sweep: SweepConfig) -> tuple[SweepFolder, list[str]]:
    with held_sweep(path, sweep) as opened:
        return opened


def begin(path: Path, plan: TrialPlan, *rows: tuple[int, float], reason: str = "") -> None:
    """Leaves a run with these evaluations, ended for a reason or killed."""
    run = create_folder(replace(plan.config, out=path / plan.key), ["rlvlm"], datetime(2026, 1, 1))
    run.metrics.append([{"env_steps": 1}])
    run.evaluations.append({"step": step, "success_rate": score, "episode_return": 0.0} for step, score in rows)
    if reason:
        run.write_summary({"exit_reason": reason})


def test_the_state_of_the_runs_is_read_from_their_folders(tmp_path):
    folder, changes = open_sweep(tmp_path / "s", replace(SWEEP, seeds=(0, 1, 2, 3)))
    done, flat, killed, _ = plans = expand(folder.config())
    assert changes == [] and find_sweep(tmp_path / "s") is not None and find_sweep(tmp_path) is None
    begin(folder.path, done, (2_500, 0.0), (5_000, 1.0), reason="done")
    begin(folder.path, flat, (2_500, 0.5), reason="flat")
    begin(folder.path, killed, (2_500, 0.25))
    found = list(folder.records(plans).values())
    assert [record.state for record in found] == [State.DONE, State.FLAT, State.SAVED, State.WAITING]
    assert [(record.env_steps, record.score) for record in found[:3]] == [(5_000, 1.0), (2_500, 0.5), (2_500, 0.25)]
    folder.write_records(
        [replace(found[2], state=State.HALTED), *found[:2], replace(found[3], state=State.FAILED, cause="no card")]
    )
    again = list(folder.records(plans).values())
    assert [record.state for record in again] == [State.DONE, State.FLAT, State.HALTED, State.FAILED]
    assert again[3].cause == "no card"


def test_a_sweep_may_grow_and_shrink_and_says_so(tmp_path):
    open_sweep(tmp_path / "s", SWEEP)
    _, changes = open_sweep(tmp_path / "s", replace(SWEEP, seeds=(1, 2), resources=ResourceConfig(cpus=0.5)))
    assert changes == [
        "added: drawer_open/oracle/seed_2",
        "no longer in the file, left alone: drawer_open/oracle/seed_0",
    ]
    assert find_sweep(tmp_path / "s").config().seeds == (1, 2)


def test_a_run_that_has_begun_may_not_change(tmp_path):
    folder, _ = open_sweep(tmp_path / "s", SWEEP)
    changed = replace(SWEEP, settings={"algo.batch_size": 64})
    open_sweep(tmp_path / "s", changed)  # nothing has begun
    open_sweep(tmp_path / "s", SWEEP)
    begin(folder.path, expand(SWEEP)[1])
    with pytest.raises(UsageError, match="seed_1 was started with algo.batch_size 256, and would now have 64"):
        open_sweep(tmp_path / "s", changed)
    assert folder.config() == SWEEP  # the refused file has left nothing behind


def test_a_folder_with_something_else_is_refused_and_a_sweep_is_held_once(tmp_path):
    (tmp_path / "letter.txt").touch()
    with pytest.raises(UsageError, match="holds no sweep"):
        open_sweep(tmp_path, SWEEP)
    with held_sweep(tmp_path / "s", SWEEP), pytest.raises(UsageError, match="another process"):
        open_sweep(tmp_path / "s", SWEEP)


@pytest.fixture
def plans():
    return {plan.key: plan for plan in expand(SWEEP)}


def record(plan: TrialPlan, state: State, **known: object) -> TrialRecord:
    return TrialRecord(task=plan.task, source=plan.source, seed=plan.seed, state=state, **known)


def test_without_a_terminal_there_is_a_line_per_event(plans):
    stream = io.StringIO()
    first, second = plans
    with ProgressTable(stream, SWEEP.title, plans) as table:
        table.records = {key: record(plan, State.WAITING) for key, plan in plans.items()}
        table.change(first, record(plans[first], State.RUNNING))
        running = record(plans[first], State.RUNNING, env_steps=5_000, score=0.25)
        for _ in range(2):  # only the first report brings a new evaluation
            table.update(first, running, steps_per_s=100.0, evaluated_at=5_000)
        table.change(second, record(plans[second], State.FAILED, cause="no judge"))
        table.change(first, record(plans[first], State.DONE, env_steps=20_000, score=1.0))
    assert stream.getvalue().splitlines() == [
        "a sweep",
        "drawer_open  oracle  seed 0  running  (0 of 2 finished)",
        "drawer_open  oracle  seed 0  step 5,000/20,000  score 0.25  100 steps/s  left 0:02:30",
        "drawer_open  oracle  seed 1  failed: no judge  (0 of 2 finished, 1 failed)",
        "drawer_open  oracle  seed 0  done  (1 of 2 finished, 1 failed)",
    ]


def test_the_table_shows_every_run_and_the_remaining_time(plans):
    table = ProgressTable(io.StringIO(), SWEEP.title, plans)
    table.phase("running")
    first, second = plans
    table.records = {key: record(plan, State.WAITING) for key, plan in plans.items()}
    table.update(first, record(plans[first], State.RUNNING, env_steps=10_000, score=0.5), 100.0, 10_000)
    screen = Console(file=io.StringIO(), width=120)
    screen.print(table.render())
    text = screen.file.getvalue()
    assert "10,000/20,000" in text and "0.50" in text and "waiting" in text
    assert "0 of 2 finished" in text and "left about 0:05:00" in text  # 30,000 steps at 100 steps/s


def test_a_judge_that_does_not_load_fails_its_own_runs(tmp_path, monkeypatch):
    judged = {"pocket": {"reward.teacher": "judge"}, "large": {"reward.teacher": "judge", "judge.both_orders": True}}
    asking = {name: SourceConfig(title="", settings=settings) for name, settings in judged.items()}
    sweep, started = replace(SWEEP, sources=asking | SWEEP.sources), list[str]()

    class Running:
        def __enter__(self) -> None:
            started.append("up")

        def __exit__(self, *_: object) -> None:
            started.append("down")

    def start_judge(judge: object, placement: object, *, name: str, app: str) -> Running:
        assert placement.num_cpus == 0.0 and judge.api.ledger == str(folder.ledger(app))
        if judge.both_orders:
            raise JudgeUnavailable("no such card", "buy one")
        return Running()

    monkeypatch.setattr(sitting, "start_judge", start_judge)
    with held_sweep(tmp_path / "sweep", sweep) as (folder, _):
        pass
    plans, stream = {plan.key: plan for plan in expand(sweep)}, io.StringIO()
    table = ProgressTable(stream, sweep.title, plans)
    callback = SweepCallback(folder=folder, sweep=sweep, plans=plans, table=table, stop=StopRequest())
    asked = shared_judges(list(plans.values()), 0.0, folder.path)
    with sitting._judges(asked, folder, list(plans.values()), callback, table) as running:
        assert started == ["up"] and [config.judge.both_orders for config in running] == [False]
    assert started == ["up", "down"]
    found = {key: (record.state, record.cause) for key, record in callback.records.items()}
    for seed in (0, 1):
        assert found[f"drawer_open/large/seed_{seed}"] == (State.FAILED, "no such card (buy one)")
        assert found[f"drawer_open/pocket/seed_{seed}"] == (State.WAITING, "")
        assert found[f"drawer_open/oracle/seed_{seed}"] == (State.WAITING, "")
    later = folder.records(list(plans.values()))  # the next sitting reads it again, and tries again
    assert later["drawer_open/large/seed_0"].state is State.FAILED and State.FAILED not in FINISHED
    callback.retry(list(plans))
    assert {record.state for record in callback.records.values()} == {State.WAITING}
    # a signal now: the sweep says what it waits for
    callback.records |= {key: replace(record, state=State.RUNNING) for key, record in callback.records.items()}
    stream.truncate(0)
    callback.tell_stop("SIGINT: finishing what is under way")
    first, *_ = plans
    lines, waits = stream.getvalue().strip("\0").splitlines()
    assert lines.startswith("SIGINT") and waits.startswith(f"waiting for 6 runs to end their round and save: {first}, ")
    assert waits.endswith(" and 2 more")
