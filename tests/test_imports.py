"""What benchmarks, notebooks and examples take from rlvlm is there: pyright reads none of them, and names change."""

import ast
import importlib
import importlib.util
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
SCRIPTS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("benchmarks/peers/*.py"), *ROOT.glob("examples/**/*.py")])


PEERS = {"stable_baselines3", "sbx"}
"""In an environment of their own."""


def check_imports(source: str, folder: Path = ROOT) -> None:
    for node in ast.walk(ast.parse(source)):
        root = (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else ""
        is_near = any(
            (base / f"{root}.py").exists() or (base / root).is_dir() for base in (folder, ROOT, ROOT / "tests")
        )
        assert not root or root in PEERS or is_near or importlib.util.find_spec(root), f"there is no module {root}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rlvlm":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_name_that_a_script_imports_is_there(path: Path) -> None:
    check_imports(path.read_text(), path.parent)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_name_that_a_notebook_imports_is_there(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    for cell in cells:
        if cell.cell_type == "code" and not cell.source.startswith(("%", "!")):
            check_imports(cell.source)
