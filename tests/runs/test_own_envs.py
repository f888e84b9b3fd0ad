"""What the general recipe learns on four small envs of one's own, from perfect labels and from the true reward."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlvlm.rewards.config import StepRewardConfig
from rlvlm.runs.settings.recipes import recipe

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCES = {"true": ("--reward.source", "environment"), "labels": ("--reward.teacher", "oracle")}


def test_a_users_own_task_learns_its_reward_from_states(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for task, steps in (("gym:four_envs:Push-v0", 60), ("reach_arm:TASK", 50)):
        config = recipe(task)
        assert isinstance(config.reward, StepRewardConfig)
        assert (config.reward.model, config.env.start, config.env.episode_steps) == ("state", "random", steps)
        assert config.kind.max_queries(config) == 7_200, "18 sessions of 400"
    assert recipe("drawer_open").reward == StepRewardConfig(), "ours are as the paper has them"


@pytest.mark.full  # two runs of up to 15 minutes each on two cores
@pytest.mark.ray
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["Puck", "Reach", "Push", "Balance"])
def test_labels_end_where_the_true_reward_does(name, seed, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
    success = {}
    for source, options in SOURCES.items():
        run = [sys.executable, "-m", "rlvlm.run", f"gym:four_envs:{name}-v0", "--goal", "do it", *options]
        subprocess.run([*run, "--seed", str(seed), "--out", str(tmp_path / source)], check=True)
        success[source] = json.loads((tmp_path / source / "summary.json").read_text())["success"]
    assert success["labels"] >= success["true"] - 0.1, success
