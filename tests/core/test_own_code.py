"""Users' own files are imported as they stand there, whatever compiled code lies beside them."""

import importlib.util
import os
import py_compile
import subprocess
import sys

import pytest

from rlvlm.core import own_code, trust
from rlvlm.core.errors import UsageError
from rlvlm.core.references import load_object
from rlvlm.envs.registry import find_task

SHOWN = "import beside\nNAME = 'shown, and ' + beside.NAME\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with `mine.py` and what it imports; beside both lies compiled code that says something else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # as the command line has it
    monkeypatch.setattr(own_code, "_digests", {})
    monkeypatch.delenv("RLVLM_OWN_CODE", raising=False)
    for name, text in (("mine", SHOWN), ("beside", "NAME = 'shown'\n")):
        monkeypatch.delitem(sys.modules, name, raising=False)
        hidden, file = tmp_path / f"{name}_hidden.py", tmp_path / f"{name}.py"
        hidden.write_text("NAME = 'hidden'\n")
        file.write_text(text)
        # Python does not compare it with the source
        place = importlib.util.cache_from_source(str(file))
        py_compile.compile(str(hidden), place, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        hidden.unlink()
    yield tmp_path
    for name in ("mine", "beside"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("reference", ["mine:NAME", "mine.py:NAME", "./mine.py:NAME"])
def test_a_file_runs_with_its_own_imports(folder, reference):
    assert load_object(reference, "reward.source") == "shown, and shown"


def test_a_task_runs_as_it_stands_there(folder):
    with pytest.raises(UsageError, match="got str"):
        find_task("mine:NAME")
    assert sys.modules["mine"].NAME == "shown, and shown"


def test_a_file_that_changed_after_it_was_compared_is_not_run(folder):
    trust.code_digests(["mine:NAME"])
    (folder / "mine.py").write_text("NAME = 'swapped'\n")
    with pytest.raises(UsageError, match="has changed since it was looked at"):
        load_object("mine:NAME", "reward.source")
    trust.code_digests(["mine:NAME"])
    assert load_object("mine:NAME", "reward.source") == "swapped"
    # once it runs, its author may edit it and load it again, as in a notebook
    (folder / "mine.py").write_text("NAME = 'edited'\n")
    assert importlib.reload(sys.modules["mine"]).NAME == "edited"


def test_processes_that_a_run_starts_do_the_same(folder):
    def said(*first: str) -> str:
        words = [sys.executable, "-c", "; ".join([*first, "import mine", "print(mine.NAME)"])]
        found = subprocess.run(
            words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=False
        )
        return found.stdout.strip() or found.stderr.strip().splitlines()[-1]

    path = os.pathsep.join([str(folder), *sys.path])
    assert said() == "hidden", "as any Python does"
    trust.code_digests(["mine:NAME"])
    assert said("import rlvlm.core.own_code") == "shown, and shown"
    (folder / "mine.py").write_text("NAME = 'swapped'\n")
    assert "has changed since it was looked at" in said("import rlvlm.core.own_code")
