"""The head node of a cluster dies under a run: on a new cluster it goes on from its newest checkpoint."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from chaos import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1_500)]

STEPS, INTERVAL = 1_024, 128
WORDS = f"number_line --smoke --steps {STEPS} --engine.num-replicas 1 --engine.num-cpus 0.5 --eval.episodes 8".split()


@contextmanager
def cluster(**settings: str) -> Iterator[tuple[dict[str, str], psutil.Process]]:
    """What a program's environment must say to run on a head of its own, and the process that holds the head's."""
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="rlvlm-", dir="/tmp") as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", **settings}
        environment.pop("RAY_ADDRESS", None)
        words = f"start --head --block --node-ip-address 127.0.0.1 --port {port} --num-cpus 4 --temp-dir {folder}"
        ray = Path(sys.executable).with_name("ray")
        options = ["--include-dashboard", "false", "--object-store-memory", str(200 * 2**20)]
        head = psutil.Popen([str(ray), *words.split(), *options], env=environment, stdout=subprocess.DEVNULL)
        try:
            address = f"127.0.0.1:{port}"
            wait_until(lambda: answers(port), 120, "the head to answer")
            yield environment | {"RAY_ADDRESS": address}, head
        finally:
            end(head)


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def end(process: psutil.Process) -> None:
    """Kills a process and all that it has started, by their ids; one that has ended is left alone."""
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in family:
        try:
            one.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=30)


def steps_of(run: Path) -> list[int]:
    """Env steps of the rows that were logged."""
    log = run / "metrics.jsonl"
    return [json.loads(line)["env_steps"] for line in log.read_text().splitlines()] if log.exists() else []


def saved(run: Path) -> int:
    """Steps of the newest checkpoint, -1 without any."""
    states = [json.loads(file.read_text())["env_steps"] for file in (run / "checkpoints").glob("*/run.json")]
    return max(states, default=-1)


def test_a_run_outlives_the_head_of_its_cluster(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with cluster() as (environment, head):
        # its driver has no say: Ray ends the process with the raylet that it hangs on
        child = subprocess.Popen([sys.executable, "-m", "rlvlm.run", *WORDS, "--out", str(run)], env=environment)
        wait_until(lambda: saved(run) >= 3 * INTERVAL or child.poll() is not None, 600, "the third checkpoint")
        assert child.poll() is None, "it ended too early"
        end(head)
        try:
            code = child.wait(300)
        finally:
            if child.poll() is None:
                end(psutil.Process(child.pid))
    reached, kept = max(steps_of(run)), saved(run)
    assert code != 0 and reached < STEPS
    assert reached - kept <= INTERVAL, "no more than what was done since the last checkpoint is lost"
    with cluster() as (environment, _):
        resumed = subprocess.run(
            [sys.executable, "-m", "rlvlm.cli", "resume", str(run)], env=environment, check=False, timeout=600
        )
    assert resumed.returncode == 0
    steps = steps_of(run)
    assert steps == sorted(set(steps)) and steps[-1] == STEPS, "each step stands in the log once"


def test_a_run_goes_on_while_the_network_flaps(tmp_path: Path) -> None:
    """Ray loses a share of its own requests and replies, by its own means of injecting failures."""
    run = tmp_path / "run"
    lossy = {"num_failures": 10, "req_failure_prob": 5, "resp_failure_prob": 5}  # of each process; per cent
    failures = json.dumps({"CoreWorkerService.grpc_client.PushTask": lossy})
    with cluster(RAY_testing_rpc_failure=failures) as (environment, _):
        subprocess.run(
            [sys.executable, "-m", "rlvlm.run", *WORDS, "--out", str(run)], env=environment, check=True, timeout=900
        )
    assert steps_of(run)[-1] == STEPS
    assert "RpcError" in (run / "run.log").read_text(), "something was lost on the way"
