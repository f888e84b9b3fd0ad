"""The tasks of one's own that the docs show: each keeps its promises, is short, and is what the docs print."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlvlm.core.errors import UsageError
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.registry import make_env
from rlvlm.reports.check_task import check_task
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import flat

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = ("catch_ball:TASK", "filmed_ball:TASK", "press_button:TASK", "reach_arm:TASK", "slide_ball:TASK")
FOUR = (
    pytest.param(f"gym:four_envs:{name}-v0", marks=pytest.mark.slow) for name in ("Puck", "Reach", "Push", "Balance")
)


@pytest.mark.parametrize("task", [*TASKS, *FOUR])
def test_an_example_keeps_every_promise(task, tmp_path):
    assert check_task(task, tmp_path / "sheet.png", 2, 0) == 0
    assert (tmp_path / "sheet.png").stat().st_size > 1_000


@pytest.mark.parametrize(
    ("name", "page", "max_lines"),
    [
        ("catch_ball", "chunk_envs.md", 90),
        ("own_judge", "judges.md", 60),
        ("own_policy", "own_policy.md", 110),
        ("own_turn_policy", "own_turn_policy.md", 80),
        ("filmed_ball", "chunk_envs.md", 50),
        ("reach_arm", "mujoco_tasks.md", 60),
        ("slide_ball", "tasks.md", 60),
    ],
)
def test_it_stays_short_and_is_what_the_docs_show(name, page, max_lines):
    whole = (EXAMPLES / f"{name}.py").read_text()
    assert whole in (EXAMPLES.parent / "docs" / page).read_text()
    assert len([line for line in whole.splitlines() if line.strip()]) <= max_lines


@pytest.mark.slow
def test_the_algorithms_in_one_file_learn_by_themselves(monkeypatch):
    from examples import grpo_in_one_file, sac_in_one_file

    success = grpo_in_one_file.main(updates=80, groups=6, size=5)
    assert np.mean(success[-15:]) > 2 * np.mean(success[:15])
    returns = sac_in_one_file.main(steps=1_500)
    assert np.mean(returns[-5:]) > np.mean(returns[:5]) + 5


def test_recipes_are_their_own_or_those_of_their_kind():
    config = recipe("press_button:TASK")
    assert config.kind.name == "turns" and config.env.episode_steps == 4
    assert config.smoke().steps == 256
    config = recipe("slide_ball:TASK")
    assert (config.task, config.steps, config.env.episode_steps) == ("slide_ball:TASK", 5_000, 50)
    assert make_env(config.task, config.env, 0).goal == "put the red ball into the green ring"


def test_a_tip_that_is_led_to_the_ball_wins():
    env = make_env("reach_arm:TASK", StepEnvConfig(episode_steps=50), 0)
    obs, info = env.reset(seed=0)
    assert info["progress"] == pytest.approx(1 - np.hypot(1 - 0.7 * np.cos(2), 0.7 * np.sin(2)) / 1.7, abs=1e-4)
    bend = 2 * np.arccos(0.7)  # of an arm of two links of 0.5 m that ends 0.7 m away
    target = np.array([2.0 - bend / 2, bend])
    progress = []
    for _ in range(50):
        torque = 8 * (target - obs[:2]) - 3 * obs[2:4]
        obs, reward, _, _, info = env.step(np.clip(torque / [2, 1], -1, 1).astype(np.float32))
        progress.append(info["progress"])
    assert info["success"] and reward == pytest.approx((info["progress"] - 1) * 1.7, abs=1e-6)
    assert progress[-1] > 0.95 > progress[0]


def test_wind_carries_the_balls_and_the_script_meets_them():
    config = recipe("catch_ball:TASK").env
    env = make_env("catch_ball:TASK", replace(config, wind=0.5), 0)
    before = env.reset(options={"state_id": 3})[0].snapshots[0]
    after = env.step(np.zeros((4, 2), np.float32))[0].snapshots[0]
    # four steps at half of the hand's 0.1 to the right, both balls and not the hand
    np.testing.assert_allclose(after - before, [0, 0, 0.2, 0, 0.2, 0, 0], atol=1e-6)
    rng, is_over, info = np.random.default_rng(0), False, {}
    while not is_over:
        _, _, terminated, truncated, info = env.step(env.scripted_chunk(0.0, rng))
        is_over = terminated or truncated
    assert info["success"] and terminated


def test_a_setting_of_its_own_is_an_option_like_any_other(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse_run(["catch_ball:TASK", "--help"], "rlvlm run")
    said = capsys.readouterr().out
    assert "--env.wind FLOAT" in said and "--env.continue-after-success" not in said, (
        "its own is among those that are shown"
    )
    config = parse_run(["catch_ball:TASK", "--env.wind", "0.2"], "rlvlm run").config
    assert flat(config)["env.wind"] == 0.2 and make_env(config.task, config.env, 0).config.wind == 0.2
    wrong = {"--env.wnd 0.2": "--env.wind FLOAT", "--env.wind 2": r"env\.wind must be in \[-0.5, 0.5\], got 2"}
    for words, answer in wrong.items():
        with pytest.raises(UsageError, match=answer):
            parse_run(["catch_ball:TASK", *words.split()], "rlvlm run")
