"""A whole run that costs seconds, commands in processes of their own, and what it means that two runs are the same."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.cli import main
from rlvlm.envs.pixels import PIXELS

WORDS = (
    "rlvlm.testing:TINY --steps 400 --reward.teacher oracle --reward.model state --seed 2 "
    "--feedback.first-step 100 --feedback.every-steps 60 --feedback.queries 8 --reward-model.ensemble 2 "
    "--env.episode-steps 20 --algo.seed-steps 40 --algo.batch-size 32 --algo.hidden 32 32 "
    "--eval.every-steps 100 --eval.episodes 2 --track.checkpoint-every-steps 60 "
    "--track.log-every-steps 40 --reward-model.min-updates 8 --reward-model.max-updates 8"
).split()


def start(*words: str, start_new_session: bool = False, **variables: str) -> "subprocess.Popen[str]":
    """`rlvlm WORDS` in a process of its own, or in a session, which imports what test files define."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"MUJOCO_GL": "egl", "PYTHONPATH": paths} | variables
    command = [sys.executable, "-m", "rlvlm.cli", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=start_new_session, **pipes)


def finish(child: "subprocess.Popen[str]", code: int = 0) -> tuple[str, str]:
    """What a command wrote to its two streams, once it has ended with that code."""
    out, err = child.communicate(timeout=500)
    assert child.returncode == code, (child.returncode, out, err)
    return out, err


def run_here(*words: str, code: int = 0) -> None:
    """`rlvlm WORDS` in this process, on the Ray that it is connected to, so that neither has to start."""
    assert main(words) == code


def box_words(text: str) -> str:
    """The words of a box on the terminal, in one line."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def interrupted(run: Path, copy: Path) -> Path:
    """A copy of a finished run as a kill before its last checkpoint would have left it: its logs go further."""
    shutil.copytree(run, copy, symlinks=True)
    shutil.rmtree(max(copy.glob("checkpoints/step_*")))
    (copy / "summary.json").unlink()
    return copy


def resumed(run: Path) -> Path:
    """The run killed before its last checkpoint, and resumed: evaluations and weights at its end are the same."""
    PIXELS.clear()  # as in a new process
    killed = interrupted(run, run.with_name("killed"))
    run_here("resume", str(killed))
    assert table(run / "eval.csv", "wall_s") == table(killed / "eval.csv", "wall_s")
    weights = [(each / "checkpoints/last/algorithm/policy.safetensors").read_bytes() for each in (run, killed)]
    assert weights[0] == weights[1]
    return killed


def table(path: Path, *unsteady: str) -> list[dict[str, str]]:
    with open(path) as file:
        return [{key: cell for key, cell in row.items() if key not in unsteady} for row in csv.DictReader(file)]


def arrays(run: Path) -> dict[str, np.ndarray]:
    with np.load(run / "checkpoints" / "last" / "algorithm" / "arrays.npz") as file:
        return dict(file)


def assert_same_run(run: Path, other: Path) -> None:
    """Counters, labels, images and every weight agree; only clocks may not."""
    assert table(run / "eval.csv", "wall_s") == table(other / "eval.csv", "wall_s")
    unsteady = ("timestamp", "latency_s")
    assert table(run / "vlm_query_log.csv", *unsteady) == table(other / "vlm_query_log.csv", *unsteady)
    assert (run / "judge_panel.jsonl").read_bytes() == (other / "judge_panel.jsonl").read_bytes()
    steps = [[json.loads(line)["env_steps"] for line in open(path / "metrics.jsonl")] for path in (run, other)]
    assert steps[0] == steps[1]
    weights = [(path / "checkpoints/last/algorithm/policy.safetensors").read_bytes() for path in (run, other)]
    assert weights[0] == weights[1]
    mine, theirs = arrays(run), arrays(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
