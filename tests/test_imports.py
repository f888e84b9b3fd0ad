"""What benchmarks, notebooks and examples take from rlvlm is there: pyright reads none of them, and names change."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

from rlvlm.core.guests import guests

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
SCRIPTS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("benchmarks/peers/*.py"), *ROOT.glob("examples/**/*.py")])
NEAR = {ROOT / "tests", ROOT / "examples"}
PEERS = {"stable_baselines3", "sbx", "datasets", "trl"}
"""In an environment of their own."""


def check_imports(source: str, folder: Path = ROOT) -> None:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        root, names = node.module.split(".")[0], [alias.name for alias in node.names]
        if (guest := re.match(r"(?:(?:rlvlm|tests)\.)?plugins\.(\w+)", node.module)) and guest[1] not in guests():
            continue  # a script about a guest that was taken out
        bases = [base for base in NEAR | {folder} if (base / root).is_dir() or (base / f"{root}.py").exists()]
        if root in ("rlvlm", "pocket_models"):
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError as error:  # a guest for a peer, whose environment is another one
                assert error.name in PEERS, error
                continue
            for name in names:
                assert hasattr(module, name) or importlib.import_module(f"{node.module}.{name}")
        elif bases:  # what a script finds through sys.path, or beside itself
            files = [base / f"{node.module.replace('.', '/')}.py" for base in bases]
            text = "".join(file.read_text() for file in files if file.exists())
            assert text, f"there is no module {node.module}"
            assert all(name in text for name in names), f"{node.module} lacks some of {names}"
        else:
            assert root in PEERS or importlib.util.find_spec(root), f"there is no module {root}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_name_that_a_script_imports_is_there(path):
    check_imports(path.read_text(), path.parent)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_name_that_a_notebook_imports_is_there(path):
    cells = nbformat.read(path, as_version=4).cells
    for cell in cells:
        if cell.cell_type == "code" and not cell.source.startswith(("%", "!")):
            check_imports(cell.source)
