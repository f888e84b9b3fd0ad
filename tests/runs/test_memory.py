import subprocess
import sys
import time

from rlvlm.runs.memory import MemoryWatch, tree_memory_mb

EATER = "import time; food = b'x' * (100 * 2**20); print(flush=True); time.sleep(60)"


def test_children_count_and_the_peak_stays() -> None:
    before = tree_memory_mb()
    with MemoryWatch(start_mb=7.0, period_s=0.02) as watch:
        child = subprocess.Popen([sys.executable, "-c", EATER], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        deadline = time.monotonic() + 30
        while watch.peak_mb < before + 90 and time.monotonic() < deadline:
            time.sleep(0.02)
        child.kill()
        child.communicate()
    assert before + 90 < watch.peak_mb < before + 250
    assert tree_memory_mb() < before + 50


def test_an_earlier_peak_is_not_forgotten() -> None:
    with MemoryWatch(start_mb=1e6, period_s=0.01) as watch:
        time.sleep(0.05)
    assert watch.peak_mb == 1e6
