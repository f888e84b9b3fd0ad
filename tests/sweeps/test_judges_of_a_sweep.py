"""What becomes of a sweep's runs when a judge does not load: the fault is faked, nothing else."""

import io
from pathlib import Path

import pytest

from rlvlm.core.console.signals import StopRequest
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.sweeps import sweep as sitting
from rlvlm.sweeps.callback import SweepCallback
from rlvlm.sweeps.config import SourceConfig, SweepConfig
from rlvlm.sweeps.folder import FINISHED, State, held_sweep
from rlvlm.sweeps.plan import expand
from rlvlm.sweeps.progress_table import ProgressTable

SWEEP = SweepConfig(
    title="two judges",
    tasks=("drawer_open",),
    seeds=(0, 1),
    sources={
        "pocket": SourceConfig(title="", settings={"reward.teacher": "judge"}),
        "large": SourceConfig(title="", settings={"reward.teacher": "judge", "judge.both_orders": True}),
        "oracle": SourceConfig(title="", settings={"reward.teacher": "oracle"}),
    },
)


def test_a_judge_that_does_not_load_fails_its_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

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
    with held_sweep(tmp_path / "sweep", SWEEP) as (folder, _):
        pass
    plans = {plan.key: plan for plan in expand(SWEEP)}
    table = ProgressTable(io.StringIO(), SWEEP.title, plans)
    callback = SweepCallback(folder=folder, sweep=SWEEP, plans=plans, table=table, stop=StopRequest())
    with sitting._judges(folder, SWEEP, list(plans.values()), callback, table):
        assert started == ["up"]
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
