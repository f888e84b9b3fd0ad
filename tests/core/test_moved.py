"""Old names of modules that became guests."""

import importlib.util
import subprocess
import sys
import warnings

import pytest

from rlvlm.core.guests import guests
from rlvlm.core.moved import moved_modules

HERE = {old: new for old, new in moved_modules().items() if new.split(".")[2] in guests()}
"""Those of guests that were not taken out."""
QUICK = [
    old for old in ("rlvlm.demonstrations.exchange", "rlvlm.labels.pickles", "rlvlm.judge_bench.entries") if old in HERE
]


@pytest.mark.parametrize("old", QUICK)
def test_an_own_file_may_import_a_module_by_its_name_of_before(old):
    with pytest.warns(DeprecationWarning, match=f"{old} is {moved_modules()[old]} now"):
        module = importlib.import_module(old)
    new = importlib.import_module(moved_modules()[old])
    public = [name for name in vars(new) if not name.startswith("_")]
    assert public and all(getattr(module, name) is getattr(new, name) for name in public)


def test_every_moved_module_is_at_its_new_place_and_no_other_name_is_found():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(importlib.util.find_spec(new) for new in HERE.values())
        for old in ("rlvlm.demonstrations.nowhere", "rlvlm.nothing"):
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module(old)


@pytest.mark.slow
@pytest.mark.skipif("slurm" not in guests(), reason="the guest slurm was taken out")
def test_a_script_of_before_starts_a_module_by_its_old_name():
    words = [sys.executable, "-m", "rlvlm.runs.job_node", "--help"]
    child = subprocess.run(words, capture_output=True, text=True)
    assert child.returncode == 0 and "one node of a job's own Ray" in " ".join(child.stdout.split()), child.stderr
