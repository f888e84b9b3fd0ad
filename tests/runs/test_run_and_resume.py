"""Whole runs in processes of their own: real Ray, the real algorithm, an env that costs microseconds."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tiny_run import WORDS, assert_same_run, table

from rlvlm.algorithms.checkpoint import load_policy_file

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TESTS = Path(__file__).parents[1]
FILES = {
    "config.yaml",
    "command.txt",
    "environment.json",
    "eval.csv",
    "vlm_query_log.csv",
    "metrics.jsonl",
    "tensorboard",
    "checkpoints",
    "plots",
    "videos",
    "judge_panel.html",
    "summary.json",
    "README.md",
}


def start(*words: str, home: Path | None = None) -> subprocess.Popen[str]:
    environment = os.environ | {"MUJOCO_GL": "egl"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])
    if home is not None:
        environment |= {"HOME": str(home), "TMPDIR": "/tmp"}
        environment.pop("RAY_AUTH_MODE", None)
    command = [sys.executable, "-m", "rlvlm.cli", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=500)
    return child.returncode, out, err


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An uninterrupted run, and what it said."""
    out = tmp_path_factory.mktemp("whole") / "run"
    home = tmp_path_factory.mktemp("home")
    code, said, err = finish(start("run", *WORDS, "--out", str(out), home=home))
    assert (code, err) == (0, "")
    assert {file.name for file in home.iterdir()} <= {".cache", ".config"}  # the fonts of the plots, nothing of Ray
    return out, said


def test_a_run_leaves_its_folder_and_says_little(whole: tuple[Path, str]) -> None:
    run, said = whole
    assert FILES <= {file.name for file in run.iterdir()}
    assert len(said.splitlines()) <= 40 and "\x1b" not in said
    assert not [line for line in said.splitlines() if "WARN" in line.upper() or "ray::" in line]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["exit_reason"] == "done" and summary["env_steps"] == 400
    assert summary["queries"] == len(table(run / "vlm_query_log.csv")) > 30
    assert 100 < summary["peak_rss_mb"] < 4_000
    assert sorted(file.name for file in (run / "videos").iterdir()) == [
        "step_00000400_episode_1.mp4",
        "step_00000400_episode_2.mp4",
    ]


def wait_for_rows(run: Path, count: int, child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise AssertionError(f"ended early: {child.communicate()}")
        if (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) >= count:
            return
        time.sleep(0.01)
    raise AssertionError("the run makes no progress")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])  # the moment
def test_after_a_kill_a_run_goes_on_as_if_nothing_had_been(whole: tuple[Path, str], tmp_path: Path, seed: int) -> None:
    moment = random.Random(seed)
    run = tmp_path / "run"
    child = start("run", *WORDS, "--out", str(run))
    wait_for_rows(run, moment.randint(2, 6), child)
    time.sleep(0.2 * moment.random())
    processes = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.communicate()
    _, alive = psutil.wait_procs(processes, timeout=45)
    assert not alive  # nothing of ours outlives the run
    code, said, err = finish(start("resume", str(run / "eval.csv")))
    assert (code, err) == (0, "")
    assert_same_run(run, whole[0])


def test_a_signal_saves_and_the_run_goes_on(whole: tuple[Path, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = start("run", *WORDS, "--out", str(run))
    wait_for_rows(run, 3, child)
    child.send_signal(signal.SIGTERM)
    code, said, err = finish(child)
    assert (code, err) == (75, "")
    assert f"rlvlm resume {run}" in said
    summary = json.loads((run / "summary.json").read_text())
    assert summary["exit_reason"] == "SIGTERM" and 0 < summary["env_steps"] < 400
    assert (run / "README.md").exists() and (run / "plots" / "learning_curve.png").exists()
    code, said, err = finish(start("resume", str(run / "checkpoints" / "last")))
    assert (code, err) == (0, "")
    assert_same_run(run, whole[0])
    assert json.loads((run / "summary.json").read_text())["wall_s"] > summary["wall_s"]


def test_a_run_goes_on_with_what_it_was_begun_with(whole: tuple[Path, str], tmp_path: Path) -> None:
    run = shutil.copytree(whole[0], tmp_path / "run", symlinks=True)
    begun = (run / "config.yaml").read_text().replace("steps: 400", "steps: 420", 1)
    (run / "config.yaml").write_text(begun.replace("teacher: oracle", "teacher: random"))
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "run.log"}
    code, _, err = finish(start("resume", str(run)))
    told = " ".join(err.replace("│", " ").split())
    assert code == 2 and "reward.teacher is 'random', before 'oracle'" in told and "steps is" not in told
    assert before == {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "run.log"}
    (run / "config.yaml").write_text(re.sub("actor_lr: .*", "actor_lr: 0.0001", begun))
    code, said, err = finish(start("resume", str(run)))
    change = "from step 400 on algo.actor_lr is 0.0001, before 0.0003"
    assert (code, err) == (0, "") and change in said
    assert f"- changed on the way: {change}" in (run / "README.md").read_text()
    assert change in json.loads((run / "checkpoints" / "last" / "run.json").read_text())["changes"]


def test_a_policy_can_be_played_from_its_folder(whole: tuple[Path, str]) -> None:
    run, _ = whole
    code, said, err = finish(start("eval", str(run), "--episodes", "2", "--video"))
    assert (code, err) == (0, "")
    result = json.loads((run / "evaluation.json").read_text())
    best = max(table(run / "eval.csv"), key=lambda row: (float(row["success_rate"]), float(row["episode_return"])))
    assert result["step"] == int(best["step"]) and len(result["each"]) == 2
    assert result["episode_return"] == pytest.approx(float(best["episode_return"]), rel=1e-4)
    assert "success" in said and said.count(".mp4") == 2


def test_a_number_that_is_none_ends_the_run_with_what_was_met_and_good_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [
        "odd_env:ODD",
        *WORDS[1:],
        "--out",
        str(run),
        "--reward.source",
        "environment",
        "--reward.teacher",
        "judge",
        "--env.num-envs",
        "1",
    ]
    code, _, err = finish(start("run", *words))
    assert code == 4
    told = re.sub(r"[│\s]", "", err)  # the words of a box, whose lines break where they must
    assert "1of1rewardsarenotfinite" in told and str(run / "numerics") in told
    evidence = json.loads((run / "numerics" / "error.json").read_text())
    assert evidence["task"] == "odd_env:ODD" and evidence["seed"] == 2
    with np.load(run / "numerics" / "found.npz") as found:
        assert np.isnan(found["rewards"]).all() and found["observations"].shape == (1, 4)
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    assert json.loads((newest / "run.json").read_text())["env_steps"] == 120
    assert all(torch.isfinite(value).all() for value in load_policy_file(newest / "algorithm").weights.values())
    assert json.loads((run / "summary.json").read_text())["exit_reason"] == "NumericsError"


def test_a_judge_that_cannot_load_leaves_no_folder(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "of_nobody"}')
    (model / "model.safetensors").write_bytes(b"")
    out = tmp_path / "runs" / "run"
    words = ["--reward.teacher", "judge", "--judge.backend", "transformers", "--judge.model", str(model)]
    code, _, err = finish(start("run", *WORDS, *words, "--out", str(out)))
    assert code == 5
    assert "fix:" in err and "Traceback" not in err
    assert not out.parent.exists()


def test_a_served_judge_answers_and_is_seen(tiny_vlms: dict[str, Path], tmp_path: Path) -> None:
    words = ["--reward.teacher", "judge", "--judge.backend", "transformers"]
    words += ["--judge.model", str(tiny_vlms["qwen3_vl"])]
    code, _, err = finish(start("run", *WORDS, *words, "--steps", "160", "--out", str(tmp_path / "run")))
    assert (code, err) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["queries"] > 0 and summary["labels"]["failed"] == 0
    page = (tmp_path / "run" / "judge_panel.html").read_text()
    assert "Which is nearer to the goal?" in page and "data:image/png" in page
