"""A judge's score as a processor step of LeRobot, in pipelines of LeRobot's own."""

from pathlib import Path

import pytest
from frameworks import needs, run, snippet

pytestmark = [
    needs("lerobot"),
    pytest.mark.slow,
]


def test_the_page_puts_a_judge_in_place_of_the_classifier(tmp_path: Path) -> None:
    before = """
import types
import numpy as np
import rlvlm
from lerobot.processor import (
    AddBatchDimensionProcessorStep, DataProcessorPipeline, DeviceProcessorStep, VanillaObservationProcessorStep
)
from lerobot.processor.converters import create_transition, identity_transition
steps = [VanillaObservationProcessorStep(), AddBatchDimensionProcessorStep(), DeviceProcessorStep(device="cpu")]
env_processor = DataProcessorPipeline(steps=steps, to_transition=identity_transition, to_output=identity_transition)
"""
    after = """
def seen(level, done=False, cameras=("front",), reward=0.25):
    pixels = {camera: np.full((8, 8, 3), level, np.uint8) for camera in cameras}
    transition = create_transition(observation={"pixels": pixels}, action=None, reward=reward, done=done)
    new = env_processor(transition)
    reward, done, info = (new[key] for key in ("reward", "done", "info"))
    return float(reward), bool(done), {key: value and round(float(value), 2) for key, value in info.items()}

env_processor.reset()
print([seen(255) for _ in range(4)] == [(0.25, False, {})] * 4)
print(seen(255), seen(255, done=True), seen(51, done=True))
print(env_processor.steps[-3].get_config()["every"])
try:
    seen(0, done=True, cameras=("front", "wrist"))
except rlvlm.core.errors.UsageError as error:
    print(error)
silent = lambda clips: rlvlm.judges.client.Scores([None], ["failed"])  # what a missing answer is with None
step._rewards = types.SimpleNamespace(ask=silent)
print(seen(0, done=True))
"""
    said = run("lerobot", before + snippet("LeRobot") + after, tmp_path).splitlines()
    success = "(1.0, True, {'env_reward': 0.25, 'judge_score': 1.0})"
    assert said[:2] == ["True", f"{success} {success} (0.25, True, {{'env_reward': 0.25, 'judge_score': 0.2}})"]
    assert said[2] == "5" and "the judge needs one camera, got no name; there are" in said[3]
    assert said[4] == "(0.25, True, {'env_reward': 0.25, 'judge_score': None})"


def test_a_judge_rewards_gym_hils_simulated_arm_through_gym_manipulator(tmp_path: Path) -> None:
    before = """
import os
os.environ.setdefault("MUJOCO_GL", "egl")
import gym_hil, gymnasium as gym, torch
from lerobot.envs import HILSerlRobotEnvConfig
from lerobot.processor import create_transition
from lerobot.rl.gym_manipulator import make_processors, step_env_and_process_transition
env = gym.make("gym_hil/PandaPickCubeBase-v0", image_obs=True, render_mode="rgb_array")
env_processor, action_processor = make_processors(env, None, HILSerlRobotEnvConfig(name="gym_hil"))
"""
    after = """
step.camera = "observation.images.front"
observation, info = env.reset(seed=0)
env_processor.reset()
transition = env_processor(create_transition(observation=observation, info=info))
for t in range(2, 11):
    move = torch.zeros(env.action_space.shape)
    transition = step_env_and_process_transition(env, transition, move, env_processor, action_processor)
    bright = float(transition["observation"]["observation.images.front"].mean())
    told = transition["info"].get("judge_score")
    print(t, told is not None, told is None or abs(told - bright) < 0.01, float(transition["reward"]))
    step.success_threshold = bright / 2 if t > 5 else 1.0
print(bool(transition["done"]), transition["info"]["env_reward"])
"""
    said = run("lerobot", before + snippet("LeRobot") + after, tmp_path).splitlines()
    # every fifth transition is asked about, the first of them that of the reset; the tenth passes the threshold
    assert said[:-1] == [f"{t} {t % 5 == 0} True {float(t == 10)}" for t in range(2, 11)] and said[-1] == "True 0.0"
