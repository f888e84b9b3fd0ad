"""A private Ray in a process of its own, on a machine that is too busy at first, and one more after it."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tiny_run import WORDS, finish, start

from rlvlm.core.errors import MachineError
from rlvlm.runs.start import ray_session as session
from rlvlm.runs.start.preflight import free_port

BUSY = """
import os
import signal
import time
import psutil
import ray._private.services as services
from rlvlm.runs.start import ray_session as session

asked, said, patient, clock = [], [], services.get_node, time.monotonic
session.SLOW_S = 0.2  # every start takes longer


def get_node(*words):
    asked.append(words)
    if len(asked) == 1:  # Ray looks at the clock next, and finds that its 30 seconds are over
        time.monotonic = lambda: (setattr(time, "monotonic", clock), clock() + 100)[1]
        raise RuntimeError("the raylet has not registered yet")
    return patient(*words)


services.get_node = get_node
signal.signal(signal.SIGTERM, asks_to_stop := lambda *_: None)
with session.ray_session(log=said.append):
    import ray

    print(len(asked) > 1, ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0))
    ours = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    scripts = {part for child in ours for part in child.cmdline() if part.endswith(".py")}
    print(sorted(script.rpartition("/")[2] for script in scripts))
    logs = os.listdir(ray._private.worker.global_worker.node.get_logs_dir_path())  # nor was one waited for
    print([name for name in logs if name.startswith(("dashboard.", "monitor.", "log_monitor."))])
    print([any(words in line for line in said) for words in ("still starting (load", "not ready after", "7 minutes")])
with session.ray_session():  # as a script has that trains twice
    print(ray.get(ray.remote(lambda: 41).remote()), signal.getsignal(signal.SIGTERM) is asks_to_stop)
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_slow_start_is_waited_for_and_said_nobody_looks_on_and_workers_have_their_share(tmp_path):
    """In a folder of 600 MB, below what Ray takes for `uv run`, whose environment it would ship to workers."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with open(tmp_path / "large", "wb") as file:
        file.truncate(600 * 2**20)
    (tmp_path / "busy.py").write_text(BUSY)
    (tmp_path / "run").write_text(f"{sys.executable} busy.py; exit $?\n")  # what the shell `uv` reads
    child = subprocess.run(
        ["uv", "run"], executable="/bin/sh", cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=500
    )  # fmt: skip
    assert child.stdout == "True True\n[]\n[]\n[True, True, True]\n41 True\n", child.stderr
    assert child.returncode == 0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_program_whose_head_is_gone_says_so_and_ends_as_a_fault_of_the_machine(command, tmp_path):
    words = ["serve", "pocket", "--port", str(free_port()), "--token-file", str(tmp_path / "token")]
    if command == "run":
        words = ["run", *WORDS, "--steps", "1000000", "--out", str(tmp_path / "run")]
    child = start(*words)
    assert child.stdout
    said = ""
    while not (" is ready after " in said or "training in " in said):
        line = child.stdout.readline()
        assert line, said
        said += line
    [head] = [one for one in psutil.Process(child.pid).children() if "gcs_server" in one.name()]
    head.kill()
    out, err = child.communicate(timeout=60)
    assert child.returncode == MachineError.exit_code, (out, err)
    assert "Ray's head (its GCS, at " in out and not err
    assert ("rlvlm resume " if command == "run" else "rlvlm-serve-") in out


def check_link(message: str, port: int) -> None:
    """The printed link signs a browser in to Ray's dashboard, and nothing else does."""
    dashboard = f"http://127.0.0.1:{port}"
    [link] = re.findall(rf"Ray's dashboard: (\S+)  \(signs in, and leads to {dashboard}\)", message)
    with httpx.Client(follow_redirects=True) as browser:
        assert browser.get(f"{dashboard}/api/cluster_status").status_code == 401
        assert browser.get(f"{link}x").status_code == 404 and not browser.cookies
        assert str(browser.get(link).url).rstrip("/") == dashboard
        assert browser.get(f"{dashboard}/api/cluster_status").json()["result"]


@pytest.mark.ray
@pytest.mark.slow
def test_a_signal_to_the_whole_group_of_a_run_saves_it_and_leaves_nothing_behind(tmp_path, monkeypatch):
    """As `timeout` and schedulers send it: Ray's processes are children of the run, and it needs them to save. Until
    then somebody looks at its dashboard.
    """
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # tests do without the token
    port = free_port()
    watched = ("--track.dashboard", "--track.dashboard-port", str(port))
    child = start("run", *WORDS, *watched, "--steps", "1000000", "--out", str(tmp_path / "run"), start_new_session=True)
    assert child.stdout
    shown = ""
    while "training in " not in shown:
        line = child.stdout.readline()
        assert line, shown
        shown += line
    check_link(shown, port)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    started = psutil.Process(child.pid).children(recursive=True)
    assert any("gcs_server" in process.name() for process in started)
    os.killpg(child.pid, signal.SIGTERM)
    said, err = finish(child, 75)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit_reason"] == "SIGTERM" and "saved; resume with: " in said and not err
    newest = tmp_path / "run" / "checkpoints" / "last" / "run.json"
    assert json.loads(newest.read_text())["env_steps"] == summary["env_steps"] > 0
    assert not psutil.wait_procs(started, timeout=20)[1]


@pytest.mark.parametrize("is_logged", [True, False])
def test_a_package_that_is_missing_is_no_busy_machine(is_logged, monkeypatch, tmp_path):
    """Ray as it was seen without grpcio: with a dashboard it logs the cause, without one a process of its own dies."""
    tries: list[str] = []

    def init(_temp_dir: str, **_: Any) -> None:
        tries.append(_temp_dir)
        if is_logged:
            logging.getLogger("ray._private.services").error(
                "Ray dashboard dependencies failed to install properly: No module named 'grpc'.\nPotential causes ..."
            )
        else:
            logs = Path(_temp_dir) / "session" / "logs"
            logs.mkdir(parents=True)
            (logs / "monitor.err").write_text("Traceback ...\nModuleNotFoundError: No module named 'grpc'\n")
        raise RuntimeError("the node has not registered within 30 seconds")

    monkeypatch.setattr(session.ray, "init", init)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "as it was")
    monkeypatch.setenv(*session._PROXY)
    monkeypatch.setattr(session, "SLOW_S", 0.0)  # as if each try had taken long
    with pytest.raises(MachineError, match="Ray cannot start here: No module named 'grpc'") as caught:
        session.start_ray(tmp_path)
    assert len(tries) == 1 and "make setup" in caught.value.fix
