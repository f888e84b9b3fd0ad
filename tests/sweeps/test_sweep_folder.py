from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from rlvlm.core.errors import UsageError
from rlvlm.runs.folder import create_folder
from rlvlm.sweeps.config import ResourceConfig, SourceConfig, SweepConfig
from rlvlm.sweeps.folder import State, SweepFolder, find_sweep, held_sweep
from rlvlm.sweeps.plan import TrialPlan, expand

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


def test_what_has_become_of_the_runs_is_read_from_their_folders(tmp_path: Path) -> None:
    folder, told = open_sweep(tmp_path / "s", replace(SWEEP, seeds=(0, 1, 2, 3)))
    done, flat, killed, _ = plans = expand(folder.config())
    assert told == [] and find_sweep(tmp_path / "s") is not None and find_sweep(tmp_path) is None
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


def test_a_sweep_may_grow_and_shrink_and_says_so(tmp_path: Path) -> None:
    open_sweep(tmp_path / "s", SWEEP)
    _, told = open_sweep(tmp_path / "s", replace(SWEEP, seeds=(1, 2), resources=ResourceConfig(cpus=0.5)))
    assert told == ["added: drawer_open/oracle/seed_2", "no longer in the file, left alone: drawer_open/oracle/seed_0"]
    assert find_sweep(tmp_path / "s").config().seeds == (1, 2)


def test_a_run_that_has_begun_may_not_change(tmp_path: Path) -> None:
    folder, _ = open_sweep(tmp_path / "s", SWEEP)
    changed = replace(SWEEP, settings={"algo.batch_size": 64})
    open_sweep(tmp_path / "s", changed)  # nothing has begun
    open_sweep(tmp_path / "s", SWEEP)
    begin(folder.path, expand(SWEEP)[1])
    with pytest.raises(UsageError, match="seed_1 was started with algo.batch_size 256, and would now have 64"):
        open_sweep(tmp_path / "s", changed)
    assert folder.config() == SWEEP  # the refused file has left nothing behind


def test_a_folder_with_something_else_is_refused_and_a_sweep_is_held_once(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(UsageError, match="holds no sweep"):
        open_sweep(tmp_path, SWEEP)
    with held_sweep(tmp_path / "s", SWEEP), pytest.raises(UsageError, match="another process"):
        open_sweep(tmp_path / "s", SWEEP)
