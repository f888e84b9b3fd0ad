"""The Makefile's set-up, in a folder of its own; nothing is downloaded."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_a_python_that_is_not_allowed_leaves_no_environment(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "constraints.txt").touch()
    # the range is read, so another one makes this Python a wrong one
    (tmp_path / "pyproject.toml").write_text('requires-python = ">=3.6,<3.7"\n')
    made = subprocess.run(
        ["make", f"PYTHON={sys.executable}", ".venv/.installed"], cwd=tmp_path, capture_output=True, text=True
    )
    assert made.returncode != 0 and "rlvlm needs Python >=3.6,<3.7" in made.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_first_python_that_is_allowed_makes_the_environment(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "pyproject.toml").write_text('requires-python = ">=3.11,<3.14"\n')
    asked, pythons = tmp_path / "asked", [tmp_path / "old", tmp_path / "without_venv"]
    for python, passes in zip(pythons, (1, 0), strict=True):
        # a stand-in for an interpreter: it says whether it is allowed, and notes what else it is asked for
        script = f'#!/bin/sh\nif [ "$1" = -c ]; then exit {passes}; fi\necho {python.name} $@ >> {asked}\nexit 1\n'
        python.write_text(script)
        python.chmod(0o755)
    make = ["make", f"PYTHON={pythons[0]} {pythons[1]}", ".venv/bin/python"]
    made = subprocess.run(make, cwd=tmp_path, capture_output=True)
    assert made.returncode != 0 and asked.read_text() == "without_venv -m venv .venv\n"


@pytest.mark.slow
def test_a_set_up_that_was_interrupted_can_be_repeated(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=tmp_path, check=True)
    install = "INSTALL=.venv/bin/python -m pip --version #"
    make = ["make", f"PYTHON={sys.executable}", "UV=", install, ".venv/.installed"]
    made = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "pip " in made.stdout and (tmp_path / ".venv" / ".installed").exists()
