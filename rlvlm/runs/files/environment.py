"""Facts about machine and software of a run, for `environment.json`."""

import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("rlvlm", "ray", "torch", "transformers", "numpy", "gymnasium", "metaworld", "mujoco", "tyro", "av")
"""Packages whose versions can change a result."""


def describe_environment() -> dict[str, Any]:
    """Returns versions, the source commit if there is one, and the hardware; no names of hosts or people."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
        "commit": source_commit(),
        "cpu": _fact(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cpu_cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpu_names(),
        "rendering": os.environ.get("MUJOCO_GL", ""),
    }


def package_version(name: str) -> str | None:
    """Returns the installed version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    """Returns the CPU cores available to this process, >= 1: the minimum of affinity, cgroup quota and SLURM share."""
    cores = len(os.sched_getaffinity(0))
    share = os.environ.get("SLURM_CPUS_ON_NODE", "")
    if share.isdigit():  # not every cluster binds a job's processes to its cores
        cores = max(1, min(cores, int(share)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    # a container's quota in microseconds per period; Python and torch see all of the machine's cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def gpu_names() -> list[str]:
    """Returns the names of the NVIDIA GPUs that the driver lists, without starting CUDA."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [name for file in files if (name := _fact(file, "Model"))]


@functools.cache
def source_commit() -> str | None:
    """Returns the commit of the working tree from which rlvlm is imported, with `+` if files differ from it."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    answers = []
    for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        command = ["git", "-C", str(root), *words]
        try:
            answers.append(
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
            )
        except (OSError, subprocess.SubprocessError):
            return None
    return answers[0] + ("+" if answers[1] else "")


def _fact(file: Path, name: str) -> str:
    """Returns the first value of `name` in a file of lines like `name : value`; empty if there is none."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")
