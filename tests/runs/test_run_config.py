"""What every run's settings are held to, whatever pipeline it is of."""

import json
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from typing import Any

import pytest

from rlvlm.core.errors import UsageError
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.registry import check_env_settings, task_env
from rlvlm.runs.files.checkpoints import Checkpoint, RunState
from rlvlm.runs.files.folder import read_state
from rlvlm.runs.settings.config_file import config_text, read_config_text
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import flat, override
from rlvlm.runs.start.build import algorithm_settings


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("drawer_open", "steps algo.actor_lr algo.critic_lr reward_model.lr judge.api.max_cost_usd serve.num_gpus"),
        (
            "number_line",
            "algo.lr algo.shard policy.recompute algo.loss.kl_weight engine.num_replicas reward.without_answer",
        ),
        ("push_block", "algo.lr algo.device algo.env_runners reward.monitor.on_alarm eval.episodes"),
    ],
)
def test_settings_that_errors_name_may_change_on_resume_and_others_may_not(task, names, tmp_path):
    config = recipe(task)
    free = {name for name in flat(config) if any(fnmatchcase(name, pattern) for pattern in config.may_change)}
    assert set(names.split()) <= free
    kept = {"task", "seed", "goal", "sft.lr", "env.episode_steps", "reward.source", "reward.teacher", "judge.model"}
    assert not free & kept
    state = RunState(env_steps=5, wall_s=0.0, peak_rss_mb=0.0, settings=flat(config))
    (tmp_path / "run.json").write_text(json.dumps(asdict(state)))
    assert read_state(Checkpoint(tmp_path), replace(config, steps=7)).env_steps == 5
    with pytest.raises(UsageError, match="seed is 9, before 0"):
        read_state(Checkpoint(tmp_path), replace(config, seed=9, steps=7))


JUDGED = {"reward.source": "judged"}
LABELLED = {"sft.labels": "x.parquet", "sft.demonstrations": "d"}


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        # settings of other families' envs
        ("drawer_open", {"env.split": "training"}, "unknown setting env.split"),
        ("drawer_open", {"env.rules": "legacy"}, "unknown setting env.rules"),
        ("push_block", {"env.physics": "fast"}, "unknown setting env.physics"),
        ("push_block", {"env.split": "training"}, "unknown setting env.split"),
        ("number_line", {"env.start": "random"}, "unknown setting env.start"),
        ("number_line", {"env.prompt_last_action": True}, "unknown setting env.prompt_last_action"),
        ("doorkey_6x6", {"env.deals": "solvable"}, "unknown setting env.deals"),
        ("libero_goal/8", {"env.num_envs": 2}, "unknown setting env.num_envs"),
        ("cartpole", {"env.robot": "visible"}, "unknown setting env.robot"),
        # settings of a scorer go with one
        ("number_line", {"reward.teacher": "random"}, "have no effect without scores"),
        ("number_line", {"reward.without_answer": "stop"}, "have no effect without scores"),
        ("number_line", {"reward.per": "episode"}, "have no effect without scores"),
        ("push_block", {"reward.parts": 9}, "have no effect without scores"),
        ("drawer_open", {"reward.source": "environment", "reward.teacher": "oracle"}, "has no effect with"),
        ("drawer_open", JUDGED | {"reward.teacher": "oracle"}, "has no effect with"),
        # what is asked about, and how
        ("drawer_open", {"feedback.segment_steps": 4}, "knows single images only"),
        ("push_block", JUDGED | {"judge.model": "scorer", "judge.score": "utility"}, "utility is that of one turn"),
        ("number_line", JUDGED | {"reward.per": "episode"}, "progress, success, rating or video, got utility"),
        ("number_line", JUDGED | {"judge.score": "progress"}, "judge.score utility, got progress"),
        # what nobody would heed
        ("push_block", {"goal": "eat the cake"}, "goal has no effect"),
        ("push_block", {"sft.scenes": 100}, "sft.scenes 100 has no effect"),
        ("number_line", {"algo.staleness": 1}, "algo.staleness 1 has no effect where the run's own process plays"),
        (
            "number_line",
            {"algo.num_learners": 2, "algo.shard": True, "policy.model": "x/y", "policy.quantization": "nf4"},
            "policy.quantization nf4 does not go with algo.shard",
        ),
        ("number_line", {"policy.head": "my:Net", "engine.num_replicas": 1}, "my:Net samples in the run's own process"),
        ("number_line", {"policy.lora_targets": "["}, "lora_targets must be a regular expression"),
        # labels of recorded episodes, and what they are for
        ("push_block", {"sft.weighting": "filter"}, "sft.weighting needs sft.labels"),
        ("push_block", {"sft.labels": "x.parquet", "sft.weighting": "filter"}, "these need sft.demonstrations"),
        ("push_block", LABELLED, "labels need a weighting"),
        ("push_block", {"policy.conditioned": True}, "asks for what sft.weighting condition teaches"),
        ("push_block", LABELLED | {"sft.weighting": "condition"}, "asks for what sft.weighting condition teaches"),
        ("push_block", {"policy.conditioned": True, "policy.head": "my_file:NAME"}, "own, which reads its prompts"),
    ],
)
def test_contradictory_settings_are_refused(task, settings, said):
    with pytest.raises(UsageError, match=said):
        override(recipe(task), settings)


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("drawer_open", {"feedback.simulated.beta": float("inf")}),
        ("drawer_open", {"feedback.segment_steps": 4, "serve.app": "qwen3vl-8b"}),  # an attached judge may read clips
        ("points24", {"env.split": "training", "env.deals": "solvable"}),
        ("libero_goal/8", {"env.start_jitter_m": 0.01}),
    ],
)
def test_valid_settings_round_trip_as_text(task, settings):
    config = override(recipe(task), settings)
    assert read_config_text(config_text(config)) == config


def test_settings_that_are_gone_are_left_out_where_they_did_nothing_and_else_refused_by_name():
    config = recipe("push_block")
    text = config_text(config)
    older = text.replace("    min_spread:", "    chunk_share: 1.0\n    min_spread:")
    assert older != text and read_config_text(older) == config
    with pytest.raises(UsageError, match=r"sets algo\.advantage\.chunk_share 0\.3, which this version does not have"):
        read_config_text(older.replace("chunk_share: 1.0", "chunk_share: 0.3"))


@pytest.mark.parametrize(
    ("task", "settings", "idle", "why"),
    [
        ("push_block", {}, "judge.model serve.num_gpus reward.monitor.controls", "reward.source success"),
        ("push_block", {}, "eval.num_envs", "an env in chunks"),
        ("drawer_open", {}, "eval.num_envs", "an env in steps"),
        ("libero_object/0", {}, "reward.num_frames reward.frame_px", "reward.source success"),
        ("number_line", {}, "judge.batch_size reward.frame_px", "reward.source environment"),
        ("push_block", JUDGED | {"reward.teacher": "random"}, "judge.score reward.monitor.preflight", "reward.teacher"),
        ("number_line", JUDGED | {"reward.teacher": "random"}, "serve.app reward.monitor.min_auc", "reward.teacher"),
        ("push_block", {"algo.num_learners": 1}, "algo.device", "algo.num_learners 1"),
        ("push_block", {"sft.updates": 0}, "sft.lr sft.label_width", "sft.updates 0"),
        ("push_block", {"policy.head": "flow"}, "sft.label_width", "policy.head flow, which has no bins"),
        ("push_block", {"sft.demonstrations": "shown"}, "sft.noise sft.episodes", "sft.demonstrations"),
        ("number_line", {"sft.demonstrations": "shown"}, "sft.turns sft.p_wrong", "sft.demonstrations"),
        ("number_line", {"policy.head": "my:Net"}, "policy.lora_rank sft.reply_weight", "policy.head my:Net"),
        ("push_block", {"sft.start_from": "best"}, "sft.episodes sft.lr", "sft.start_from"),
        ("push_block", {"policy.model": "checkpoint"}, "sft.updates policy.pocket.dilated", "policy.model"),
    ],
)
def test_settings_without_effect_are_found(task, settings, idle, why):
    config = override(recipe(task), settings)
    assert all(why in (config.why_unused(name) or "") for name in idle.split())
    assert not any(map(config.why_unused, ("task", "steps", "seed", "reward.source", "algo.lr", "eval.episodes")))
    assert not any(config.why_unused(name) for name in settings)


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
def test_episodes_cannot_be_longer_than_the_rules_of_the_task_let_them(task, limit):
    with pytest.raises(UsageError, match=rf"env.episode_steps must be <= {limit}, got {limit + 1}"):
        override(recipe(task), {"env.episode_steps": limit + 1})
    assert override(recipe(task), {"env.episode_steps": limit}).env.episode_steps == limit


def test_a_users_own_task_is_not_imported_to_check_settings():
    check_env_settings("no_such_module:TASK", replace(task_env("number_line"), split="training"))
    check_env_settings("gym:no_such_module:It-v0", StepEnvConfig(start="fixed", episode_steps=7, num_envs=2))
    with pytest.raises(ValueError, match="env are a GymnasiumConfig, got a CardsConfig"):
        check_env_settings("gym:no_such_module:It-v0", task_env("number_line"))


@pytest.mark.parametrize(
    ("task", "settings", "name", "is_asked"),
    [
        ("drawer_open", {}, "judge labels, image reward", True),
        ("drawer_open", {"reward.teacher": "oracle", "reward.model": "state"}, "oracle labels, state reward", False),
        ("drawer_open", {"reward.source": "score"}, "judge scores, image reward", True),
        ("drawer_open", JUDGED, "pocket score", True),
        ("drawer_open", {"reward.source": "environment"}, "environment reward", False),
        ("number_line", JUDGED, "gae, judge per turn", True),
        ("number_line", JUDGED | {"reward.teacher": "random"}, "gae, random per turn", False),
        ("push_block", JUDGED | {"reward.teacher": "biased"}, "grpo, biased score of the video", False),
        ("number_line", {"reward.source": "success", "reward.shaping": "value"}, "gae, env success + value", False),
    ],
)
def test_a_reward_has_a_name_and_says_whether_a_judge_is_asked(task, settings, name, is_asked):
    config = override(recipe(task), settings)
    assert (config.reward_name, config.reward.asks_judge) == (name, is_asked)
    assert config.title == f"{task}: {name}, seed 0"
    assert read_config_text(config_text(config)) == config


IN_BFLOAT16 = {"algo.num_learners": 2, "algo.shard": True, "algo.compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "none"),
        ({"engine.num_replicas": 2}, "none"),
        ({"engine.num_replicas": 2, "engine.backend": "vllm", "policy.learns": "lora"}, "token"),
        ({"engine.num_replicas": 2} | IN_BFLOAT16, "token"),
        (IN_BFLOAT16, "none"),
        ({"engine.num_replicas": 2, "engine.backend": "vllm", "algo.loss.correction": "none"}, "none"),
        ({"algo.loss.correction": "sequence"}, "sequence"),
    ],
)  # fmt: skip
def test_samples_of_a_different_engine_are_corrected_by_default(settings, expected):
    config: Any = override(recipe("number_line"), settings)
    assert config.correction == expected
    built: Any = algorithm_settings(config, None, (lambda *_: None) if config.num_engine_replicas else None)  # pyright: ignore
    assert built.algo.loss.correction == expected


def test_a_title_names_a_policy_s_head_where_it_is_not_the_usual_one():
    assert recipe("push_block").title == "push_block: grpo, env success, seed 0"
    assert override(recipe("push_block"), {"policy.head": "flow"}).title.startswith("push_block: flow policy, grpo, ")
    assert override(recipe("number_line"), {"policy.head": "actions"}).title.startswith("number_line: actions policy, ")
