"""The judge's kit: the wheel in an environment of its own, without torch and Ray, benches a judge behind an API."""

import ast
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from api_server import ApiServer
from test_architecture import imported_names, sources_of_package

import rlvlm
from rlvlm.cli import main
from rlvlm.core import install
from rlvlm.judge_bench.bench import freeze
from rlvlm.judge_bench.suites import Suite
from rlvlm.serving.guard import MIN_TOKEN_CHARS

ROOT = Path(__file__).parents[1]
KIT = (
    "cli core.console.boxes core.guests commands.data commands.doctor commands.judge_bench commands.judge_report "
    "commands.labels commands.report commands.score demonstrations.recordings "
    "judge_bench.preflight judges.client judges.build "
    "judges.own labels.export reports.compare reports.contact_sheet reports.judge_bench "
    "reports.judge_report reports.score reports.watch "
    "rewards.monitor vlms.engines.remote"
).split()
"""What the kit imports to do its work, early or late; what these import when they are imported belongs to it too."""


class _Early(ast.NodeTransformer):
    """Leaves what runs when a module is imported."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return ast.Pass()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return ast.Pass()

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def imports_at_once(module: str) -> set[str]:
    """What a module of the package imports when it is imported, and not within a function later."""
    tree = _Early().visit(ast.parse(sources_of_package()[module]))
    return set(imported_names(ast.unparse(tree), strings=False))


def test_nothing_of_the_kit_imports_torch_ray_or_a_simulator():
    known, found = sources_of_package(), {}
    paths = [(f"rlvlm.{name}",) for name in KIT]
    for path in paths:
        for name in imports_at_once(path[-1]):
            if name.partition(".")[0] in install._TRAIN:
                found[name] = " -> ".join(path)
            module = name if name in known else name.rpartition(".")[0]
            if module in known and all(module != old[-1] for old in paths):
                paths.append((*path, module))
    assert not found, found
    assert len(paths) > 100, "the walk goes through the package"


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(install, "is_missing", lambda module: True)
    judge = ["judge-bench", "push_block", "--out", str(tmp_path / "bench")]
    preset = ["judge-bench", "--judge.preset", "roboreward_8b", "--out", str(tmp_path / "bench")]
    for command in (["run", "drawer_open"], ["serve", "pocket"], judge, preset):
        assert main(command) == 3
        assert 'fix: pip install "rlvlm[train]"' in capsys.readouterr().err
    assert not any(tmp_path.iterdir()), "nothing was begun"
    with pytest.raises(Exception, match="needs the package torch") as caught:
        monkeypatch.setitem(sys.modules, "torch", None)
        monkeypatch.delitem(sys.modules, "rlvlm.runs.in_python", raising=False)
        rlvlm.load_policy  # noqa: B018
    assert caught.value.__notes__ == ['fix: pip install "rlvlm[train]"']


def test_make_setup_and_the_images_install_the_training_packages():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "rlvlm[train]" in extras["libero"] and "rlvlm[libero]" in extras["dev"]
    assert '$(INSTALL) ".[train]"' in (ROOT / "Makefile").read_text()
    assert "ARG EXTRAS=[train]" in (ROOT / "cluster" / "Dockerfile").read_text()
    assert '".[train]"' in (ROOT / "cluster" / "rlvlm.def").read_text()


@pytest.mark.slow
def test_the_wheel_alone_benches_a_judge_behind_an_api(tmp_path):
    def run(*command: object, cwd: Path = tmp_path) -> str:
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # the wheel, not this tree
        done = subprocess.run([str(word) for word in command], cwd=cwd, env=own, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    probe = [*pip, "download", "--no-deps", "--dest", str(tmp_path / "probe"), "hatchling"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("pip reaches no registry from here")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("rlvlm-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "light")
    python, began = tmp_path / "light" / "bin" / "python", time.monotonic()
    run(python, *pip[1:], "install", "--no-compile", "--constraint", ROOT / "constraints.txt", wheel)
    install_s = time.monotonic() - began
    site = next((tmp_path / "light" / "lib").glob("python*")) / "site-packages"
    assert not [name for name in install._TRAIN if (site / name).exists()]
    size_mb = sum(file.stat().st_size for file in site.rglob("*") if file.is_file()) / 1e6
    assert size_mb < 800
    seconds = "import time; t = time.process_time(); import rlvlm; print(time.process_time() - t)"
    import_s = min(float(run(python, "-c", seconds)) for _ in range(3))
    assert import_s < 0.5
    sys.stdout.write(f"{size_mb:.0f} MB installed in {install_s:.0f} s; import rlvlm takes {import_s:.3f} CPU s\n")

    small = Suite(name="small", tasks=("push_block",), episodes=8, pairs=8, videos=3, controls=3, tracks=1)
    freeze(small, tmp_path / "small.zip", num_frames=4, size_px=48, asks_turns=False, seed=0)
    rlvlm_command, key = tmp_path / "light" / "bin" / "rlvlm", tmp_path / "key"
    key.write_text("k" * MIN_TOKEN_CHARS)
    key.chmod(0o600)
    with ApiServer().running() as url:
        judge = ["--judge.backend", "openai", "--judge.model", "m", "--judge.api.base-url", url]
        judge += ["--judge.api.key-file", key]
        run(rlvlm_command, "judge-bench", "small.zip", *judge, "--out", tmp_path / "bench")
    row = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert row["bench"]["is_whole"] and row["judge"]["judge"].startswith("openai:m@")
    (tmp_path / "own.py").write_text("def bright(images, goal):\n    return images.mean((1, 2, 3)) / 255\n")
    run(rlvlm_command, "judge-bench", "small.zip", "--judge.backend", "own:bright", "--out", tmp_path / "own")
    assert (tmp_path / "own" / "bench.html").exists()
    run(rlvlm_command, "doctor")
