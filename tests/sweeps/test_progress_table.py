import io

import pytest
from rich.console import Console

from rlvlm.sweeps.config import SourceConfig, SweepConfig
from rlvlm.sweeps.folder import State, TrialRecord
from rlvlm.sweeps.plan import TrialPlan, expand
from rlvlm.sweeps.progress_table import ProgressTable

SWEEP = SweepConfig(
    title="a sweep",
    tasks=("drawer_open",),
    seeds=(0, 1),
    sources={"true": SourceConfig(title="", settings={"reward.source": "environment"})},
)


@pytest.fixture
def plans() -> dict[str, TrialPlan]:
    return {plan.key: plan for plan in expand(SWEEP)}


def record(plan: TrialPlan, state: State, **known: object) -> TrialRecord:
    return TrialRecord(task=plan.task, source=plan.source, seed=plan.seed, state=state, **known)


def test_without_a_terminal_there_is_a_line_per_event(plans: dict[str, TrialPlan]) -> None:
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
        "drawer_open  true  seed 0  running  (0 of 2 finished)",
        "drawer_open  true  seed 0  step 5,000/20,000  score 0.25  100 steps/s  left 0:02:30",
        "drawer_open  true  seed 1  failed: no judge  (0 of 2 finished, 1 failed)",
        "drawer_open  true  seed 0  done  (1 of 2 finished, 1 failed)",
    ]


def test_the_table_shows_every_run_and_what_is_left(plans: dict[str, TrialPlan]) -> None:
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
