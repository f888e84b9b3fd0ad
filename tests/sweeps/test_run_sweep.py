"""A whole sweep in a process of its own: real Ray Tune, real runs, an env that costs microseconds, and real kills."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tiny_run import finish, start, table

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

SWEEP = """
title: one that works
tasks: ["rlvlm.testing:TINY"]
seeds: [0]
budget: {steps: 3000}
resources: {retries: 0}
settings:
  env.episode_steps: 20
  algo.seed_steps: 40
  algo.batch_size: 32
  algo.hidden: [32, 32]
  eval.every_steps: 500
  eval.episodes: 1
  track.checkpoint_every_steps: 250
  track.log_every_steps: 250
sources:
  environment: {title: true reward, settings: {reward.source: environment}}
"""
BROKEN = ("tasks: [", 'tasks: ["broken_env:BROKEN", ')
WORKS = Path("rlvlm-testing-TINY/environment/seed_0")


def wait_for_rows(file: Path, count: int, child: subprocess.Popen[str]) -> None:
    """Until a CSV has more than `count` rows."""
    deadline = time.monotonic() + 400
    while not file.exists() or len(file.read_text().splitlines()) <= count:
        assert child.poll() is None and time.monotonic() < deadline, child.communicate()
        time.sleep(0.02)


def test_a_sweep_has_room_for_the_env_runners_of_its_runs(tmp_path):
    file, out = tmp_path / "small.yaml", tmp_path / "sweep"
    file.write_text(
        SWEEP.replace("steps: 3000", "steps: 500").replace("settings:", "settings:\n  algo.env_runners: 1", 1)
    )
    finish(start("sweep", str(file), "--out", str(out)))
    assert [row["state"] for row in table(out / "trials.csv")] == ["done"]
    assert [int(row["step"]) for row in table(out / WORKS / "eval.csv")][-1] >= 500


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_was_ended_goes_on_with_what_is_left(tmp_path, how):
    file, out = tmp_path / "small.yaml", tmp_path / "sweep"
    file.write_text(SWEEP)
    child = start("sweep", str(file), "--out", str(out))
    wait_for_rows(out / WORKS / "eval.csv", 1, child)
    child.send_signal(how)
    said = child.communicate(timeout=500)[0]
    assert 1 <= len(table(out / WORKS / "eval.csv")) < 6
    if how is signal.SIGTERM:
        assert child.returncode == 75 and f"rlvlm resume {out}" in said
        assert re.search(r"waiting for [12] runs to end their round and save: \w+", said)
        assert [row["state"] for row in table(out / "trials.csv")] == ["saved"]
        assert json.loads((out / WORKS / "summary.json").read_text())["exit_reason"] == "paused"
        assert not (out / WORKS / "README.md").exists(), "nobody waits for the pages of a run that goes on"

    file.write_text(SWEEP.replace(*BROKEN))  # a task more, whose env breaks
    said, _ = finish(start("sweep", str(file), "--out", str(out)), 1)
    assert "the table has collapsed" in said
    assert {row["task"]: row["state"] for row in table(out / "trials.csv")} == {
        "rlvlm.testing:TINY": "done",
        "broken_env:BROKEN": "failed",  # one run fails, the other does not
    }
    steps = [int(row["step"]) for row in table(out / WORKS / "eval.csv")]
    assert steps == [500, 1_000, 1_500, 2_000, 2_500, 3_000]  # nothing is repeated, nothing is left out
    assert (out / WORKS / "run.log").read_text().count("training in") == 2
