import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.registry import task_names
from rlvlm.plugins.softgym.env import SoftGymEnv
from rlvlm.testing import check_step_env

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(STAND_IN)


def make(**fields: Any) -> SoftGymEnv:
    return SoftGymEnv(StepEnvConfig(**({"episode_steps": 20} | fields)), 0, "RopeFlatten")


def test_a_step_by_hand():
    env = make()
    obs, info = env.reset()
    np.testing.assert_array_equal(obs, np.zeros(9))
    assert env.snapshot_size == 1 + 4 * 4 + 14 and info["progress"] == 0.0
    # full speed is 2 cm a step, and half of the last step's goes on: 2, then 3 cm
    obs, reward, terminated, truncated, info = env.step(np.array([1, 0], np.float32))
    assert obs[0] == pytest.approx(0.02) and reward == pytest.approx(0.02) and not terminated and not truncated
    obs, _, _, _, info = env.step(np.array([1, 0], np.float32))
    assert obs[0] == pytest.approx(0.05) and info["progress"] == pytest.approx(0.5) and not info["success"]
    info = [env.step(np.array([1, 0], np.float32)) for _ in range(3)][-1][4]
    assert info["progress"] == 1.0 and info["success"]


@pytest.mark.parametrize("start", ["fixed", "random"])
def test_it_keeps_the_contract(start):
    different = np.zeros((3, 31), np.float32)
    different[:, 1] = 0.0, 0.3, 0.6
    check_step_env(make(start=start), make(start=start), different)


def test_envs_that_share_the_simulator_do_not_disturb_each_other():
    env, right = make(), np.array([1, 0], np.float32)
    alone = [env.step(right)[0] for _ in range(4)]
    one, other = make(), make(start="random")
    for expected in alone:
        np.testing.assert_array_equal(one.step(right)[0], expected)
        other.step(-right)
        other.draw(other.snapshot()[None], 16)


def test_tasks_are_offered_where_softgym_can_be_imported():
    assert not any(name.startswith("softgym/") for name in task_names())
    path = os.pathsep.join([str(STAND_IN), *sys.path])
    code = "from rlvlm.envs.registry import *; print(task_goal('softgym/RopeFlatten'), '|', *task_names())"
    child = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert child.stdout.startswith("straighten the rope |") and "softgym/ClothFold" in child.stdout
