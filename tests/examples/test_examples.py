"""The tasks of one's own that the docs show: each keeps its promises, is short, and is what the docs print."""

from pathlib import Path

import numpy as np
import pytest

from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.registry import make_env
from rlvlm.reports.check_task import check_task
from rlvlm.runs.recipes import recipe

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = ("press_button:TASK", "reach_arm:TASK", "slide_ball:TASK")
FOUR = (
    pytest.param(f"gym:four_envs:{name}-v0", marks=pytest.mark.slow) for name in ("Puck", "Reach", "Push", "Balance")
)


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize("task", [*TASKS, *FOUR])
def test_an_example_keeps_every_promise(task: str, tmp_path: Path) -> None:
    assert check_task(task, tmp_path / "sheet.png", 2, 0) == 0
    assert (tmp_path / "sheet.png").stat().st_size > 1_000


@pytest.mark.parametrize(("name", "page"), [("reach_arm", "mujoco_tasks.md"), ("slide_ball", "tasks.md")])
def test_it_stays_short_and_is_what_the_docs_show(name: str, page: str) -> None:
    whole = (EXAMPLES / f"{name}.py").read_text()
    assert whole in (EXAMPLES.parent / "docs" / page).read_text()
    assert len([line for line in whole.splitlines() if line.strip()]) <= 60


def test_recipes_are_their_own_or_those_of_their_kind() -> None:
    config = recipe("press_button:TASK")
    assert config.kind == "turns" and config.env.episode_steps == 4
    assert config.smoke().steps == 256
    config = recipe("slide_ball:TASK")
    assert (config.task, config.steps, config.env.episode_steps) == ("slide_ball:TASK", 5_000, 50)
    assert make_env(config.task, config.env, 0).goal == "put the red ball into the green ring"


def test_a_tip_that_is_led_to_the_ball_wins() -> None:
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
