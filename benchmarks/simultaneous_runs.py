"""Runs started in the same second on one machine: do they share a port, or talk to each other's Ray?

    python benchmarks/simultaneous_runs.py --runs 8

Each run is a whole one, with a Ray, a Serve app and a judge of its own, on an env that costs microseconds. While they
work, all their processes are looked at: a port that processes of two runs listen on is a clash (gRPC shares ports, so
nothing else would tell), and a connection, an open file or a command line that leads into another run is an attachment.
All runs have one seed: in the end their policies must be equal to the byte.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

WORDS = (
    "rlvlm.testing:TINY --steps 200 --reward.model state --feedback.first-step 100 --feedback.every-steps 50 "
    "--feedback.queries 8 --reward-model.ensemble 2 --env.episode-steps 20 --algo.seed-steps 40 "
    "--algo.batch-size 32 --algo.hidden 32 32 --eval.every-steps 100 --eval.episodes 2"
).split()
RAY_FOLDER = re.compile(re.escape(tempfile.gettempdir()) + r"/rlvlm-[a-z0-9_]{8}(?=/|$)")
POLL_S = 2.0
LONGEST_S = 900.0


@dataclass
class Seen:
    """What the processes of one run do at one moment."""

    processes: set[int] = field(default_factory=set)
    listens: set[int] = field(default_factory=set)
    """Ports."""
    reaches: set[int] = field(default_factory=set)
    """Ports that it is connected to."""
    folders: set[str] = field(default_factory=set)
    """Ray's folders that its command lines and open files name."""


@dataclass
class Meetings:
    """What was found over all moments."""

    clashes: set[tuple[int, int, int]] = field(default_factory=set)
    """A port, and the two runs that listened on it."""
    attachments: set[tuple[str, int, int]] = field(default_factory=set)
    """A port or folder of the second run that the first one used."""
    processes: set[int] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    at_once: int = 0
    """Most runs that had a Ray at the same moment."""

    def add(self, moment: list[Seen]) -> None:
        """Adds what the runs do to each other at one moment."""
        for i, one in enumerate(moment):
            self.processes |= one.processes
            self.ports |= one.listens
            for j, other in enumerate(moment):
                if i < j:
                    self.clashes |= {(port, i, j) for port in one.listens & other.listens}
                if i != j:
                    met = (one.reaches & (other.listens - one.listens)) | (one.folders & other.folders)
                    self.attachments |= {(str(what), i, j) for what in met}
        self.at_once = max(self.at_once, sum(bool(listener.listens) for listener in moment))


def look(pid: int) -> Seen:
    """What process `pid` and all below it do now."""
    seen = Seen()
    try:
        run = psutil.Process(pid)
        tree = (run, *run.children(recursive=True))
    except psutil.Error:  # it has ended
        return seen
    for process in tree:
        try:
            names = [" ".join(process.cmdline()), *(file.path for file in process.open_files())]
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        seen.processes.add(process.pid)
        seen.folders |= {found[0] for name in names for found in RAY_FOLDER.finditer(name)}
        seen.listens |= {link.laddr.port for link in connections if link.status == psutil.CONN_LISTEN}
        seen.reaches |= {link.raddr.port for link in connections if link.raddr}
    return seen


def start(out: Path) -> subprocess.Popen[bytes]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "rlvlm.run", *WORDS, "--out", str(out)]
    with open(f"{out}.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=known | {"OMP_NUM_THREADS": "1"})


def race(num_runs: int, root: Path) -> dict[str, object]:
    """Starts the runs, watches them to their end and says what they did to each other."""
    began = time.monotonic()
    children = [start(root / f"run{number}") for number in range(num_runs)]
    started_s = time.monotonic() - began
    meetings = Meetings()
    try:
        while any(child.poll() is None for child in children) and time.monotonic() - began < LONGEST_S:
            meetings.add([look(child.pid) for child in children])
            time.sleep(POLL_S)
    finally:
        for child in children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        codes = [child.wait() for child in children]
    return {
        "runs": num_runs,
        "started_within_s": round(started_s, 2),
        "with_a_ray_at_once": meetings.at_once,
        "finished": codes.count(0),
        "wall_s": round(time.monotonic() - began, 1),
        "processes": len(meetings.processes),
        "ports": len(meetings.ports),
        "port_clashes": len(meetings.clashes),
        "cross_attachments": len(meetings.attachments),
        "distinct_policies": distinct_policies(root),
    }


def distinct_policies(root: Path) -> int:
    """How many different policies the runs have learnt; 1 is right."""
    return len({file.read_bytes() for file in root.glob("run*/checkpoints/last/algorithm/policy.safetensors")})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="simultaneous-") as root:
        figures = race(given.runs, Path(root))
        if figures["finished"] != given.runs:
            sys.stderr.write("".join(log.read_text() for log in sorted(Path(root).glob("*.log"))))
    for name, value in figures.items():
        print(f"{name:>26}  {value}")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    right = {"finished": given.runs, "port_clashes": 0, "cross_attachments": 0, "distinct_policies": 1}
    return 0 if right.items() <= figures.items() else 1


if __name__ == "__main__":
    sys.exit(main())
