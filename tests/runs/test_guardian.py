"""The processes of a run: their memory together, and nothing left of them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlvlm.core.memory import MemoryWatch
from rlvlm.runs.start.guardian import sweep, users_of

USER = "import sys, time; file = open(sys.argv[1], 'w'); print('open', flush=True); time.sleep(60)"


def start_user(file: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", USER, str(file)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "open\n"
    return child


def test_a_sweep_ends_the_processes_of_its_folder_and_no_others(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run2").mkdir()
    user, spared = start_user(tmp_path / "run" / "a.log"), start_user(tmp_path / "run" / "b.log")
    neighbour = start_user(tmp_path / "run2" / "c.log")
    try:
        assert sorted(users_of(tmp_path / "run")) == sorted((user.pid, spared.pid))
        sweep(tmp_path / "run", spared=spared.pid)
        assert user.wait(60) == -signal.SIGKILL
        assert spared.poll() is None and neighbour.poll() is None
        assert not (tmp_path / "run").exists() and (tmp_path / "run2").exists()
    finally:
        for child in (user, spared, neighbour):
            child.kill()
            child.communicate()


GUARDED = """
import os, subprocess, sys
from pathlib import Path
from rlvlm.runs.start.guardian import guarded_folder
folder = Path(sys.argv[1])
with guarded_folder(folder):
    child = subprocess.Popen([sys.executable, '-c', sys.argv[3], str(folder / 'a.log')], stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
    if sys.argv[2] == 'kill':
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_nothing_is_left_whether_a_run_ends_or_is_killed(tmp_path):
    import psutil

    for end in ("kill", "leave"):
        folder = tmp_path / end
        folder.mkdir()
        run = subprocess.run([sys.executable, "-c", GUARDED, str(folder), end, USER], stdout=subprocess.PIPE, text=True)
        assert run.returncode == (-signal.SIGKILL if end == "kill" else 0)
        left = [psutil.Process(int(run.stdout))] if psutil.pid_exists(int(run.stdout)) else []
        _, alive = psutil.wait_procs(left, timeout=20)
        assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)
        guardians = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]
        psutil.wait_procs(guardians, timeout=20)
        assert not folder.exists()


WATCHED = """
import subprocess, sys, time
from rlvlm.core.memory import MemoryWatch, tree_memory_mb
eater = "food = b'x' * (100 * 2**20); print(flush=True); input()"
before = tree_memory_mb()
with MemoryWatch(start_mb=7.0, period_s=0.02) as watch:
    child = subprocess.Popen([sys.executable, "-c", eater], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    deadline = time.monotonic() + 30
    while watch.peak_mb < before + 90 and time.monotonic() < deadline:
        time.sleep(0.02)
    child.communicate(b"enough")
print(before, watch.peak_mb, tree_memory_mb())
"""


def test_children_count_and_the_peak_stays():
    """In a process of its own: the tests' one has a Ray, whose workers come and go."""
    watched = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, check=True)
    before, peak, after = map(float, watched.stdout.split())
    assert before + 90 < peak < before + 250 and after < before + 50


def test_an_earlier_peak_is_not_forgotten():
    with MemoryWatch(start_mb=1e6, period_s=0.01) as watch:
        time.sleep(0.05)
    assert watch.peak_mb == 1e6
