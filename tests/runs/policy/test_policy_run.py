"""Whole runs of the pocket policy in processes of their own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import table

pytestmark = [pytest.mark.ray, pytest.mark.slow]

WORDS = (
    "number_line", "--smoke", "--steps", "512", "--eval.every-steps", "256", "--eval.episodes", "2",
    "--track.checkpoint-every-steps", "256", "--sft.eval-episodes", "2",
)  # fmt: skip


def start(*words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "rlvlm.cli", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


def finish(child: "subprocess.Popen[str]") -> str:
    out, err = child.communicate(timeout=500)
    assert (child.returncode, err) == (0, ""), (out, err)
    return out


def test_a_run_is_killed_goes_on_to_the_bit_and_is_played(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    said = finish(start("run", *WORDS, "--out", str(whole)))
    assert "supervised start alone" in said
    child = start("run", *WORDS, "--out", str(broken))
    while not list(broken.glob("checkpoints/step_*/run.json")):
        assert child.poll() is None, child.communicate()
        time.sleep(0.05)
    child.kill()
    child.communicate()
    finish(start("resume", str(broken)))
    weights = [(run / "checkpoints/last/algorithm/policy.safetensors").read_bytes() for run in (whole, broken)]
    assert weights[0] == weights[1]
    assert table(whole / "eval.csv", "wall_s") == table(broken / "eval.csv", "wall_s")

    rows = [json.loads(line) for line in open(whole / "metrics.jsonl")]
    assert rows[-1]["ppo/first_ratio_error"] <= 1e-4
    assert rows[-1]["eval/sampled_strict_success_low"] <= rows[-1]["eval/sampled_strict_success"]
    page = (whole / "episodes.html").read_text()
    assert "current number" in page and "data:image" in page
    assert "success" in finish(start("eval", str(whole), "--episodes", "3"))
    compared = json.loads((whole / "evaluation.json").read_text())["compared"]
    names = ["policy, greedy", "policy, sampled", "before PPO, greedy", "before PPO, sampled", "scripted expert"]
    assert list(compared) == [*names, "random actions"]
    assert compared["scripted expert"]["success"] == 1 and compared["scripted expert"]["success_low"] < 0.5
    assert all(one["episodes"] == 3 for one in compared.values())
