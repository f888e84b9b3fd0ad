"""What the tests of adapters share: docs/in_your_framework.md, run in the environment of each framework."""

import os
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from http_edge import Edge

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "in_your_framework.md"


def needs(name: str, script: str = "") -> pytest.MarkDecorator:
    """A mark of tests that need an environment of `environments/`."""
    script = script or f"environments/frameworks.sh {name}"
    return pytest.mark.skipif(not python_of(name).exists(), reason=f"needs the environment of {name}: {script}")


def python_of(name: str) -> Path:
    return Path(os.environ.get("ENVS", ROOT / ".envs")) / name / "bin" / "python"


def snippet(heading: str, language: str = "python") -> str:
    """What stands in a language under a heading of the page, as one program."""
    section = re.split(r"^#+ ", PAGE.read_text().partition(f" {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE))


@contextmanager
def served(folder: Path, **config):
    """A judge of brightness at a port; yields its address and a home with its token."""
    edge = Edge(folder / "edge", **config)
    home = folder / "home" / ".rlvlm"
    home.mkdir(parents=True)
    (home / "token").write_text(edge.token)
    (home / "token").chmod(0o600)
    with edge.listening() as url:
        yield url, home.parent


def run(name: str, program: str, folder: Path) -> str:
    """What a program prints in the environment of a framework, with `http://127.0.0.1:8123` being a judge's server."""
    with served(folder) as (url, home):
        file = folder / "program.py"
        file.write_text(program.replace("http://127.0.0.1:8123", url))
        environment = {**os.environ, "HOME": str(home), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([python_of(name), file], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-5_000:]
    return done.stdout
