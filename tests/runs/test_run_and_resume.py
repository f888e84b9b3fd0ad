"""Whole runs in processes of their own: real Ray, the real algorithm, an env that costs microseconds."""

import json
import random
import re
import shutil
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tiny_run import WORDS, assert_same_run, box_words, finish, run_here, start, table

from rlvlm.algorithms.checkpoint import load_policy_file
from rlvlm.cli import main
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.runs import train
from rlvlm.serving import apps

pytestmark = [pytest.mark.ray, pytest.mark.slow]

FILES = set(
    "config.yaml command.txt environment.json eval.csv vlm_query_log.csv metrics.jsonl tensorboard checkpoints plots "
    "videos judge_panel.html summary.json README.md".split()
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, and what it said."""
    out = tmp_path_factory.mktemp("whole") / "run"
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_MODE", raising=False)
        said, err = finish(start("run", *WORDS, "--out", str(out), HOME=str(home), TMPDIR="/tmp"))
    assert not err
    assert {file.name for file in home.iterdir()} <= {".cache", ".config"}  # the fonts of the plots, nothing of Ray
    return out, said


def test_a_run_leaves_its_folder_says_little_and_can_be_played(whole, capfd):
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
    run_here("eval", str(run), "--episodes", "2", "--video")
    said = capfd.readouterr().out
    result = json.loads((run / "evaluation.json").read_text())
    best = max(table(run / "eval.csv"), key=lambda row: (float(row["success_rate"]), float(row["episode_return"])))
    assert result["step"] == int(best["step"]) and len(result["each"]) == 2
    assert result["episode_return"] == pytest.approx(float(best["episode_return"]), rel=1e-4)
    assert "success" in said and said.count(".mp4") == 2


def wait_for_rows(run: Path, count: int, child: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 400
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < count:
        assert child.poll() is None and time.monotonic() < deadline, child.communicate()
        time.sleep(0.01)


def test_a_run_that_is_killed_and_gone_on_with_ends_as_one_that_was_not(local_ray, whole, tmp_path):
    run = tmp_path / "run"
    child = start("run", *WORDS, "--out", str(run))
    wait_for_rows(run, 5, child)
    time.sleep(random.uniform(0, 0.2))  # at any moment, not only beside a checkpoint
    processes = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.communicate()
    _, alive = psutil.wait_procs(processes, timeout=45)
    assert not alive, "nothing of ours outlives the run"

    run_here("resume", str(run / "checkpoints" / "last"))
    assert_same_run(run, whole[0])


def test_a_resumed_run_keeps_its_settings(local_ray, whole, tmp_path, capfd):
    run = shutil.copytree(whole[0], tmp_path / "run", symlinks=True)
    begun = (run / "config.yaml").read_text().replace("steps: 400", "steps: 420", 1)
    (run / "config.yaml").write_text(begun.replace("teacher: oracle", "teacher: random"))
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "run.log"}
    assert main(["resume", str(run)]) == 2
    message = box_words(capfd.readouterr().err)
    assert "reward.teacher is 'random', before 'oracle'" in message and "steps is" not in message
    assert before == {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "run.log"}
    (run / "config.yaml").write_text(re.sub("actor_lr: .*", "actor_lr: 0.0001", begun))
    run_here("resume", str(run))
    change = "from step 400 on algo.actor_lr is 0.0001, before 0.0003"
    assert change in capfd.readouterr().out
    assert f"- changed during the run: {change}" in (run / "README.md").read_text()
    assert change in json.loads((run / "checkpoints" / "last" / "run.json").read_text())["changes"]


def test_a_run_goes_on_in_an_env_runner_to_which_ray_gives_read_only_arrays(local_ray, tmp_path):
    """One that begins with env runners is in `test_life_cycle`."""
    words = "drawer_open --reward.source environment --steps 60 --env.episode-steps 30 --env.num-envs 1 --algo.hidden 8"
    words += " --eval.episodes 1 --eval.every-steps 1000 --algo.seed-steps 20 --algo.batch-size 8 --algo.turn-steps 10"
    run_here("run", *words.split(), "--out", str(tmp_path))
    run_here("resume", str(tmp_path), "--steps", "90", "--algo.env-runners", "1")
    assert json.loads((tmp_path / "summary.json").read_text())["env_steps"] == 90


def test_a_nan_ends_the_run_with_evidence_and_good_checkpoints(local_ray, tmp_path, capfd):
    run = tmp_path / "run"
    words = [*WORDS[1:], "--reward.source", "environment", "--reward.teacher", "judge", "--env.num-envs", "1"]
    run_here("run", "odd_env:ODD", *words, "--out", str(run), code=4)
    message = re.sub(r"[│\s]", "", capfd.readouterr().err)  # the words of a box, whose lines break where they must
    assert "1of1rewardsarenotfinite" in message and str(run / "numerics") in message
    evidence = json.loads((run / "numerics" / "error.json").read_text())
    assert evidence["task"] == "odd_env:ODD" and evidence["seed"] == 2
    with np.load(run / "numerics" / "found.npz") as found:
        assert np.isnan(found["rewards"]).all() and found["observations"].shape == (1, 4)
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    assert json.loads((newest / "run.json").read_text())["env_steps"] == 120
    assert all(torch.isfinite(value).all() for value in load_policy_file(newest / "algorithm").weights.values())
    assert json.loads((run / "summary.json").read_text())["exit_reason"] == "NumericsError"


def test_a_judge_that_cannot_load_leaves_no_folder(tmp_path, monkeypatch, capsys):
    """The service is not started: what it says of weights that do not load is tested beside it."""

    def refuse(*_: object, **__: object) -> None:
        raise JudgeUnavailable("the judge cannot be loaded", "name another")

    monkeypatch.setattr(train, "ray_session", lambda *_, **__: nullcontext())
    monkeypatch.setattr(apps, "start_judge", refuse)
    out = tmp_path / "runs" / "run"
    assert main(["run", *WORDS, "--reward.teacher", "judge", "--judge.untrained", "ok", "--out", str(out)]) == 5
    assert "fix: name another" in capsys.readouterr().err
    assert not out.parent.exists()
