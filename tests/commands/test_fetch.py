"""`rlvlm fetch` and presets of judges against a hub on the loopback address, with real models of random weights."""

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
from pyarrow.parquet import read_table

from rlvlm.cli import main
from rlvlm.core.trust import record_file
from rlvlm.judge_bench.bench import freeze
from rlvlm.judge_bench.hacked import read_suite, shipped_suites, write_suite
from rlvlm.judge_bench.suites import Suite
from rlvlm.judges.build import build_judge
from rlvlm.reports.options import BenchOptions, parse_judged
from rlvlm.testing import check_judge

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
        if re.fullmatch(f"/api/models/{NAME}(/revision/(main|{COMMIT}))?", path):
            sizes = [{"rfilename": name, "size": file.stat().st_size} for name, file in files.items()]
            self._send(json.dumps({"id": NAME, "sha": COMMIT, "siblings": sizes}).encode())
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


def rlvlm(home: Path, endpoint: str, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    known |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "COLUMNS": "300"}
    command = [sys.executable, "-m", "rlvlm.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, env=known, timeout=300, cwd=cwd)


def fetch(home: Path, endpoint: str, *words: str) -> subprocess.CompletedProcess[str]:
    return rlvlm(home, endpoint, "fetch", *words)


@pytest.mark.slow
def test_a_model_fetched_by_name_loads_without_the_hub(hub: str, tmp_path: Path) -> None:
    ended = fetch(tmp_path, hub, NAME)
    assert ended.returncode == 0, ended.stderr
    assert f"--judge.model {NAME}" in ended.stdout and "loads without a network" in ended.stdout
    assert "MiB to download" in ended.stderr
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


APP = f"""
applications:
  - name: small
    import_path: rlvlm.serving.deployments:judge_app
    args: {{judge: {{backend: transformers, model: {NAME}, score: statement, dtype: float32}}}}
  - {{name: gate, import_path: "rlvlm.serving.ingress:gateway_app", args: {{http: {{judges: [small]}}}}}}
"""


@pytest.mark.slow
def test_a_preset_says_what_it_downloads_and_refuses_other_files_later(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "serve_apps").mkdir()
    (tmp_path / "serve_apps" / "small.yaml").write_text(APP)
    suite = Suite(name="small", tasks=("push_block",), episodes=4, pairs=2, videos=1, controls=1, tracks=0)
    freeze(suite, tmp_path / "few.zip", num_frames=2, size_px=48, asks_turns=False, seed=0)
    bench = ["judge-bench", "few.zip", "--judge.preset", "small", "--out", "bench", "--name", "a small one"]
    ended = rlvlm(tmp_path / "home", hub, *bench, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.index(f"{NAME} at {COMMIT}: "), ended.stdout.index("of memory"), ended.stdout.index("noted in")
    assert (
        said == tuple(sorted(said)) and json.loads(record_file("models.json").read_text())[NAME]["revision"] == COMMIT
    )
    entry = json.loads((tmp_path / "bench" / "entry.json").read_text())
    assert entry["name"] == "a small one" and entry["judge"]["revision"] == COMMIT
    weights = next((tmp_path / "home").glob(f"hub/*/snapshots/{COMMIT}/*.safetensors"))
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[:-4] + b"\0\0\0\1")
    ended = rlvlm(tmp_path / "home", "http://127.0.0.1:9", *bench, cwd=tmp_path)
    assert ended.returncode == 5 and f"was downloaded as commit {COMMIT} with files" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roboreward_8b", "topreward_qwen3vl_8b", "vlac"])
def test_an_app_files_judge_answers_with_small_weights_of_its_layout(name: str, tiny_vlms: dict[str, Path]) -> None:
    words = ["--judge.preset", name, "--judge.model", str(tiny_vlms["qwen3_vl"]), "--judge.dtype", "float32"]
    config = parse_judged(BenchOptions, words, "rlvlm judge-bench").judge
    assert config.score in ("rubric", "statement", "delta") and config.dtype == "float32"
    check_judge(build_judge(config))


@pytest.mark.slow
def test_a_preset_without_a_suite_is_asked_about_tiny_and_the_hacked_suites(
    tmp_path: Path, tiny_vlms: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shipped").mkdir()
    tasks = {}
    for name in ("minigrid", "push_block"):  # two episodes of each; the name of one suite is no task
        file = shipped_suites()[name]
        tasks[f"hacked_{name}"], episodes = read_suite(file)
        write_suite(tmp_path / "shipped" / file.name, tasks[f"hacked_{name}"], episodes[:2])
    monkeypatch.setattr("rlvlm.judge_bench.hacked.SHIPPED", tmp_path / "shipped")
    suite = Suite(name="tiny", tasks=("push_block",), episodes=4, pairs=2, videos=1, controls=1, tracks=0)
    out = tmp_path / "bench"
    out.mkdir()
    freeze(suite, out / "tiny.zip", num_frames=2, size_px=48, asks_turns=False, seed=0)
    small = ["--judge.model", str(tiny_vlms["qwen3_vl"]), "--judge.dtype", "float32", "--judge.image-px", "48"]
    bench = ["judge-bench", "--judge.preset", "topreward_qwen3vl_8b", *small, "--frames", "2", "--out", str(out)]
    assert main(bench) == 0
    asked = {file.parent.name: read_table(file).to_pylist() for file in out.glob("*/answers.parquet")}
    assert asked.keys() == {"tiny", *tasks}
    for name, task in tasks.items():
        assert [row["task"] for row in asked[name] if row["case"] == "hacked"] == [task] * 2
    assert json.loads((out / "tiny" / "entry.json").read_text())["name"] == "topreward_qwen3vl_8b"


def test_a_preset_that_is_not_there_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["judge-bench"], ["score", "films"]):
        assert main([*command, "--judge.preset", "robometr"]) == 2
        assert "roboreward_8b" in " ".join(capsys.readouterr().err.split())
