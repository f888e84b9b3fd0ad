"""`rlvlm serve` as a user starts it, in a process of its own, with 12 planted keys; and what callers try on it."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
import httpx
import numpy as np
import psutil
import pytest
import yaml
from http_edge import noise, png, text

from rlvlm.runs.start.preflight import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]
logger = logging.getLogger(__name__)

READY_S = 240.0
KEY_NAMES = ("WANDB_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
QUESTION = {"goal": "open the drawer", "left": [text(png(60))], "right": [text(png(190))]}
STATUS = """
import ray
from ray import serve
from ray._private import state
ray.init(log_to_driver=False)
print(serve.status(), ray.util.list_named_actors(all_namespaces=True), state.jobs(), state.actors())
"""
"""Prints what Serve, the actors and the jobs say of themselves."""


def canary(number: int) -> str:
    """A word that occurs nowhere else."""
    return f"cAnArY{number:02d}x{'7f3e9b' * 5}"


class Server:
    """`rlvlm serve` on the pocket judge, with a key wherever one can be put."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.token_file = folder / "keys" / "token"
        self.token_file.parent.mkdir(mode=0o700)
        self.token = canary(0)
        with open(os.open(self.token_file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as stream:
            stream.write(self.token)
        (folder / "tmp").mkdir()
        self.key_file = folder / "keys" / "api"
        self.key_file.write_text(canary(1))
        self.key_file.chmod(0o600)
        self.file = self._write_app_file()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {name: canary(2 + number) for number, name in enumerate(KEY_NAMES)}
        self.environment = environment
        self.log = (folder / "terminal.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlvlm.cli", "serve", str(self.file), "--token-file", str(self.token_file)],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.headers = {"authorization": f"Bearer {self.token}"}

    def _write_app_file(self) -> Path:
        api = {"key_file": str(self.key_file), "key_env": "OPENAI_API_KEY"}
        judge = {"backend": "pocket", "batch_size": 8, "api": api}
        content = {
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                {
                    "name": "pocket",
                    "route_prefix": None,
                    "import_path": "rlvlm.serving.deployments:judge_app",
                    "args": {"judge": judge, "placement": {"num_cpus": 0.5}},
                },
                {
                    "name": "edge",
                    "route_prefix": "/",
                    "import_path": "rlvlm.serving.ingress:gateway_app",
                    "args": {"http": {"judges": ["pocket"]}},
                },
            ],
        }
        path = self.folder / "live.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    @property
    def shown(self) -> str:
        """What the terminal has shown so far."""
        return (self.folder / "terminal.txt").read_text()

    def wait(self) -> None:
        """Returns when the server says that it is ready."""
        end = time.monotonic() + READY_S
        while "Ctrl-C stops it" not in self.shown:
            assert self.process.poll() is None and time.monotonic() < end, self.shown
            time.sleep(0.2)

    def ray_variables(self) -> dict[str, str]:
        """What the server printed for others who want to join its Ray."""
        return dict(re.findall(r"(RAY_\w+)=(\S+)", self.shown))

    def session(self) -> Path:
        """Ray's folder of this server."""
        found = re.search(r"RAY_AUTH_TOKEN_PATH=(\S+)/token", self.shown)
        assert found, self.shown
        return Path(found[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("live"))
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGINT)
            server.process.wait(60)


def test_the_pasted_line_asks_the_judge(server):
    lines = server.shown.splitlines()  # each thing once however short it lasts: no terminal, so nothing is overwritten
    assert lines[:2] == ["starting Ray", "loading pocket, edge"]
    assert any("is ready after" in line for line in lines)
    [line] = re.findall(r"^  try +(curl .*)$", server.shown, re.MULTILINE)
    answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    verdict = json.loads(answer.stdout)
    assert verdict["label"] == "right" and verdict["stamp"]["judge"].startswith("pocket"), "the balanced pole"
    assert server.token not in line


def test_a_refusal_comes_before_the_body(server):
    for token in ("", "Bearer x", "Bearer " + server.token[:-1]):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as line:
            line.sendall(
                b"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: 1000000\r\nAuthorization: " + token.encode() + b"\r\n\r\n"
            )  # and no body
            assert line.recv(20).startswith(b"HTTP/1.1 401")


def half_sent(server: Server, count: int) -> list[socket.socket]:
    """Connections whose request has a good token and stops in the middle of its body."""
    lines = []
    for _ in range(count):
        line = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        line.sendall(
            f"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.token}\r\n"
            "Content-Type: application/json\r\nContent-Length: 5000\r\n\r\n{".encode()
        )
        lines.append(line)
    return lines


async def ask_often(server: Server, count: int) -> list[tuple[int, float]]:
    """Status and seconds of small requests to the gateway, one after another, of which it refuses what they ask."""
    figures = []
    async with httpx.AsyncClient(base_url=server.url, headers=server.headers, timeout=60) as client:
        for _ in range(count):
            start = time.perf_counter()
            answer = await client.post("/v1/score", json={})
            figures.append((answer.status_code, time.perf_counter() - start))
    return figures


def slow_bodies(server: Server, num_slow: int, num_normal: int) -> list[float]:
    """Seconds of normal requests while slow ones hang, which then all get their 408."""
    lines = half_sent(server, num_slow)
    try:
        figures = asyncio.run(ask_often(server, num_normal))
        assert {status for status, _ in figures} == {422}, "read at once: the others are slow"
        for line in lines:
            line.settimeout(60)
            assert line.recv(20).startswith(b"HTTP/1.1 408")
    finally:
        for line in lines:
            line.close()
    return sorted(seconds for _, seconds in figures)


def test_half_sent_bodies_do_not_stop_other_requests(server):
    slow_bodies(server, num_slow=40, num_normal=20)


def test_a_hundred_requests_at_once_blame_no_caller(server):
    """More than the judge takes: each is answered, or told to come back, and the server goes on."""
    rng = np.random.default_rng(0)
    sides = [text(noise(rng, 300)) for _ in range(2)]
    question = {"goal": "open the drawer", "left": [sides[0]], "right": [sides[1]]}

    async def flood() -> list[tuple[int, bool]]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, headers=server.headers) as client:

            async def post() -> tuple[int, bool]:
                async with client.post(f"{server.url}/v1/preference", json=question) as answer:
                    return answer.status, "Retry-After" in answer.headers

            return await asyncio.gather(*(post() for _ in range(100)))

    answers = asyncio.run(flood())
    statuses = [status for status, _ in answers]
    assert set(statuses) <= {200, 429, 503} and 200 in statuses, Counter(statuses)
    assert all(says_when for status, says_when in answers if status != 200)
    time.sleep(2.0)
    assert server.process.poll() is None and "please report" not in server.shown
    assert httpx.post(f"{server.url}/v1/preference", json=question, headers=server.headers, timeout=60).is_success


def test_an_endless_header_is_cut_off_and_the_proxy_lives(server):
    proxies = [one for one in psutil.Process(server.process.pid).children(recursive=True) if "ProxyActor" in one.name()]
    assert len(proxies) == 1
    sent, piece = 0, b"y" * 2**16
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as line:
        line.sendall(b"GET / HTTP/1.1\r\nX: ")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while sent < 2**28:
                line.sendall(piece)
                sent += len(piece)
    assert sent < 2**24 and proxies[0].is_running()
    answer = httpx.get(f"{server.url}/health", headers=server.headers, timeout=60)
    assert answer.json() | {"status": "ok"} == answer.json()
    assert answer.json()["loaded_backends"] == ["pocket"] and answer.json()["deploying_backends"] == []


def test_no_port_without_a_token_is_open_to_other_machines(server):
    with pytest.raises(StopIteration):  # Ray's metrics: the one listener of its that asks nobody for a token
        next(
            each
            for one in psutil.Process(server.process.pid).children(recursive=True)
            for each in one.net_connections(kind="inet")
            if each.status == psutil.CONN_LISTEN and each.laddr.ip == "0.0.0.0"
        )


@pytest.mark.full
def test_four_hundred_half_sent_bodies_do_not_slow_other_requests(server):
    asyncio.run(ask_often(server, 50))
    times = slow_bodies(server, num_slow=400, num_normal=200)
    p50, p95 = times[len(times) // 2], times[int(len(times) * 0.95)]
    logger.warning(
        "normal requests beside 400 half-sent bodies: p50 %.0f ms, p95 %.0f ms, slowest %.0f ms",
        1e3 * p50,
        1e3 * p95,
        1e3 * times[-1],
    )
    assert p95 <= 0.250


def run_again(server: Server, name: str, judge: dict) -> subprocess.CompletedProcess:
    """`rlvlm serve` of another judge on the Ray that runs already."""
    content = yaml.safe_load(server.file.read_text())
    app, gateway = content["applications"]
    app |= {"name": name, "args": {"judge": judge, "placement": {"num_cpus": 0.5}}}
    gateway |= {"name": f"{name}-http", "route_prefix": f"/{name}", "args": {"http": {"judges": [name]}}}
    path = server.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    attached = server.environment | server.ray_variables()
    command = [sys.executable, "-m", "rlvlm.cli", "serve", str(path), "--token-file", str(server.token_file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=attached, cwd=server.folder)


@pytest.mark.full
def test_a_judge_that_cannot_load_ends_with_its_cause_and_leaves_the_others(server):
    start = time.monotonic()
    ended = run_again(server, "broken", {"backend": "pocket", "model": "/no/such/folder"})
    assert ended.returncode == 5, ended.stdout + ended.stderr
    assert "/no/such/folder" in ended.stderr.replace("\n", "") and "fix:" in ended.stderr
    logger.warning("exit 5 with the cause after %.0f s", time.monotonic() - start)
    answer = httpx.post(f"{server.url}/v1/preference", json=QUESTION, headers=server.headers, timeout=60)
    assert answer.status_code == 200


def provoke(server: Server) -> None:
    """Errors of many kinds, with keys in what is sent: nothing of it may be written down."""
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=60) as client:
        client.post("/v1/score", json={"goal": canary(8), "frames": [canary(9)]})
        client.post("/score", json={"task_text": "open it", "video_path": canary(10)})
        client.get(f"/v1/score?token={canary(11)}")
        client.get("/docs", headers={"authorization": f"Bearer {canary(11)}"})
        client.post("/generate", json={"messages": [{"role": "user", "content": canary(8)}], "max_tokens": 4})
        client.post("/v1/preference", content=canary(9).encode(), headers={"content-type": "application/json"})
        client.put(f"/{canary(10)}", content=canary(11).encode())


def test_planted_keys_are_found_nowhere(server):
    provoke(server)
    status = subprocess.run(
        [sys.executable, "-c", STATUS],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=server.folder,
        env=os.environ | server.ray_variables(),
    )
    assert "pocket" in status.stdout, status.stderr
    config = subprocess.run(
        [sys.executable, "-m", "rlvlm.cli", "run", "drawer_open", "--print-config"],
        capture_output=True,
        text=True,
        timeout=120,
        env=server.environment,
        cwd=server.folder,
    )
    places = {"terminal": server.shown, "Serve status": status.stdout + status.stderr, "config": config.stdout}
    kept = (server.token_file, server.key_file, server.session() / "token")
    num_files = 0
    serve_logs = Path("/tmp").glob("rlvlm-serve-*.log")
    for path in [*server.session().rglob("*"), *server.folder.rglob("*"), *serve_logs]:
        if path.is_file() and not path.is_symlink() and path not in kept and path.stat().st_size < 64 * 2**20:
            places[str(path)] = path.read_bytes().decode("latin-1")
            num_files += 1
    hits = {place: number for place, content in places.items() for number in range(12) if canary(number) in content}
    logger.warning("%d files, Serve's status, the config and the terminal searched: %d hits", num_files, len(hits))
    assert hits == {} and num_files > 10


def test_ctrl_c_stops_everything(server):
    session = server.session()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    assert "SIGINT: stopping" in server.shown
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
    assert not session.exists()
