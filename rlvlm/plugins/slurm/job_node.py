"""One node of a job's own Ray: `python -m rlvlm.plugins.slurm.job_node FOLDER`, once per node.

`cluster/slurm.sh` starts it. The nodes meet in a shared folder: the first writes its token and its address there, the
others read them, and `ready` appears when all have joined. They end when the folder is removed, not at a signal: SLURM
sends SIGTERM to every process of a job, and the run needs its judge until it has saved.

Every port was assigned by the system, and files are in a folder of this node alone, so jobs that share a machine do not
collide.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
import tyro

from rlvlm.core.console.boxes import guarded
from rlvlm.core.console.signals import ASKED_BY
from rlvlm.core.disk import write_whole
from rlvlm.core.errors import EXIT_DONE, MachineError
from rlvlm.runs.files.environment import usable_cores
from rlvlm.runs.start.guardian import guarded_folder
from rlvlm.runs.start.ray_session import make_parent, start_ray, store_room, write_token

POLL_S = 0.5


@dataclass(frozen=True)
class NodeArguments:
    """Start one node of a job's own Ray, and keep it until FOLDER goes away."""

    folder: tyro.conf.Positional[Path]
    """Folder shared by all nodes of the job."""
    nodes: int = 1
    """Number of nodes of the whole job, >= 1."""
    head: tyro.conf.FlagCreatePairsOff[bool] = False
    """Whether this is the first node, which the others join."""
    wait_s: float = 600.0
    """Maximum wait for the other nodes, seconds."""


def main() -> int:
    """Reads the command line and keeps the node; returns the exit code."""
    for number in ASKED_BY:
        signal.signal(number, lambda *_: None)  # ignored here alone: child processes still end at a signal
    arguments = tyro.cli(NodeArguments)
    return guarded(lambda: keep_node(arguments))


def keep_node(arguments: NodeArguments) -> int:
    """Starts the node and returns when the job's folder is removed.

    Raises:
        MachineError: Ray does not start here or ends too early, or not all nodes join in time.
    """
    parent = make_parent()
    with guarded_folder(parent), (_head if arguments.head else _member)(parent, arguments) as check:
        # the job's script removes the folder; a signal would reach the nodes before the run has saved
        while arguments.folder.is_dir():
            check()
            time.sleep(POLL_S)
    return EXIT_DONE


@contextmanager
def _head(parent: Path, arguments: NodeArguments) -> Iterator[Callable[[], None]]:
    """Runs the first node; announces its address to the others, and their arrival to the job's script."""
    folder = arguments.folder
    write_token(folder)  # before the address, for which the others wait
    start_ray(parent, node_ip=ray.util.get_node_ip_address())
    try:
        address = ray.get_runtime_context().gcs_address
        write_whole(folder / "address", address)
        _wait(
            lambda: sum(node["Alive"] for node in ray.nodes()) >= arguments.nodes,
            arguments,
            f"not all of the job's {arguments.nodes} nodes have joined Ray at {address}",
        )
        write_whole(folder / "ready", "")
        yield lambda: None  # Ray runs in this process: there is no other to check
    finally:
        ray.shutdown()


@contextmanager
def _member(parent: Path, arguments: NodeArguments) -> Iterator[Callable[[], None]]:
    """Runs another node: `ray start --block` as a child; yields a check that raises MachineError once it has ended."""
    address, log = arguments.folder / "address", parent / "start.log"
    _wait(address.is_file, arguments, f"{address} is not there")
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        f"--address={address.read_text()}",
        # 0: the system assigns free ports, so that jobs on one machine do not collide
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--dashboard-agent-listen-port=0",
        f"--num-cpus={usable_cores()}",
        f"--object-store-memory={store_room()}",
        f"--temp-dir={parent / 'r'}",
    ]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)

    def check() -> None:
        if process.poll() is not None:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise MachineError(
                f"Ray ended on {os.uname().nodename}: {lines[-1] if lines else 'it says nothing'}",
                "rlvlm doctor  (on that node: memory, /dev/shm, ports)",
            )

    try:
        yield check
    finally:
        process.terminate()  # the guardian ends what remains
        process.wait()


def _wait(is_so: Callable[[], bool], arguments: NodeArguments, otherwise: str) -> None:
    """Returns once `is_so()`; raises MachineError if the job ends, or that it is `otherwise` after the wait."""
    end = time.monotonic() + arguments.wait_s
    while not is_so():
        if not arguments.folder.is_dir():
            raise MachineError(f"the job ended: {arguments.folder} is gone")
        if time.monotonic() > end:
            fix = "see the job's log for the other nodes' errors"
            raise MachineError(f"{otherwise} after {arguments.wait_s:.0f} s", fix)
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
