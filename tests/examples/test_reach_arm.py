from pathlib import Path

import numpy as np
import pytest

from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import make_env
from rlvlm.reports.task.check import check_task

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_the_example_of_the_docs_keeps_every_promise(tmp_path: Path) -> None:
    assert check_task("reach_arm:TASK", tmp_path / "sheet.png", num_episodes=2, seed=0) == 0
    assert (tmp_path / "sheet.png").stat().st_size > 1_000


def test_a_tip_that_is_led_to_the_ball_wins() -> None:
    env = make_env("reach_arm:TASK", EnvConfig(episode_steps=50), 0)
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


def test_it_stays_short_and_is_what_the_docs_show() -> None:
    whole = (EXAMPLES / "reach_arm.py").read_text()
    assert whole in (EXAMPLES.parent / "docs" / "tasks.md").read_text()
    assert len([line for line in whole.splitlines() if line.strip()]) <= 60
