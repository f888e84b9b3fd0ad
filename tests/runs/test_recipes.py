from dataclasses import fields, is_dataclass, replace

import pytest
import torch

from rlvlm.core.errors import UsageError
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import Task, check_env_settings, make_env, register, task_env, task_names
from rlvlm.pocket.models import VIDEO_TASKS
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.settings.config_file import config_text, read_config_text
from rlvlm.runs.settings.kinds import StepsRun
from rlvlm.runs.settings.recipes import RECIPES, recipe
from rlvlm.runs.settings.tree import override
from rlvlm.runs.start.build import algorithm_settings


def test_a_first_feedback_after_the_end_is_reported():
    config = recipe("drawer_open")
    assert config.kind.notes(config) == []
    late = override(config, {"steps": 500})
    assert "the run ends at step 500" in late.kind.notes(late)[0] and late.kind.max_queries(late) == 0


@pytest.mark.parametrize(("kind", "preset"), [("steps", ""), ("turns", "ppo"), ("chunks", "grpo")])
def test_a_registered_task_without_a_recipe_takes_the_defaults_of_its_kind(kind, preset):
    settings = EnvConfig(episode_steps=7)
    register(Task(name=f"recipe_less_{kind}", goal="do it", maker="somewhere:else", kind=kind, env=settings))
    config = recipe(f"recipe_less_{kind}")
    assert (config.task, config.kind.name, config.algo.preset) == (f"recipe_less_{kind}", kind, preset)
    assert (config.env.episode_steps, config.smoke().kind.name) == (7, kind)


def test_a_task_of_a_family_keeps_its_name():
    config = recipe("metaworld/door-open-v3")
    assert (config.task, config.env.robot) == ("metaworld/door-open-v3", "visible")
    config = recipe("libero_object/alphabet soup")  # words of a goal become the task's number
    assert (config.task, config.kind.name) == ("libero_object/0", "chunks")


def test_a_libero_task_names_the_pocket_judge_that_was_taught_it_mirrored():
    for task in (*VIDEO_TASKS, "libero_spatial", "libero_object"):
        config = recipe(task)
        assert (config.judge.model, config.reward.num_frames, config.reward.flip_images) == ("video", 2, False)
    for task in ("libero_10/5", "libero_goal"):
        assert recipe(task).judge.model == "" and recipe(task).reward.flip_images, "another judge sees no mirror"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["libero_10/0", "libero_object", "push_block"])
def test_a_checkpoint_takes_nothing_that_was_tuned_for_the_pocket_vla(task):
    pocket, own = recipe(task), parse_run([task, "--policy.model", "a/b"], "run").config
    assert (pocket.algo.draws, own.algo.draws, own.algo.min_lr_ratio, own.algo.warm_up) == ("chunk", "token", 1.0, 0)
    assert own.env == task_env(task) and (own.algo.temperature, own.algo.kl_target) == (1.6, None)
    assert parse_run([task, "--policy.model=a/b", "--algo.lr", "1e-5"], "run").config.algo.lr == 1e-5
    assert parse_run([task], "run").config == pocket


def test_other_models_than_the_pocket_ones_see_the_benchmarks_images():
    pocket = recipe("libero_object/0")
    judged = {"reward.source": "judged"}
    large = judged | {"judge.backend": "transformers", "judge.model": "a/b", "judge.score": "success"}

    def looks(settings: dict[str, object]) -> tuple[str, str]:
        config = override(pocket, settings)
        return config.policy_env.render_style, config.judge_env.render_style

    assert looks({}) == looks(judged) == ("light", "light")
    assert looks({"policy.model": "a/b"}) == ("benchmark", "light")
    assert looks(large) == looks(judged | {"serve.app": "qwen3vl-8b"}) == ("light", "benchmark")
    assert looks(large | {"env.render_style": "light", "policy.model": "a/b"}) == ("light", "light")
    assert override(pocket, {"policy.model": "a/b"}).why_unused("env.mesh_cell") is not None
    assert pocket.why_unused("env.mesh_cell") is None


def test_every_recipe_is_that_of_its_task_and_its_env_reads_what_it_sets():
    for name, make in RECIPES.items():
        assert make().task == name and recipe(name) == make()
        assert recipe(name).smoke().steps <= recipe(name).steps
    for name in task_names():
        check_env_settings(name, recipe(name).env)
    doorkey, number_line = recipe("doorkey_6x6").env, recipe("number_line").env
    assert (doorkey.split, doorkey.for_evaluation().split) == ("training", "held_out")
    assert number_line.for_evaluation() == number_line


def numbers(config: object, prefix: str = "") -> dict[str, float]:
    found = {}
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if is_dataclass(value):
            found |= numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, int | float):
            found[prefix + field.name] = value
    return found


@pytest.mark.parametrize(
    ("task", "steps"),
    [
        ("drawer_open", 3_000), ("points24", 256), ("lava_gap", 256), ("pick_place_can", 256), ("push_block", 30_000),
        ("libero_object/0", 4_285),
    ],
)  # fmt: skip
def test_smoke_only_ever_makes_a_run_smaller_and_every_part_of_it_still_happens(task, steps):
    full, small = recipe(task), recipe(task).smoke()
    ours = {"algo.num_envs", "algo.rollout_turns", "algo.rounds"}  # a smoke run's own
    assert all(value <= numbers(full)[name] for name, value in numbers(small).items() if name not in ours)
    assert small.steps == steps and small.smoke() == small
    assert small.steps // small.eval.every_steps >= 2
    assert small.steps // small.track.log_every_steps <= 20  # the console stays under 40 lines
    if isinstance(small, StepsRun):
        assert small.algo.seed_steps < small.feedback.first_step < small.steps


POLICIES = {repr(make().policy): name for name, make in RECIPES.items() if make().kind.name == "turns"}
"""A task for each policy that recipes have."""


@pytest.mark.parametrize("task", POLICIES.values())
def test_the_policy_of_every_recipe_loads(task):
    config = recipe(task)
    policy = load_policy(config.policy, num_actions=3)
    for word in config.policy.new_words:
        assert len(policy.processor.tokenizer(word, add_special_tokens=False)["input_ids"]) == 1


def test_the_seed_of_a_run_reaches_what_is_drawn_of_its_policy():
    env, drawn = make_env("number_line", task_env("number_line"), 0), []
    for seed in (0, 1, 1):
        settings = algorithm_settings(replace(recipe("number_line"), seed=seed), make_judge=None)
        drawn.append(settings.policy_for(env).value_head.state_dict()["0.weight"])
    assert torch.equal(drawn[1], drawn[2]) and not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("preset", ["ppo", "grpo", "rloo", "gigpo"])
@pytest.mark.parametrize("task", ["number_line", "push_block"])
def test_a_preset_sets_estimator_loss_and_rollouts_of_either_kind_and_names_the_run(task, preset):
    own, config = recipe(task), parse_run([task, "--algo.preset", preset], "run").config
    assert config == override(own, {"algo.preset": preset}), "a sweep and a notebook start from the same"
    assert read_config_text(config_text(config)) == config
    estimator = "gae" if preset == "ppo" else preset
    assert (config.algo.preset, config.algo.advantage.estimator) == (preset, estimator)
    assert config.reward_name.startswith(f"{estimator}, ")
    assert (config.algo.lr, config.steps) == (own.algo.lr, own.steps), "the recipe's own"
    assert (config.algo.rollout_turns > 0) == (preset == "ppo" and task == "number_line"), "groups are whole episodes"
    assert config.smoke().smoke() == config.smoke()
    algorithm_settings(config, make_judge=None).validate()


def test_a_preset_that_a_run_cannot_have_is_refused_by_name():
    for task, preset, said in (
        ("drawer_open", "grpo", "drawer_open is one in steps"),
        ("push_block", "reinforce", "no algo.preset reinforce"),
    ):
        with pytest.raises(UsageError, match=said):
            parse_run([task, "--algo.preset", preset], "run")
    with pytest.raises(UsageError, match="no algo.preset reinforce"):
        override(recipe("number_line"), {"algo.preset": "reinforce"})


@pytest.mark.parametrize(
    ("task", "algorithm"), [("drawer_open", "sac"), ("ez_points", "ppo"), ("libero_object/0", "grpo")]
)
def test_a_config_from_before_kinds_is_still_read(task, algorithm):
    config = recipe(task)
    text = config_text(config).replace(
        f"kind: {config.kind.name}\nalgorithm: {config.algorithm}\n", f"algorithm: {algorithm}\n"
    )
    text = text.replace("  preset: ppo\n", "").replace("  preset: grpo\n", "").replace("start_jitter_m", "moved")
    every = "env:\n  rules: mended\n  deals: any\n  robot: hidden\n  moved: 0.0\n  look: auto\n  view_px: 256\n"
    own = {line.split(":")[0] for line in text.splitlines()[text.splitlines().index("env:") + 1 :]}
    extra = "".join(f"{line}\n" for line in every.splitlines() if line.split(":")[0] not in own)
    assert read_config_text(text.replace("env:\n", extra)) == config


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("drawer_open", {"image_px": "picture_px"}),
        ("push_block", {"max_kl": "largest_kl", "min_auc": "least_auc", "continue_after_success": "plays_on"}),
        ("libero_object/0", {"render_style": "look", "start_jitter_m": "moved"}),
        ("number_line", {"max_invalid_share": "most_unreadable", "shrinkage": "is_shrunk", "strict": "mended"}),
        ("number_line", {"head: text": "acts: text"}),
        ("pick_place_can", {"head: actions": "acts: head"}),
    ],
)
def test_a_config_with_names_of_before_is_read(task, names):
    config = recipe(task)
    text = config_text(config)
    for now, before in names.items():
        assert now in text
        text = text.replace(now, before)
    assert read_config_text(text) == config
