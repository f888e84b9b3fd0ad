"""A small process beside a run that ends what a killed run leaves behind. Started with every Ray of our own.

Ray's own processes notice that their driver was killed, but two of them take a minute over it, because they report to a
server that died with it.
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
"""How often the survivors are looked for, and the pause between."""


@contextmanager
def guarded_folder(folder: Path) -> Iterator[None]:
    """Whatever ends this process: the processes with files open in `folder` end too, and the folder goes away.

    Args:
        folder: of this run alone; its processes are known by their log files there.
    """
    # light: it imports no Ray, and lives as long as the run
    command = [sys.executable, "-m", __name__, str(folder), str(os.getpid())]
    # In a session of its own, so that a signal to the whole group of the run does not reach it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield  # leaving the block closes the pipe and waits


def users_of(folder: Path) -> list[int]:
    """Processes that have a file in `folder` open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # its log files: Ray's processes keep them open as long as they live, under any parent
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
        if any(link.startswith(f"{folder}/") for link in links):
            found.append(int(process.name))
    return found


def sweep(folder: Path, spared: int) -> None:
    """Ends the users of `folder`, apart from process `spared`, and removes it."""
    # again and again: a process that ends may have started another just before
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
    sys.stdin.read()  # ends when the run closes its side, or is gone
    sweep(Path(sys.argv[1]), spared=int(sys.argv[2]))
