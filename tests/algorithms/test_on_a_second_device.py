"""Learners, replays, reward models and evaluations on a device that is not the CPU, where a machine has no other.

The device is compiled for the test (`tests/second_device`). Like a GPU it refuses whatever mixes it with the CPU.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.second_device import build

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("c++") is None, reason="the second device is compiled, and there is no c++ here"),
]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "names",
    [
        ("sac, images", "grpo"),
        pytest.param(("sac, resnet18", "sac, states, autograd", "sac, the judge's own word"), marks=pytest.mark.full),
    ],
    ids=["usual", "rare"],
)
@pytest.mark.parametrize(
    "device",
    [
        "compiled",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")],
        ),
    ],
)
def test_everything_that_learns_stays_on_its_device(ray_address, device, names, tmp_path):
    library = "cuda" if device == "cuda" else str(build(tmp_path))
    command = [sys.executable, "-m", "tests.second_device.checks", library, str(tmp_path), *names]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"PYTHONPATH": paths, "RAY_ADDRESS": ray_address}
    child = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=500)
    assert child.returncode == 0, child.stderr[-2_000:]
    outcomes = json.loads(child.stdout.splitlines()[-1])
    assert outcomes == dict.fromkeys(names, "fine"), "\n".join(outcomes.values())
