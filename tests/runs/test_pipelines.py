"""Runs of every kind of env, by algorithms that rlvlm has never heard of."""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import stub_pipelines
from damaged import damage
from tiny_run import arrays, table

from rlvlm.core.errors import UsageError
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.contracts.chunks import check_chunk_env
from rlvlm.envs.contracts.turns import check_turn_env
from rlvlm.runs.configs import config_text, read_config_text
from rlvlm.runs.recipes import recipe

TASKS = ("stub_pipelines:TURNS", "stub_pipelines:CHUNKS")
TESTS = Path(__file__).parents[1]


def start(*words: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(child: "subprocess.Popen[str]") -> str:
    out, err = child.communicate(timeout=500)
    assert (child.returncode, err) == (0, ""), (out, err)
    return out


def test_the_stub_envs_keep_the_contracts() -> None:
    check_turn_env(*(stub_pipelines.TinyTurns(EnvConfig(), 0) for _ in range(2)))
    check_chunk_env(*(stub_pipelines.TinyChunks(EnvConfig(), 0) for _ in range(2)))


@pytest.mark.parametrize("task", TASKS)
def test_a_config_names_its_own_pipeline(task: str) -> None:
    config = recipe(task)
    assert read_config_text(config_text(config)) == config
    with pytest.raises(UsageError, match="nowhere"):
        read_config_text(config_text(config).replace("stub_pipelines:", "nowhere:"))
    with pytest.raises(UsageError, match="known here: preference"):
        read_config_text(config_text(config).replace(config.pipeline, "alchemy"))


@pytest.mark.slow
def test_a_run_that_loads_no_chat_model_does_not_import_them() -> None:
    code = "import sys, rlvlm.runs.train, rlvlm.runs.vla.pipeline; print('transformers.modeling_utils' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "False", "seconds of every command's start"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_run_is_killed_and_damaged_goes_on_is_played_and_reported(task: str, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(start("rlvlm.run", task, "--out", str(whole)))
    child = start("rlvlm.run", task, "--out", str(broken))
    while len(list(broken.glob("checkpoints/step_*/run.json"))) < 2:
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    child.kill()
    child.communicate()
    older, newest = sorted(broken.glob("checkpoints/step_*"))[-2:]
    damage(newest / "algorithm" / "arrays.npz", at=100)
    said = finish(start("rlvlm.cli", "resume", str(broken), "--trust"))
    assert f"damaged checkpoint: {newest}/algorithm/arrays.npz is not what was written" in said
    assert f"going on from step {int(older.name[-8:])}: the" in said
    assert table(whole / "eval.csv", "wall_s") == table(broken / "eval.csv", "wall_s")
    assert table(whole / "eval.csv")[0]["step"] == "0", "what was prepared is evaluated before training"
    mine, theirs = arrays(whole), arrays(broken)
    assert mine.keys() == theirs.keys() and all((mine[name] == theirs[name]).all() for name in mine)
    weights = [(run / "checkpoints/last/algorithm/policy.safetensors").read_bytes() for run in (whole, broken)]
    assert weights[0] == weights[1]
    rows = [json.loads(line) for line in open(whole / "metrics.jsonl")]
    assert rows[-1]["stub/prepared"] == 1 and rows[-1]["stub/evaluated"] == 2
    assert {"README.md", "summary.json", "plots", "videos"} <= {file.name for file in whole.iterdir()}

    assert "success" in finish(start("rlvlm.cli", "eval", str(whole), "--episodes", "3", "--trust"))
    out = tmp_path / "report"
    finish(start("rlvlm.cli", "report", str(whole), str(broken), "--trust", "--out", str(out)))
    assert (out / "report.html").stat().st_size > 1_000


@pytest.mark.ray
@pytest.mark.slow
def test_a_sweep_takes_runs_of_any_pipeline(tmp_path: Path) -> None:
    file = tmp_path / "stubs.yaml"
    file.write_text(
        f"title: stubs\ntasks: {json.dumps(TASKS)}\nseeds: [0]\nbudget: {{steps: 100}}\n"
        "sources:\n  plain: {title: plain}\n  lucky: {title: lucky, settings: {luck: 1.0}}\n"
    )
    finish(start("rlvlm.cli", "sweep", str(file), "--out", str(tmp_path / "sweep")))
    with open(tmp_path / "sweep" / "trials.csv") as stream:
        assert [row["state"] for row in csv.DictReader(stream)] == ["done"] * 4
