"""A sweep's file, the runs that it means, and the places that they need."""

from dataclasses import replace
from pathlib import Path

import pytest
from ray.rllib.algorithms.utils import _get_learner_bundles

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig
from rlvlm.cli import run_command
from rlvlm.core.errors import UsageError
from rlvlm.core.guests import guests
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.settings.kinds import StepsRun
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import from_yaml, override, to_yaml
from rlvlm.sweeps.config import BudgetConfig, SourceConfig, SweepConfig, find_sweep_file, read_sweep
from rlvlm.sweeps.plan import alone_command, app_name, expand, notes_of_plans, shared_judges

JUDGE = SourceConfig(title="VLM", settings={"reward.teacher": "judge"})
ORACLE = SourceConfig(title="oracle", settings={"reward.teacher": "oracle"})
TRUE = SourceConfig(title="true reward", settings={"reward.source": "environment"})
SWEEP = SweepConfig(
    title="all",
    tasks=("drawer_open", "rlvlm.testing:TINY"),
    seeds=(0, 1),
    sources={"vlm": JUDGE, "oracle": ORACLE, "true": TRUE},
)


def test_every_task_meets_every_source_and_seed():
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


def test_a_task_may_have_seeds_of_its_own():
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


def test_queries_are_counted_session_by_session():
    config = StepsRun(task="drawer_open")  # sessions at 3,000, 5,000, ... 19,000
    most = config.kind.max_queries
    assert most(config) == 900
    assert most(replace(config, steps=21_000)) == 900  # none at the end, where nothing would train on it
    assert most(replace(config, steps=21_001)) == 1_000
    assert most(replace(config, steps=3_000)) == 0
    assert most(replace(config, feedback=replace(config.feedback, max_queries=250))) == 250
    assert most(expand(SWEEP)[2].config) == 0  # the true reward asks nobody


def test_sources_that_would_ask_nothing_are_named_once_before_they_run(tmp_path, capsys):
    short = replace(SWEEP, tasks=("drawer_open",), budget=BudgetConfig(steps=3_000))  # the first session is at 3,000
    assert [note.partition(" would be asked")[0] for note in notes_of_plans(expand(short))] == [
        "drawer_open, vlm: nothing",
        "drawer_open, oracle: nothing",
    ]
    assert not notes_of_plans(expand(replace(short, budget=BudgetConfig(steps=3_001))))
    file = tmp_path / "short.yaml"
    file.write_text(
        "title: short\ntasks: [drawer_open]\nseeds: [0]\nbudget: {steps: 3000}\n"
        "sources: {oracle: {title: oracle, settings: {reward.teacher: oracle}}}\n"
    )
    assert run_command(["sweep", str(file), "--plan"]) == 0
    assert "drawer_open, oracle: nothing would be asked" in capsys.readouterr().out


def test_budgets_are_equal_or_refused():
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
    ("settings", "message", "fix"),
    [
        ({"reward.techer": "oracle"}, "source odd on drawer_open: unknown setting reward.techer", "reward.teacher"),
        ({"reward.teacher": "orcle"}, "reward.teacher is 'orcle'; did you mean oracle", ""),
        ({"seed": 3}, "the setting seed is set by the sweep", ""),
        ({"steps": 3}, "the setting steps is set by the sweep", "budget"),
        ({"env.num_envs": 0}, "source odd on drawer_open: env.num_envs must be >= 1", ""),
    ],
)
def test_a_wrong_setting_is_reported_with_its_source(settings, message, fix):
    sweep = replace(
        SWEEP, sources={"odd": SourceConfig(title="odd", settings=settings)}, budget=BudgetConfig(steps=100)
    )
    with pytest.raises(UsageError, match=message) as caught:
        expand(sweep)
    assert fix in caught.value.fix


def test_settings_of_a_task_reach_its_runs_alone():
    sweep = replace(SWEEP, settings={"eval.episodes": 3}, task_settings={"drawer_open": {"eval.every_steps": 70}})
    assert {(plan.task, plan.config.eval.every_steps, plan.config.eval.episodes) for plan in expand(sweep)} == {
        ("drawer_open", 70, 3),
        ("rlvlm.testing:TINY", 2_500, 3),
    }


def test_runs_that_ask_the_same_judge_share_one_app(tmp_path):
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


@pytest.mark.slow
def test_the_command_of_a_run_makes_the_same_run():
    settings = {"feedback.ahead": True, "algo.hidden": [32, 16], "reward.teacher": "mistake"}
    sweep = replace(SWEEP, sources={"odd": SourceConfig(title="odd", settings=settings)}, smoke=True)
    member = {"algo.advantage.estimator": "gigpo", "algo.group_size": 4, "policy.lora_rank": 8}
    head = {"algo.loss.entropy_weight": 0.01, "policy.head": "actions"}
    sources = {name: SourceConfig(title=name, settings=own) for name, own in (("gigpo", member), ("head", head))}
    acting = replace(sweep, tasks=("number_line",), sources=sources)
    for plan in expand(sweep) + expand(acting):
        words = alone_command(plan.config)
        assert words[:3] == ["rlvlm", "run", plan.task]
        assert parse_run(words[2:], "rlvlm run").config == plan.config


READY = [
    file
    for file in sorted(Path(__file__).parents[2].glob("tune_configs/*.yaml"))
    if "openvla" in guests() or "openvla" not in file.read_text()
]
SMALL = """
title: oracle against the true reward
tasks: [drawer_open]
seeds: [0, 1]
sources:
  oracle: {title: Oracle, settings: {reward.teacher: oracle}}
"""


def test_a_small_file_is_read():
    sweep = from_yaml(SweepConfig, SMALL)
    assert sweep.seeds == (0, 1) and sweep.sources["oracle"].settings == {"reward.teacher": "oracle"}
    assert sweep.flat is None and sweep.halving is None and sweep.resources.cpus == 1
    assert from_yaml(SweepConfig, to_yaml(sweep)) == sweep


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        (SMALL + "seed: [3]", "unknown key seed", "did you mean seeds?"),
        (SMALL + "budget: {step: 3}", "unknown key budget.step", "did you mean budget.steps?"),
        (SMALL + "flat: {shar: 0.3}", "unknown key flat.shar", "did you mean flat.share?"),
        (SMALL + "flat: {share: 1.5}", r"flat.share must be in \(0, 1\), got 1.5", ""),
        (SMALL + "halving: {keep_one_in: 1}", "halving.keep_one_in must be >= 2", ""),
        (SMALL + "resources: {cpus: 0}", "resources.cpus must be > 0", ""),
        (SMALL + "budget: {steps: none}", "budget.steps must be of type int", ""),
        (SMALL + "task_settings: {soccer: {steps: 3}}", "not among the tasks", ""),
        (SMALL.replace("[0, 1]", "[1, 1]"), "seeds must name at least one, and none twice", ""),
        (SMALL.replace("  oracle:", "  a/b:"), "it names a folder", ""),
        (SMALL.replace("title: Oracle, ", ""), "sources.oracle.title is missing", ""),
    ],
)
def test_mistakes_are_named(text, what, fix):
    with pytest.raises(UsageError, match=what) as caught:
        from_yaml(SweepConfig, text)
    assert fix in caught.value.fix


@pytest.mark.parametrize("file", READY, ids=lambda file: file.stem)
def test_the_ready_sweeps_can_be_planned(file):
    sweep = read_sweep(find_sweep_file(file.stem))
    assert len(expand(sweep)) == sum(len(sweep.seeds_of(task)) for task in sweep.tasks) * len(sweep.sources)
    assert file.read_text().startswith("# ")  # says what it compares


def test_an_unknown_sweep_is_refused_with_the_ready_ones(tmp_path, monkeypatch):
    assert READY
    (tmp_path / READY[0].stem).mkdir()  # of `rlvlm sweep NAME --out NAME`
    monkeypatch.chdir(tmp_path)
    assert find_sweep_file(READY[0].stem) == READY[0]
    with pytest.raises(UsageError, match="reward_sources"):
        find_sweep_file("reward_sorces")
    with pytest.raises(UsageError, match="cannot read"):
        read_sweep(find_sweep_file("nowhere.yaml"))


@pytest.mark.parametrize("task", ["number_line", *["push_block"] * ("openvla" in guests())])
def test_a_gpu_by_number_is_refused_where_ray_assigns_them(task):
    device = "policy.device" if task == "number_line" else "policy.openvla.device"
    named = {device: "cuda:7", "policy.model": "owner/name"}
    for where in ({"algo.num_learners": 2}, {"engine.num_replicas": 1}):
        if task == "number_line" or "algo.num_learners" in where:
            with pytest.raises(UsageError, match="cuda:7 is a GPU as the run's own process counts them"):
                override(recipe(task), named | where)
    config = override(recipe(task), named)
    assert config.kind.networks(config)


def test_learners_have_the_place_that_rllib_asks_for():
    for gpus in (0.0, 1.0):
        run = override(recipe("number_line"), {"algo.num_learners": 2, "algo.gpus_per_learner": gpus})
        config = PolicyGradientAlgorithmConfig().learners(num_learners=2, num_gpus_per_learner=gpus)
        asked = [
            {name: float(count) for name, count in bundle.items() if count} for bundle in _get_learner_bundles(config)
        ]
        assert list(run.worker_places) == asked
        assert {role.name: role.gpus * role.count for role in run.roles if role.gpus} == (
            {"learners": 2.0} if gpus else {}
        )
    runners = override(recipe("push_block"), {"algo.env_runners": 3})
    assert runners.worker_places == ({"CPU": 1.0},) * 3
