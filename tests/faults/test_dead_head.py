"""The head node of a cluster dies under a run: on a new cluster it goes on from its newest checkpoint."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from chaos import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1_500)]

SAC_STEPS, SAC_INTERVAL = 3_000, 300
SAC_WORDS = (
    f"cartpole --reward.source environment --smoke --steps {SAC_STEPS} "
    f"--track.checkpoint-every-steps {SAC_INTERVAL} --track.log-every-steps 100 --algo.env-runners 1"
).split()
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
            wait_until(lambda: answers(port), "the head to answer")
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


def lose_head(words: Sequence[str], holds: Callable[[], bool], what: str) -> None:
    """Starts a program on a cluster of its own, whose head dies as soon as `holds`, and with it the program."""
    with cluster() as (environment, head):
        # its driver has no say: Ray ends the process with the raylet that it hangs on
        child = subprocess.Popen([sys.executable, "-m", *words], env=environment)
        wait_until(lambda: holds() or child.poll() is not None, what, 900)
        assert child.poll() is None, "it ended too early"
        end(head)
        try:
            assert child.wait(300) != 0
        finally:
            if child.poll() is None:
                end(psutil.Process(child.pid))


def go_on(run: Path) -> None:
    with cluster() as (environment, _):
        words = [sys.executable, "-m", "rlvlm.cli", "resume", str(run)]
        assert subprocess.run(words, env=environment, check=False, timeout=900).returncode == 0


def test_a_run_outlives_the_head_of_its_cluster(tmp_path):
    run = tmp_path / "run"
    words = ["rlvlm.run", *WORDS, "--out", str(run)]
    lose_head(words, lambda: saved(run) >= 3 * INTERVAL, "the third checkpoint")
    reached, kept = max(steps_of(run)), saved(run)
    assert reached < STEPS
    assert reached - kept <= INTERVAL, "no more than what was done since the last checkpoint is lost"
    go_on(run)
    steps = steps_of(run)
    assert steps == sorted(set(steps)) and steps[-1] == STEPS, "each step stands in the log once"


def is_saving(run: Path) -> bool:
    """Whether a checkpoint is being written; looked for often, since that takes a moment."""
    for _ in range(100):
        if any((run / "checkpoints").glob(".*.partial")):
            return True
        time.sleep(0.001)
    return False


POINTS: dict[str, list[Callable[[Path], bool]]] = {
    "before the first checkpoint": [lambda run: max(steps_of(run), default=0) > 0],
    "as it saves": [lambda run: saved(run) > 0 and is_saving(run)],
    "in the last interval": [lambda run: saved(run) >= SAC_STEPS - SAC_INTERVAL],
    "and once more as it goes on": [lambda run: saved(run) >= 600, lambda run: saved(run) >= 1_500],
}
"""When the head dies, and the next one."""


@pytest.mark.parametrize("point", POINTS)
def test_it_may_die_at_any_point(tmp_path, point):
    run = tmp_path / "run"
    words = ["rlvlm.run", *SAC_WORDS, "--out", str(run)]
    for holds in POINTS[point]:
        lose_head(words, partial(holds, run), point)
        reached, kept = max(steps_of(run)), max(saved(run), 0)
        sys.stderr.write(f"{point}: the head died at step {reached}, the newest checkpoint is of {kept}\n")
        assert reached - kept <= SAC_INTERVAL
        words = ["rlvlm.cli", "resume", str(run)]
    go_on(run)
    steps = steps_of(run)
    assert steps == sorted(set(steps)) and steps[-1] == SAC_STEPS


def test_a_run_goes_on_while_the_network_flaps(tmp_path):
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


def test_a_run_goes_on_while_a_tenth_of_all_calls_are_lost(tmp_path):
    """Without end and from the first one on: env runners are lost all the time, in RLlib's set-up too."""
    run = tmp_path / "run"
    lossy = {"num_failures": -1, "req_failure_prob": 5, "resp_failure_prob": 5}
    failures = json.dumps({"CoreWorkerService.grpc_client.PushTask": lossy})
    words = "cartpole --reward.source environment --smoke --steps 2000 --algo.env-runners 2"
    with cluster(RAY_testing_rpc_failure=failures) as (environment, _):
        words = [sys.executable, "-m", "rlvlm.run", *words.split(), "--out", str(run)]
        subprocess.run(words, env=environment, check=True, timeout=900)
    assert steps_of(run)[-1] >= 2_000
    assert "was lost" in (run / "run.log").read_text(), "something was lost on the way"
