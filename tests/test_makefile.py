"""The Makefile's set-up, in a folder of its own; nothing is downloaded."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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
