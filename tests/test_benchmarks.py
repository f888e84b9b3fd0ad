"""What the benchmarks take from rlvlm is there: they are commands that no test runs, and names change."""

import ast
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
BENCHMARKS = sorted([*FOLDER.glob("*.py"), *FOLDER.glob("peers/*.py")])


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_every_name_that_a_benchmark_imports_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rlvlm":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")
