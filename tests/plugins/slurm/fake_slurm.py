"""sbatch, srun and scontrol that run jobs on this machine: several node names, all of them here.

`install(folder)` puts them into `folder/bin`; state lies in `folder`. A requeued job starts again as soon as it has
ended, an option that is not known here is an error, and `signal(folder, job, number)` is what SLURM does at a time
limit: the batch shell alone is told.
"""

import argparse
import json
import os
import signal as signals
import subprocess
import sys
import time
from pathlib import Path

LONGEST_S = 500.0


def install(folder: Path) -> dict[str, str]:
    """Makes the commands; returns the variables with which they are found."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("sbatch", "srun", "scontrol"):
        file = bin_folder / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        file.chmod(0o755)
    return {"PATH": f"{bin_folder}:{os.environ['PATH']}", "FAKE_SLURM": str(folder)}


def signal(folder: Path, job: str, number: signals.Signals) -> None:
    """Sends a signal to the batch shell of a job."""
    os.kill(int((folder / f"{job}.pid").read_text()), number)


def wait(folder: Path, job: str) -> dict[str, list[int]]:
    """Waits for a job's end; `codes` has the exit code of each sitting."""
    end = time.monotonic() + LONGEST_S
    while not (folder / f"{job}.json").exists():
        if time.monotonic() > end:
            raise AssertionError(f"job {job} does not end")
        time.sleep(0.1)
    return json.loads((folder / f"{job}.json").read_text())


def _sbatch(words: list[str], folder: Path) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--parsable", action="store_true")
    parser.add_argument("script")
    given = parser.parse_args(words)
    options = argparse.ArgumentParser(allow_abbrev=False)
    names = "job-name output nodes ntasks-per-node cpus-per-task mem time open-mode signal gpus-per-node partition qos"
    for name in names.split():
        options.add_argument(f"--{name}")
    options.add_argument("--requeue", action="store_true")
    text = Path(given.script).read_text()
    header = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    asked = vars(options.parse_args(header))
    if asked["partition"] == "none":
        sys.stderr.write("sbatch: error: invalid partition specified: none\n")
        return 1
    job = str(1 + max((int(file.stem) for file in folder.glob("*.sh")), default=0))
    (folder / f"{job}.sh").write_text(text)  # as slurmd does: a later change of the file changes no job
    # A new session and no pipe of the caller's, like a job on another machine.
    command = [sys.executable, __file__, "slurmd", job, json.dumps(asked)]
    with open(folder / f"{job}.slurmd", "w") as log:
        subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    sys.stdout.write("sbatch: Verify job submission ...\n12 jobs are before yours\n")  # as sites' plugins do
    sys.stdout.write(f"{job};cluster\n" if given.parsable else f"Submitted batch job {job}\n")
    return 0


def _slurmd(job: str, asked: dict[str, str], folder: Path) -> int:
    nodes = int(asked["nodes"])
    known = os.environ | {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
        "SLURM_CPUS_PER_TASK": asked["cpus_per_task"],
    }
    codes: list[int] = []
    requeue = folder / f"{job}.requeue"
    while not codes or requeue.exists():
        requeue.unlink(missing_ok=True)
        known |= {"SLURM_RESTART_COUNT": str(len(codes))} if codes else {}
        with open(asked["output"], "a") as log:
            shell = subprocess.Popen(["bash", str(folder / f"{job}.sh")], env=known, stdout=log, stderr=log)
        (folder / f"{job}.pid").write_text(str(shell.pid))
        codes.append(shell.wait())
    (folder / f"{job}.partial").write_text(json.dumps({"codes": codes}))
    (folder / f"{job}.partial").rename(folder / f"{job}.json")
    return 0


def _srun(words: list[str], _: Path) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("nodes", "ntasks", "nodelist", "cpus-per-task"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    names = given.nodelist.split(",")
    if not int(given.nodes) == int(given.ntasks) == len(names):
        sys.stderr.write("srun: error: nodes, tasks and names differ\n")
        return 1
    tasks = [subprocess.Popen(given.command, env=os.environ | {"SLURMD_NODENAME": name}) for name in names]
    return max(abs(task.wait()) for task in tasks)


def _scontrol(words: list[str], folder: Path) -> int:
    match words:
        case ["show", "hostnames", nodes]:
            last = int(nodes.removeprefix("node[1-").removesuffix("]"))
            sys.stdout.write("".join(f"node{number}\n" for number in range(1, last + 1)))
        case ["requeue", job]:
            (folder / f"{job}.requeue").touch()
        case _:
            sys.stderr.write(f"scontrol: invalid request {words}\n")
            return 1
    return 0


if __name__ == "__main__":
    state = Path(os.environ["FAKE_SLURM"])
    if sys.argv[1] == "slurmd":
        sys.exit(_slurmd(sys.argv[2], json.loads(sys.argv[3]), state))
    sys.exit({"sbatch": _sbatch, "srun": _srun, "scontrol": _scontrol}[sys.argv[1]](sys.argv[2:], state))
