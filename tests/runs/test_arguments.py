from pathlib import Path

import pytest
from tiny_run import box_words

from rlvlm.cli import main
from rlvlm.core.errors import UsageError
from rlvlm.core.guests import guests
from rlvlm.envs.registry import make_env
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.settings.recipes import recipe


def test_dotted_words_override_the_recipe():
    words = (
        "drawer_open --judge.model Qwen/Qwen3-VL-8B-Instruct --judge.backend transformers "
        "--judge.quantization nf4 --env.start random --reward.model state --reward.teacher oracle "
        "--algo.batch-size 64 --algo.hidden 32 16 --algo.actor_lr 1e-3 --seed 7 --out here"
    ).split()
    config = parse_run(words, "rlvlm run").config
    assert (config.judge.backend, config.judge.quantization, config.env.start) == ("transformers", "nf4", "random")
    assert (config.reward.model, config.reward.teacher, config.reward.source) == ("state", "oracle", "preference")
    assert (config.algo.batch_size, config.algo.hidden, config.algo.actor_lr) == (64, (32, 16), 1e-3)
    assert (config.seed, config.out, config.task) == (7, Path("here"), "drawer_open")
    assert config.steps == recipe("drawer_open").steps


def test_smoke_is_a_start_that_overrides_still_change():
    assert parse_run(["drawer_open", "--smoke"], "rlvlm run").config == recipe("drawer_open").smoke()
    config = parse_run(["drawer_open", "--steps", "777", "--smoke"], "rlvlm run").config
    assert config.steps == 777 and config.eval == recipe("drawer_open").smoke().eval


def test_help_without_a_task_lists_tasks_and_options(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse_run(["--help"], "rlvlm run")
    text = capsys.readouterr().out
    assert "rlvlm run TASK" in text and "drawer_open" in text and "--reward.teacher" in text


@pytest.mark.parametrize(
    ("task", "others"),
    [("number_line", ["feedback", "reward-model"]), pytest.param("drawer_open", ["engine"], marks=pytest.mark.slow)],
)
def test_help_has_what_most_runs_need_and_help_all_the_rest_but_no_sections_of_other_algorithms(
    task, others, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    texts = []
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            parse_run([task, option], "rlvlm run")
        texts.append(capsys.readouterr().out)
    short, whole = texts
    assert len(short.splitlines()) < 134 and f"rlvlm run {task} --help-all" in " ".join(short.split())
    assert "--algo." not in short.replace("--algo.preset", "") and "--algo." in whole
    for text in texts:
        assert ("--policy.model" in text) == (task == "number_line")
        assert not [name for name in others if f"--{name}" in text], "{None} is no choice"
        for option in (
            *("steps", "seed", "out", "reward.source", "eval.episodes", "judge.backend", "judge.model"),
            *("judge.prompt", "judge.api.base-url", "serve.num-gpus"),
        ):
            assert f"--{option} " in text, option


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("push_block --judge.model scorer2", "reward.source success"),
        ("drawer_open --judge.quantization nf4", "the pocket judge"),
        ("drawer_open --reward.source environment --serve.num-gpus 1", "reward.source environment"),
        ("drawer_open --reward.source environment --judge.model M", "reward.source environment"),
        ("push_block --policy.model checkpoint --policy.pocket.dilated 3", "policy.model"),
        ("number_line --sft.start-from taught --sft.updates 3", "sft.start_from"),
    ],
)
def test_a_setting_that_another_leaves_without_effect_is_refused(words, why):
    option = words.split()[-2]
    with pytest.raises(UsageError, match=f"{option} has no effect with {why}"):
        parse_run(words.split(), "rlvlm run")
    config = parse_run("libero_object/0 --sft.demonstrations shown --smoke".split(), "rlvlm run").config
    assert config.judge.model == "video", "what a recipe has without effect is no error"


def test_whole_numbers_are_read_as_people_write_them():
    words = "drawer_open --steps 2.5k --seed=1e1 --feedback.max-queries 1e3 --out 2k --algo.actor-lr 1e-3"
    config = parse_run(words.split(), "rlvlm run").config
    assert config.feedback is not None
    assert (config.steps, config.seed, config.feedback.max_queries, config.out) == (2_500, 10, 1_000, Path("2k"))
    with pytest.raises(UsageError, match="1.5e0"):
        parse_run("drawer_open --steps 1.5e0".split(), "rlvlm run")


@pytest.mark.parametrize("command", [*["data"] * ("exchange" in guests()), "labels"])
def test_help_of_a_command_with_forms_names_them(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for form in ("show", "export", "import"):
        assert f"  rlvlm {command} {form} " in text


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("run drawer_open --gpus 1", "--serve.num-gpus"),
        ("run drawer_open --steps abc", "e.g. --steps 20000, 20k or 2e4"),
        ("run drawer_open --steps=1e4.5", "e.g. --steps 20000, 20k or 2e4"),
        ("run drawer_open --config my.yaml", "rlvlm sweep FILE"),
        ("run gym:CartPole-v1 --env.size 128", "--env.make size VALUE"),
        ("run CartPole-v1", "did you mean cartpole, or Gymnasium's gym:CartPole-v1?"),
        ("sweep seven_task", "did you mean rlvlm sweep seven_tasks?"),
        ("data show .", "did you mean kept/pushes?"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(line, fix, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept/pushes").mkdir(parents=True)
    (tmp_path / "kept/pushes/demonstrations.json").touch()
    assert main(line.split()) == 2
    assert fix in box_words(capsys.readouterr().err)


def test_keywords_of_gymnasium_make_can_be_given():
    words = "gym:Pendulum-v1 --env.make g 5.5".split()
    config = parse_run(words, "rlvlm run").config
    env = make_env(config.task, config.env, 0)
    assert env.inner.unwrapped.g == 5.5
    env.close()
    with pytest.raises(UsageError, match="named by a text such as 'drawer_open', got 3"):
        recipe(3)  # pyright: ignore[reportArgumentType] - which is the mistake
