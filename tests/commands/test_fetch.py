"""`rlvlm fetch` against a hub on the loopback address, with real models of random weights."""

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "owner/tiny-qwen3-vl"
COMMIT = hashlib.sha1(b"the only commit").hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
    """What the hub answers about the one model that it has."""

    folder: Path

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        files = {file.name: file for file in self.folder.iterdir()}
        if re.fullmatch(f"/api/models/{NAME}/revision/(main|{COMMIT})", path):
            self._send(json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0"} for name, file in files.items()
            ]
            self._send(json.dumps(entries).encode())
        elif path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
            self._send(files[path.rpartition("/")[2]].read_bytes())
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def hub(tiny_vlms: dict[str, Path]) -> Iterator[str]:
    handler = type("ThisHub", (Hub,), {"folder": tiny_vlms["qwen3_vl"]})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def fetch(home: Path, endpoint: str, *words: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    known |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "COLUMNS": "300"}
    command = [sys.executable, "-m", "rlvlm.cli", "fetch", *words]
    return subprocess.run(command, capture_output=True, text=True, env=known, timeout=300)


@pytest.mark.slow
def test_a_model_fetched_by_name_loads_without_the_hub(hub: str, tmp_path: Path) -> None:
    ended = fetch(tmp_path, hub, NAME)
    assert ended.returncode == 0, ended.stderr
    assert f"--judge.model {NAME}" in ended.stdout and "loads without a network" in ended.stdout
    snapshot = next((tmp_path / "hub").glob(f"*/snapshots/{COMMIT}"))
    next(snapshot.glob("*.safetensors")).unlink()  # what is here is not fetched again, so the loss is found
    ended = fetch(tmp_path, "http://127.0.0.1:9", NAME)
    assert ended.returncode != 0 and "fix:" in ended.stderr


@pytest.mark.slow
def test_a_model_fetched_into_a_folder_loads_from_there(hub: str, tmp_path: Path) -> None:
    ended = fetch(tmp_path / "home", hub, NAME, "--to", str(tmp_path / "model"))
    assert ended.returncode == 0, ended.stderr
    assert f"--judge.model {tmp_path / 'model'}" in ended.stdout
    weights = next((tmp_path / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    ended = fetch(tmp_path / "home", hub, str(tmp_path / "model"))
    assert ended.returncode == 5 and "cannot be loaded" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "reachable", "code", "message"),
    [
        (["owner/no-such-model"], True, 2, "the hub has no owner/no-such-model"),
        (["just-a-word"], True, 2, "OWNER/NAME"),
        ([NAME], False, 3, "run it where there is a network"),
    ],
)
def test_a_failed_fetch_is_reported_with_its_fix(
    words: list[str], reachable: bool, code: int, message: str, hub: str, tmp_path: Path
) -> None:
    result = fetch(tmp_path, hub if reachable else "http://127.0.0.1:9", *words)
    assert result.returncode == code, result.stderr
    assert message in result.stderr and "Traceback" not in result.stderr and not result.stdout
