from dataclasses import replace
from pathlib import Path

import pytest

from rlvlm.commands.arguments import parse_run
from rlvlm.core.errors import UsageError
from rlvlm.runs.config import RunConfig
from rlvlm.sweeps.config import BudgetConfig, SourceConfig, SweepConfig
from rlvlm.sweeps.plan import alone_command, app_name, expand, shared_judges

JUDGE = SourceConfig(title="VLM", settings={"reward.teacher": "judge"})
ORACLE = SourceConfig(title="oracle", settings={"reward.teacher": "oracle"})
TRUE = SourceConfig(title="true reward", settings={"reward.source": "environment"})
SWEEP = SweepConfig(
    title="all",
    tasks=("drawer_open", "rlvlm.testing:TINY"),
    seeds=(0, 1),
    sources={"vlm": JUDGE, "oracle": ORACLE, "true": TRUE},
)


def test_every_task_meets_every_source_and_seed() -> None:
    plans = expand(SWEEP)
    assert [plan.key for plan in plans[:4]] == [
        "drawer_open/vlm/seed_0",
        "drawer_open/oracle/seed_0",
        "drawer_open/true/seed_0",
        "rlvlm-testing-TINY/vlm/seed_0",
    ]
    assert len({plan.key for plan in plans}) == 12
    last = plans[-1].config
    assert (last.task, last.seed, last.reward.source) == ("rlvlm.testing:TINY", 1, "environment")


def test_a_task_may_have_seeds_of_its_own() -> None:
    sweep = replace(SWEEP, seeds=(0,), task_seeds={"drawer_open": (5, 0, 7)}, sources={"true": TRUE})
    assert [plan.key for plan in expand(sweep)] == [
        "drawer_open/true/seed_5",
        "rlvlm-testing-TINY/true/seed_0",
        "drawer_open/true/seed_0",
        "drawer_open/true/seed_7",
    ]
    with pytest.raises(ValueError, match="task_seeds has soccer, which is not among the tasks drawer_open"):
        replace(SWEEP, task_seeds={"soccer": (0,)})
    with pytest.raises(ValueError, match="task_seeds.drawer_open must name at least one, and none twice"):
        replace(SWEEP, task_seeds={"drawer_open": (1, 1)})


def test_queries_are_counted_session_by_session() -> None:
    config = RunConfig(task="drawer_open")  # sessions at 3,000, 5,000, ... 19,000
    assert config.max_queries == 900
    assert replace(config, steps=21_000).max_queries == 900  # none at the end, where nothing would train on it
    assert replace(config, steps=21_001).max_queries == 1_000
    assert replace(config, steps=3_000).max_queries == 0
    assert replace(config, feedback=replace(config.feedback, max_queries=250)).max_queries == 250
    assert expand(SWEEP)[2].config.max_queries == 0  # the true reward asks nobody


def test_budgets_are_equal_or_refused() -> None:
    sources = SWEEP.sources | {"short": SourceConfig(title="short", settings={"steps": 10_000})}
    with pytest.raises(UsageError, match="different budgets of env steps: 10,000 to 20,000"):
        expand(replace(SWEEP, sources=sources))
    few = SWEEP.sources | {"few": SourceConfig(title="few", settings={"feedback.queries": 10})}
    with pytest.raises(UsageError, match="different budgets of queries: 90 to 900"):
        expand(replace(SWEEP, sources=few))
    assert expand(replace(SWEEP, sources=few, budget=BudgetConfig(may_differ=True)))
    plans = expand(replace(SWEEP, budget=BudgetConfig(steps=5_000, queries=70)))
    assert {(plan.config.steps, plan.config.feedback.max_queries) for plan in plans} == {(5_000, 70)}


@pytest.mark.parametrize(
    ("settings", "told", "fix"),
    [
        ({"reward.techer": "oracle"}, "source odd on drawer_open: unknown setting reward.techer", "reward.teacher"),
        ({"reward.teacher": "orcle"}, "reward.teacher is 'orcle'; did you mean oracle", ""),
        ({"seed": 3}, "the setting seed is set by the sweep", ""),
        ({"steps": 3}, "the setting steps is set by the sweep", "budget"),
        ({"env.num_envs": 0}, "source odd on drawer_open: num_envs must be >= 1", ""),
    ],
)
def test_a_wrong_setting_is_told_with_its_source(settings: dict[str, object], told: str, fix: str) -> None:
    sweep = replace(
        SWEEP, sources={"odd": SourceConfig(title="odd", settings=settings)}, budget=BudgetConfig(steps=100)
    )
    with pytest.raises(UsageError, match=told) as caught:
        expand(sweep)
    assert fix in caught.value.fix


def test_settings_of_a_task_reach_its_runs_alone() -> None:
    sweep = replace(SWEEP, settings={"eval.episodes": 3}, task_settings={"drawer_open": {"eval.every_steps": 70}})
    assert {(plan.task, plan.config.eval.every_steps, plan.config.eval.episodes) for plan in expand(sweep)} == {
        ("drawer_open", 70, 3),
        ("rlvlm.testing:TINY", 2_500, 3),
    }


def test_runs_that_ask_the_same_judge_share_one_app(tmp_path: Path) -> None:
    both = {
        "vlm": JUDGE,
        "state": SourceConfig(title="state", settings={"reward.model": "state"}),
        "twice": SourceConfig(title="twice", settings={"judge.both_orders": True}),
        "oracle": ORACLE,
    }
    plans = expand(replace(SWEEP, sources=both))
    judges = shared_judges(plans, 0.0, tmp_path)
    assert len(judges) == 2 and {config.serve.num_cpus for config in judges.values()} == {0.0}
    assert {app_name(plan.config, tmp_path) for plan in plans if plan.config.reward.asks_judge} == set(judges)
    assert not set(judges) & set(shared_judges(plans, 0.0, tmp_path / "other"))  # sweeps on one cluster never meet
    mine = replace(SWEEP, settings={"serve.app": "pocket"})
    assert shared_judges(expand(mine), 0.0, tmp_path) == {}


def test_the_command_of_a_run_makes_the_same_run() -> None:
    settings = {"feedback.ahead": True, "algo.hidden": [32, 16], "reward.teacher": "mistake"}
    sweep = replace(SWEEP, sources={"odd": SourceConfig(title="odd", settings=settings)}, smoke=True)
    member = {"algo.advantage.estimator": "gigpo", "algo.group_size": 4, "policy.lora_rank": 8}
    head = {"algo.loss.entropy_weight": 0.01, "policy.acts": "head"}
    sources = {name: SourceConfig(title=name, settings=own) for name, own in (("gigpo", member), ("head", head))}
    acting = replace(sweep, tasks=("number_line",), sources=sources)
    for plan in expand(sweep) + expand(acting):
        words = alone_command(plan.config)
        assert words[:3] == ["rlvlm", "run", plan.task]
        assert parse_run(words[2:], "rlvlm run").config == plan.config
