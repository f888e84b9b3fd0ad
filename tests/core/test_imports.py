"""A command's start is not slowed down by Python's garbage collector, which works again afterwards."""

import gc
import subprocess
import sys

import pytest

from rlvlm.core.imports import uncollected


def test_the_collector_works_again_after_imports() -> None:
    with pytest.raises(ImportError), uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()  # still within the outer one
        raise ImportError
    assert gc.isenabled()


@pytest.mark.slow
def test_a_run_is_prepared_with_few_collections_and_ends_without_any() -> None:
    program = """if True:
        import atexit, gc, sys
        from rlvlm.run import main

        def told():
            print(sum(each["collections"] for each in gc.get_stats()), gc.get_freeze_count() > 100_000)

        before = sum(each["collections"] for each in gc.get_stats())
        atexit.register(told)  # runs last
        main(["push_block", "--plan"])
        print(before, gc.isenabled())
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (before, is_enabled), (after, is_frozen) = (line.split() for line in done.stdout.splitlines()[-2:])
    assert is_enabled == is_frozen == "True"
    assert int(after) - int(before) < 100  # a thousand with it
