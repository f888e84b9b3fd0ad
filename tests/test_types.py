"""pyright at 0 errors, as a test: it keeps one core, so it runs beside the others and not before them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_pyright_finds_no_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        env=os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
