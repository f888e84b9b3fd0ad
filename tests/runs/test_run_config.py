"""What every run's settings are held to, whatever pipeline it is of."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from rlvlm.commands.arguments import parse_run
from rlvlm.core.errors import UsageError
from rlvlm.envs.registry import check_unused, task_env, task_names
from rlvlm.runs.checkpoints import RunState
from rlvlm.runs.folder import check_settings
from rlvlm.runs.recipes import recipe
from rlvlm.runs.settings import flat, override


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("drawer_open", "steps algo.actor_lr algo.critic_lr reward_model.lr judge.api.max_cost_usd serve.num_gpus"),
        ("number_line", "algo.lr algo.value_lr algo.loss.kl_weight engine.num_replicas reward.without_answer"),
        ("push_block", "algo.lr algo.device algo.env_runners reward.monitor.on_alarm eval.episodes"),
    ],
)
def test_what_errors_tell_to_change_may_be_changed_and_what_a_run_is_may_not(task: str, names: str) -> None:
    config = recipe(task)
    free = {name for name in flat(config) if any(fnmatchcase(name, pattern) for pattern in config.may_change)}
    assert set(names.split()) <= free
    kept = {"task", "seed", "goal", "sft.lr", "env.episode_steps", "reward.source", "reward.teacher", "judge.model"}
    assert not free & kept
    state = RunState(env_steps=5, wall_s=0.0, peak_rss_mb=0.0, settings=flat(config))
    check_settings(state, replace(config, steps=7))
    with pytest.raises(UsageError, match="seed is 9, before 0"):
        check_settings(state, replace(config, seed=9, steps=7))


@pytest.mark.parametrize(
    "words",
    [
        "drawer_open --algo.actor-lr nan",
        "drawer_open --reward-model.lr nan",
        "number_line --algo.lr nan",
        "number_line --reward.unreadable nan",
        "number_line --reward.source mixture --reward.mixture.environment nan",
        "push_block --algo.loss.kl-weight nan",
        "push_block --algo.lr nan",
    ],
)
def test_a_setting_that_is_no_number_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((UsageError, SystemExit)) as end:
        parse_run(words.split(), "run")
    assert "nan" in str(end.value) + capsys.readouterr().err


def test_infinity_is_a_setting() -> None:
    assert parse_run(["drawer_open", "--feedback.simulated.beta", "inf"], "run")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("drawer_open --env.split training", "env.split"),
        ("drawer_open --env.rules legacy", "env.rules"),
        ("push_block --env.physics fast", "env.physics"),
        ("push_block --env.split training", "env.split"),
        ("number_line --env.start random", "env.start"),
        ("number_line --env.shows-last", "env.shows_last"),
        ("doorkey_6x6 --env.deals solvable", "env.deals"),
        ("libero_goal/8 --env.num-envs 2", "env.num_envs"),
        ("cartpole --env.robot visible", "env.robot"),
    ],
)
def test_what_a_env_does_not_heed_is_refused(words: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} would have no effect"):
        parse_run(words.split(), "run")


@pytest.mark.parametrize(
    ("task", "limit"),
    [
        ("number_line", 10),
        ("ez_points", 7),
        ("points24", 22),
        ("doorkey_5x5", 250),
        ("minigrid/MiniGrid-Unlock-v0", 288),
    ],
)
def test_episodes_cannot_be_longer_than_the_rules_of_the_task_let_them(task: str, limit: int) -> None:
    with pytest.raises(UsageError, match=rf"env.episode_steps must be <= {limit}, got {limit + 1}"):
        parse_run([task, "--env.episode-steps", str(limit + 1)], "run")
    assert parse_run([task, "--env.episode-steps", str(limit)], "run").config.env.episode_steps == limit


def test_what_a_env_heeds_is_taken_and_so_is_every_recipe() -> None:
    for words in ("points24 --env.split training --env.deals solvable", "libero_goal/8 --env.moved 0.01"):
        parse_run(words.split(), "run")
    for task in task_names():
        check_unused(task, recipe(task).env)


def test_of_a_task_of_ones_own_nobody_knows_and_none_is_imported() -> None:
    check_unused("no_such_module:TASK", replace(task_env("number_line"), start="random"))


@pytest.mark.parametrize("words", ["--reward.teacher random", "--reward.without-answer stop", "--reward.per episode"])
def test_settings_of_a_scorer_go_with_one(words: str) -> None:
    with pytest.raises((UsageError, SystemExit)):
        parse_run(["number_line", *words.split()], "run")
    assert parse_run(["number_line", "--reward.source", "judged", "--reward.teacher", "random"], "run")
    for source in ("environment", "judged", "success"):
        with pytest.raises((UsageError, SystemExit)):
            parse_run(["drawer_open", "--reward.source", source, "--reward.teacher", "oracle"], "run")


def test_segments_are_for_judges_that_read_clips_and_an_attached_one_may() -> None:
    longer = {"feedback.segment_steps": 4}
    with pytest.raises(UsageError, match="knows single images only"):
        override(recipe("drawer_open"), longer)
    assert override(recipe("drawer_open"), longer | {"serve.app": "qwen3vl-8b"}).serve.app == "qwen3vl-8b"
