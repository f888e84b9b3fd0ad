"""A judge's score as a processor step of LeRobot, in a pipeline of LeRobot's own."""

from pathlib import Path

import pytest
from frameworks import needs, run, snippet


@needs("lerobot312", "PYTHON=python3.12 environments/lerobot.sh .envs/lerobot312")
@pytest.mark.slow
def test_the_page_puts_a_judge_in_place_of_the_classifier(tmp_path: Path) -> None:
    before = """
import numpy as np
import torch
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
step._rewards.judge.score = lambda *_: (_ for _ in ()).throw(rlvlm.core.errors.JudgeUnavailable("it was killed"))
try:
    seen(0, done=True)
except rlvlm.core.errors.JudgeUnavailable as error:
    print(error)
object.__setattr__(step._rewards, "without_answer", "none")
print(seen(0, done=True))
"""
    said = run("lerobot312", before + snippet("LeRobot") + after, tmp_path).splitlines()
    assert said[0] == "True"
    success = "(1.0, True, {'env_reward': 0.25, 'judge_score': 1.0})"
    assert said[1] == f"{success} {success} (0.25, True, {{'env_reward': 0.25, 'judge_score': 0.2}})"
    assert said[2] == "5" and "the judge needs one camera, got no name; there are" in said[3]
    assert said[4] == "it was killed" and said[-1] == "(0.25, True, {'env_reward': 0.25, 'judge_score': None})"
