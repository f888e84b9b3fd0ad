"""The Makefile's set-up, in a folder of its own; nothing is downloaded."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_a_python_that_is_not_allowed_leaves_no_environment(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "constraints.txt").touch()
    # the range is read, so another one makes this Python a wrong one
    (tmp_path / "pyproject.toml").write_text('requires-python = ">=3.6,<3.7"\n')
    made = subprocess.run(
        ["make", f"PYTHON={sys.executable}", ".venv/.installed"], cwd=tmp_path, capture_output=True, text=True
    )
    assert made.returncode != 0 and "rlvlm needs Python >=3.6,<3.7" in made.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.slow
def test_a_set_up_that_was_interrupted_can_be_repeated(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=tmp_path, check=True)
    install = "INSTALL=.venv/bin/python -m pip --version #"
    make = ["make", f"PYTHON={sys.executable}", "UV=", install, ".venv/.installed"]
    made = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "pip " in made.stdout and (tmp_path / ".venv" / ".installed").exists()
