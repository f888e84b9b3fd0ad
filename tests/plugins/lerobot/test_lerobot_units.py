"""Numbers of a checkpoint and those of the env it acts in: grippers in the units of others, and numbers that never
change.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import needs, python_of
from plugins.lerobot.tiny_lerobot import shrink_pi0, write_lerobot
from safetensors.numpy import load_file, save_file

from rlvlm.core.errors import ModelUnavailable, UsageError
from rlvlm.core.grippers import GripperUnits
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.libero.env import to_robosuite
from rlvlm.envs.registry import make_env, task_env
from rlvlm.plugins.lerobot.checkpoint import Statistics, read_checkpoint
from rlvlm.plugins.lerobot.config import LeRobotConfig
from rlvlm.plugins.lerobot.loading import fitted
from rlvlm.plugins.lerobot.policy import LeRobotPolicy
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.config import VLAConfig
from tests.recorded_data import PX, trajectory
from tests.recorded_data import write_lerobot as write_data

pytest.importorskip("rlvlm.plugins.exchange", reason="data sets are imported by another guest")
from tests.plugins.exchange.test_trajectories import TwoEyes, take  # noqa: E402

GRIPPER = 6


def settle(folder: Path, **statistics: float | None) -> Path:
    """Writes the statistics of the checkpoint's gripper, by name, into its files; None takes one away."""
    for file in folder.glob("*normalizer*.safetensors"):
        content = load_file(file)
        for name, value in statistics.items():
            if value is None:
                content.pop(f"action.{name}", None)
                continue
            content.setdefault(f"action.{name}", np.zeros(7, np.float32))[GRIPPER] = value
        save_file(content, file)
    return folder


def policy_of(folder: Path, env: Any, gripper: GripperUnits | None) -> LeRobotPolicy:
    wants = LeRobotConfig(image_px=PX, gripper=gripper)
    policy = build_policy(VLAConfig(model=str(folder), head="flow", lerobot=wants), env)
    assert isinstance(policy, LeRobotPolicy)
    return policy


@pytest.mark.parametrize(
    ("kind", "statistics"), [("smolvla", {"mean": 0.2, "std": 0.9}), ("pi05", {"q01": -1.0, "q99": 1.0})]
)
def test_a_gripper_that_1_closes_is_played_learned_and_written_back_so(
    tmp_path: Path, kind: str, statistics: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LIBERO's units in LeRobot: -1 opens and 1 closes, as in robosuite. In our envs 1 is open and 0 is closed."""
    shrink_pi0(monkeypatch)
    env = TwoEyes(ChunkEnvConfig(episode_steps=32), seed=0)
    folder = write_lerobot(tmp_path / "checkpoint", env, kind, chunk_size=env.chunk_steps)
    settle(folder, min=-1.0, max=1.0, **statistics)
    policy = policy_of(folder, env, "minus_one_opens")
    first, second = statistics.values()
    centre, spread = (first, second) if kind == "smolvla" else (0.0, 1.0)
    # played: what the network says for LeRobot's -1 and 1 reaches robosuite as -1 and 1
    said = np.zeros((2, 7), np.float32)
    said[:, GRIPPER] = (np.array([-1.0, 1.0]) - centre) / spread
    played = policy.scales["action"].restored(said)
    np.testing.assert_allclose(played[:, GRIPPER], [1, 0], atol=1e-6)
    assert [to_robosuite(action)[GRIPPER] for action in played] == [-1, 1]
    # learned: a data set's -1 and 1 become the network's targets, as LeRobot's own normaliser makes them
    recorded = trajectory(16)
    write_data(tmp_path / "set", "v3.0", [recorded], "image")
    shown, _ = take(tmp_path / "set", "lerobot", tmp_path / "shown")
    [episode] = shown.episodes()
    targets = policy.scales["action"].normalised(episode.arrays["actions"].reshape(-1, 7))
    np.testing.assert_allclose(targets[:, GRIPPER], (recorded[0][:, GRIPPER] - centre) / spread, atol=1e-6)
    # written back: the checkpoint's own statistics, so that LeRobot reads the network's answer as before
    policy.export(tmp_path / "saved")
    assert read_checkpoint(tmp_path / "saved").action.first.tolist() == read_checkpoint(folder).action.first.tolist()
    np.testing.assert_array_equal(
        policy_of(tmp_path / "saved", env, "minus_one_opens").scales["action"].restored(said), played
    )
    assert policy.explored(env, 0.2)[GRIPPER]


@pytest.mark.slow
def test_fingers_of_libero_close_where_the_checkpoint_says_1(tmp_path: Path) -> None:
    env: Any = make_env("libero_object/0", task_env("libero_object/0"), 0)
    folder = write_lerobot(tmp_path / "checkpoint", env, chunk_size=env.chunk_steps)
    settle(folder, mean=0.0, std=1.0)
    policy, widths = policy_of(folder, env, "minus_one_opens"), []
    for said in (-1.0, 1.0):
        chunk = np.zeros((env.chunk_steps, 7), np.float32)
        chunk[:, GRIPPER] = said
        obs, _ = env.reset_to(0)
        obs = env.step(policy.scales["action"].restored(chunk))[0]
        widths.append(float(obs.proprio[0, 6] - obs.proprio[0, 7]))
    env.close()
    assert widths[0] > 0.07 and widths[1] < widths[0] - 0.03  # metres


@pytest.mark.parametrize(
    ("gripper", "statistics", "words"),
    [
        (
            None,
            {"mean": 0.0, "std": 1.0},
            "dimension 6 .* gripper, does not stay in .0, 1., and the env takes 1 for open",
        ),
        (None, {"mean": 0.5, "std": 0.5, "min": -1.0, "max": 1.0}, "does not stay in"),
        (None, {"mean": 50.0, "std": 30.0}, "does not stay in"),
        ("one_closes", {"mean": 0.0, "std": 1.0}, "does not stay in .0, 1., and its units are said to be one_closes"),
        ("minus_one_opens", {"mean": 0.5, "std": 0.5, "min": 0.0, "max": 1.0}, "never falls below 0, and its units"),
        (None, {"mean": 1.0, "std": 0.0}, "never moves"),
    ],
)
def test_a_gripper_of_unclear_units_is_refused(
    tmp_path: Path, gripper: GripperUnits | None, statistics: dict[str, float], words: str
) -> None:
    env = TwoEyes(ChunkEnvConfig(episode_steps=32), seed=0)
    folder = settle(write_lerobot(tmp_path / "checkpoint", env, chunk_size=8), **statistics)
    with pytest.raises(ModelUnavailable, match=words) as caught:
        fitted(folder, LeRobotConfig(gripper=gripper), env)
    assert "--policy.lerobot.gripper" in caught.value.fix


@pytest.mark.parametrize(
    ("actions", "gripper", "words"),
    [
        ([0.0, 1.0], None, "where 1 may open or close it"),
        ([1.0, 1.0], None, "where 1 may open or close it"),
        ([0.0, 1.0], "minus_one_opens", "the gripper's actions are all in"),
        ([-1.0, 1.0], "one_opens", "a gripper outside of"),
    ],
)
def test_data_whose_gripper_contradicts_its_units_are_refused(
    tmp_path: Path, actions: list[float], gripper: GripperUnits | None, words: str
) -> None:
    moves, *rest = trajectory(8)
    moves[:, GRIPPER] = np.resize(actions, 8)
    write_data(tmp_path / "set", "v3.0", [(moves, *rest)], "image")
    if words.startswith("a gripper"):  # left out one by one, and counted
        assert list(take(tmp_path / "set", "lerobot", tmp_path / "shown", gripper=gripper)[1]) == [f"{words} [0, 1]"]
        return
    with pytest.raises(UsageError, match=words) as caught:
        take(tmp_path / "set", "lerobot", tmp_path / "shown", gripper=gripper)
    assert "--cut.gripper" in caught.value.fix


CONSTANT = {
    "MEAN_STD": {"mean": [2.0, 1.0], "std": [0.0, 0.5]},
    "MIN_MAX": {"min": [2.0, 0.0], "max": [2.0, 4.0]},
    "QUANTILES": {"q01": [2.0, 0.0], "q99": [2.0, 4.0]},
    "QUANTILE10": {"q10": [2.0, 0.0], "q90": [2.0, 4.0]},
}
"""By mode: the statistics of two numbers, of which the first is always 2."""
_NORMALISE = """
import json, sys, torch
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.processor import NormalizerProcessorStep
from lerobot.processor.converters import create_transition
found = {}
for mode, stats in json.loads(sys.argv[1]).items():
    step = NormalizerProcessorStep(
        features={"observation.state": PolicyFeature(FeatureType.STATE, (2,))},
        norm_map={FeatureType.STATE: NormalizationMode(mode)}, stats={"observation.state": stats})
    made = step(create_transition(observation={"observation.state": torch.tensor([[2.0, 1.0]])}))
    found[mode] = made["observation"]["observation.state"].tolist()
print(json.dumps(found))
"""


def constants() -> dict[str, list[list[float]]]:
    """The two numbers 2 and 1, normalised here."""
    scales = {
        mode: Statistics(mode=mode, first=np.float32(a), second=np.float32(b)).scale
        for mode, (a, b) in ((mode, tuple(stats.values())) for mode, stats in CONSTANT.items())
    }
    return {mode: scale.normalised(np.float32([[2, 1]])).tolist() for mode, scale in scales.items()}


def test_a_number_that_never_changes_is_the_smallest_by_quantiles_and_the_mean_by_the_mean() -> None:
    assert constants() == {"MEAN_STD": [[0, 0]]} | dict.fromkeys(("MIN_MAX", "QUANTILES", "QUANTILE10"), [[-1, -0.5]])
    scale = Statistics(mode="QUANTILES", first=np.float32([2]), second=np.float32([2])).scale
    assert scale.restored(np.float32([[-1]])).tolist() == [[2]]


@needs("lerobot")
@pytest.mark.slow
def test_numbers_that_never_change_are_normalised_as_lerobot_does() -> None:
    asked = [python_of("lerobot"), "-c", _NORMALISE, json.dumps(CONSTANT)]
    printed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    theirs = json.loads(printed.splitlines()[-1])
    for mode, found in constants().items():
        np.testing.assert_allclose(found, theirs[mode], atol=1e-6)
