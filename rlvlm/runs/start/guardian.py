"""A small process beside a run that ends processes left by a killed run. Started with every Ray of our own.

Ray's own processes notice that their driver was killed, but two of them take a minute, because they report to a server
that died with it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROUNDS, PAUSE_S = 50, 0.2
"""Number of searches for surviving processes, and the pause between them in seconds."""


@contextmanager
def guarded_folder(folder: Path) -> Iterator[None]:
    """Ensures that, however this process ends, processes with open files in `folder` end and the folder is removed.

    Args:
        folder: folder of this run alone; its processes are identified by their log files there.
    """
    # light: it imports no Ray, and lives as long as the run
    command = [sys.executable, "-m", __name__, str(folder), str(os.getpid())]
    # In its own session, so that a signal to the run's process group does not reach it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield  # leaving the block closes the pipe and waits


def users_of(folder: Path) -> list[int]:
    """Returns the processes that have a file in `folder` open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # their log files: Ray's processes keep them open for life, whatever their parent
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
        if any(link.startswith(f"{folder}/") for link in links):
            found.append(int(process.name))
    return found


def sweep(folder: Path, spared: int) -> None:
    """Ends the users of `folder`, except the process `spared`, and removes the folder."""
    # repeatedly: a process may have started another just before it ended
    for _ in range(ROUNDS):
        users = [pid for pid in users_of(folder) if pid != spared]
        if not users:
            break
        for pid in users:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(PAUSE_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.read()  # returns when the run closes its end, or has died
    sweep(Path(sys.argv[1]), spared=int(sys.argv[2]))
