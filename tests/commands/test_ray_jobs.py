"""Runs as Ray jobs: `ray job submit -- python -m rlvlm.run TASK` on a real head with token authentication."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from tiny_run import WORDS

from rlvlm.runs.start.preflight import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

HEAD = """
import os, sys
from rlvlm.runs.start.ray_session import ray_session
with ray_session(int(sys.argv[1])):
    print(os.environ["RAY_AUTH_TOKEN_PATH"], flush=True)
    sys.stdin.read()
"""
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


class Head:
    """A Ray with a dashboard and a token, in a process of its own; commands reach it as a user's would."""

    def __init__(self, url: str, token: Path) -> None:
        self.url = url
        self._token = token

    def job(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`ray job WORDS` with the token in its environment."""
        known = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}
        known |= {"RAY_API_SERVER_ADDRESS": self.url}
        return subprocess.run([*RAY, "job", *words], capture_output=True, text=True, env=known, timeout=400)

    def submit(self, name: str, *words: str, wait: bool) -> subprocess.CompletedProcess[str]:
        """`ray job submit -- python -m rlvlm.run WORDS`, with time to save when it is stopped."""
        variables = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120", "MUJOCO_GL": "egl"}}
        options = ["--submission-id", name, "--runtime-env-json", json.dumps(variables)]
        options += [] if wait else ["--no-wait"]
        return self.job("submit", *options, "--", sys.executable, "-m", "rlvlm.run", *words)

    def jobs(self) -> dict[str, dict]:
        """What the dashboard shows of each job."""
        answer = httpx.get(f"{self.url}/api/jobs/", headers={"Authorization": f"Bearer {self._token.read_text()}"})
        return {job["submission_id"]: job for job in answer.raise_for_status().json()}


@pytest.fixture(scope="module")
def head():
    known = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    port = free_port()
    command = [sys.executable, "-c", HEAD, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=known) as process:
        assert process.stdout is not None
        token = process.stdout.readline().strip()
        assert token
        yield Head(f"http://127.0.0.1:{port}", Path(token))


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic cmF5OnJheQ=="}])
def test_submitting_and_looking_need_the_token(head, headers):
    job = {"entrypoint": "true", "submission_id": "stranger"}
    calls = (
        ("POST", "/api/jobs/"),
        ("GET", "/api/jobs/"),
        ("GET", "/api/jobs/stranger"),
        ("GET", "/api/jobs/stranger/logs"),
        ("POST", "/api/jobs/stranger/stop"),
        ("DELETE", "/api/jobs/stranger"),
        ("PUT", "/api/packages/gcs/stranger.zip"),
        ("PUT", "/api/serve/applications/"),
        ("GET", "/api/serve/applications/"),
        ("GET", "/nodes?view=summary"),
        ("GET", "/api/v0/tasks"),
        ("GET", "/api/cluster_status"),
    )
    codes = {}
    for method, path in calls:
        codes[method, path] = httpx.request(method, head.url + path, json=job, headers=headers).status_code
    assert {code for code in codes.values()} <= {401, 403}, codes
    assert "stranger" not in head.jobs()


def test_a_job_that_is_stopped_has_saved(head, tmp_path):
    out = tmp_path / "run"
    ended = head.submit("stopped", *WORDS, "--steps", "100000", "--out", str(out), wait=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    end = time.monotonic() + 300
    while not (out / "metrics.jsonl").exists():
        assert time.monotonic() < end and head.jobs()["stopped"]["status"] in ("PENDING", "RUNNING")
        time.sleep(0.2)
    ended = head.job("stop", "stopped")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert head.jobs()["stopped"]["status"] == "STOPPED"
    assert json.loads((out / "summary.json").read_text())["exit_reason"] == "SIGTERM"
    assert (out / "checkpoints" / "last").is_dir()


def test_a_job_runs_to_its_end_on_the_heads_ray(head, tmp_path):
    out = tmp_path / "run"
    judged = ["--reward.teacher", "judge", "--judge.untrained", "ok"]
    ended = head.submit("whole", *WORDS, "--steps", "160", *judged, "--out", str(out), wait=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"training in {out}" in ended.stdout and "done: 160 steps" in ended.stdout
    job = head.jobs()["whole"]
    assert (job["status"], job["driver_exit_code"]) == ("SUCCEEDED", 0)
    assert "rlvlm.run" in job["entrypoint"]
    assert json.loads((out / "summary.json").read_text())["queries"] > 0
