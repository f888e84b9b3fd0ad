"""A real run whose policy's replicas are killed: it ends as the one that was left alone, to the bit."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos import pids_below, send

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1_500)]

KILLS = 10
WORDS = "number_line --smoke --steps 3584 --algo.num-learners 2 --engine.num-replicas 2 --eval.episodes 8".split()


def rows(run: Path) -> list[dict[str, Any]]:
    """What was logged, without what depends on time or tells of the kills."""
    logged = [json.loads(line) for line in open(run / "metrics.jsonl")]
    times = ("_s", "_mb")
    return [{key: row[key] for key in row if not key.endswith(times) and key != "engine/retries"} for row in logged]


def test_ten_kills_in_a_run_change_nothing(tmp_path):
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    command = [sys.executable, "-m", "rlvlm.run", *WORDS, "--out"]
    subprocess.run([*command, str(calm)], check=True, capture_output=True, timeout=500)
    child = subprocess.Popen([*command, str(killed)], stdout=subprocess.DEVNULL)
    rng, kills = random.Random(2026), 0
    while child.poll() is None:
        time.sleep(rng.uniform(3, 6))
        is_running = child.poll() is None
        targets = pids_below(psutil.Process(child.pid), "ServeReplica:policy") if is_running else []
        if kills < KILLS and targets and (killed / "metrics.jsonl").exists():
            kills += send(rng.choice(targets), signal.SIGKILL)
    assert child.returncode == 0 and kills == KILLS, (child.returncode, kills)
    assert rows(killed) == rows(calm)
    assert max(row.get("update/first_ratio_error", 0.0) for row in rows(killed)) <= 1e-4
