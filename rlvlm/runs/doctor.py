"""`rlvlm doctor`, and the checks a run makes before it starts: each tries the thing, and says the fix."""

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

from rlvlm.envs.rendering import BACKENDS, FIX, ensure_renderer, try_renderer
from rlvlm.errors import EXIT_DONE, JudgeUnavailable, MachineError, UsageError
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.environment import PACKAGES, gpu_names, package_version, usable_cores
from rlvlm.runs.folder.scratch import VARIABLE as SCRATCH
from rlvlm.vlms.shipped import weights_folder

GIB = 2**30
DISK_BYTES = 2 * GIB
MEMORY_BYTES = 4 * GIB
SHM_BYTES = 256 * 2**20
DASHBOARD_PORT = 8265
POCKET_FIX = "reinstall rlvlm, or make them anew as rlvlm/pocket/judge/CARD.md says"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check found."""

    name: str
    is_ok: bool
    found: str
    fix: str = ""
    """What mends it; empty when it is ok."""
    is_essential: bool = True
    """Whether a run can do without."""


def examine_machine(as_json: bool) -> int:
    """Tries everything a run needs, prints the findings, and returns the exit code."""
    findings = [check() for check in CHECKS]
    is_fit = all(finding.is_ok for finding in findings if finding.is_essential)
    if as_json:
        report = {"is_fit": is_fit, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _show(findings, is_fit)
    return EXIT_DONE if is_fit else MachineError.exit_code


def check_before_run(config: RunConfig) -> None:
    """Raises what would otherwise stop the run after it has begun.

    Raises:
        UsageError: the judge's model is a folder that is not there, or its store is none that can be used.
        JudgeUnavailable: the pocket judge's weights are missing.
        MachineError: no renderer, or the dashboard's port is taken.
    """
    model = config.judge.model
    if config.asks_judge and not config.judge_goal:
        raise UsageError(
            f"{config.task} has no goal phrase of its own, and the judge is asked about one",
            f'say it in a few words: python -m rlvlm.run {config.task} --goal "reach the flag on the hill"',
        )
    if config.asks_judge and config.judge.ships_weights and not (model or weights_folder().is_dir()):
        raise JudgeUnavailable(f"the pocket judge's weights are not in {weights_folder()}", POCKET_FIX)
    if config.asks_judge and model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
        fix = "give the folder that holds config.json and the weights"
        raise UsageError(f"judge.model {model} is not a folder", fix)
    if config.asks_judge and config.judge.store:
        from rlvlm.labels.store import LabelStore  # numpy is not for those who only ask for help

        LabelStore(Path(config.judge.store).expanduser())
    if config.track.dashboard and not port_is_free(config.track.dashboard_port):
        what = f"port {config.track.dashboard_port} for the Ray dashboard is taken"
        raise MachineError(what, f"choose another: --track.dashboard-port {free_port()}")
    backend = ensure_renderer()
    failure = try_renderer(backend)
    if failure is not None:
        raise MachineError(f"drawing with {backend} does not work: {failure}", FIX)


def port_is_free(port: int) -> bool:
    """Whether this process could listen on a loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _python() -> Finding:
    is_ok = sys.version_info[:2] == (3, 11)
    return Finding(name="python", is_ok=is_ok, found=sys.version.split()[0], fix="" if is_ok else "use Python 3.11")


def _packages() -> Finding:
    missing = [name for name in PACKAGES if package_version(name) is None]
    found = ", ".join(f"{name} {package_version(name)}" for name in PACKAGES if name not in missing)
    if missing:
        return Finding(name="packages", is_ok=False, found=f"missing: {', '.join(missing)}", fix="make setup")
    return Finding(name="packages", is_ok=True, found=found)


def _rendering() -> Finding:
    tried = {backend: try_renderer(backend) for backend in BACKENDS}
    working = [backend for backend, failure in tried.items() if failure is None]
    found = "; ".join(f"{backend}: {failure or 'draws'}" for backend, failure in tried.items())
    forced = os.environ.get("MUJOCO_GL", "").strip().lower()
    if forced and forced not in working:
        fix = "unset MUJOCO_GL" if working else FIX
        return Finding(name="rendering", is_ok=False, found=f"MUJOCO_GL={forced}; {found}", fix=fix)
    return Finding(name="rendering", is_ok=bool(working), found=found, fix="" if working else FIX)


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    fix = "" if free >= MEMORY_BYTES else f"end other programs: a run takes up to {MEMORY_BYTES / GIB:.0f} GiB"
    found = f"{free / GIB:.1f} GiB available, {usable_cores()} cores"
    return Finding(name="memory and cores", is_ok=not fix, found=found, fix=fix)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    fix = "" if free >= DISK_BYTES else "free some space, or use --out on another disk"
    return Finding(name="disk here", is_ok=not fix, found=f"{free / GIB:.1f} GiB free", fix=fix)


def _temporary() -> Finding:
    root = tempfile.gettempdir()
    try:
        with tempfile.NamedTemporaryFile(dir=root):
            free = shutil.disk_usage(root).free
    except OSError as error:
        found = f"{root}: {error.strerror}"
        return Finding(name="temporary folder", is_ok=False, found=found, fix="export TMPDIR=/tmp")
    fix = "" if free >= GIB else f"free some space in {root}"
    return Finding(name="temporary folder", is_ok=not fix, found=f"{root}, {free / GIB:.1f} GiB free", fix=fix)


def _scratch() -> Finding:
    root = os.environ.get(SCRATCH, "")
    if not root:
        return Finding(name="scratch", is_ok=True, found=f"{SCRATCH} is not set; checkpoints lie in the run's folder")
    try:
        Path(root).expanduser().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=Path(root).expanduser()):
            free = shutil.disk_usage(Path(root).expanduser()).free
    except OSError as error:
        found, fix = f"{root}: {error.strerror}", f"unset {SCRATCH}, or name a folder you may write to"
        return Finding(name="scratch", is_ok=False, found=found, fix=fix, is_essential=False)
    return Finding(name="scratch", is_ok=True, found=f"{root}, {free / GIB:.1f} GiB free")


def _shared_memory() -> Finding:
    shm = Path("/dev/shm")
    free = shutil.disk_usage(shm).free if shm.is_dir() else 0
    fix = "" if free >= SHM_BYTES else "give the container more: docker run --shm-size=1g"
    found = f"{free / GIB:.1f} GiB in {shm}"
    return Finding(name="shared memory", is_ok=not fix, found=found, fix=fix, is_essential=False)


def _ports() -> Finding:
    try:
        free_port()
    except OSError as error:
        return Finding(name="ports", is_ok=False, found=f"no loopback port: {error.strerror}", fix="ip link set lo up")
    if port_is_free(DASHBOARD_PORT):
        return Finding(name="ports", is_ok=True, found=f"loopback works, {DASHBOARD_PORT} is free for a dashboard")
    fix = "only for --track.dashboard: choose another with --track.dashboard-port"
    return Finding(name="ports", is_ok=False, found=f"{DASHBOARD_PORT} is taken", fix=fix, is_essential=False)


def _pocket_weights() -> Finding:
    folder = weights_folder()
    if not any(folder.glob("*.safetensors")):
        return Finding(name="pocket judge", is_ok=False, found=f"no weights in {folder}", fix=POCKET_FIX)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return Finding(name="pocket judge", is_ok=True, found=f"{size / 2**20:.0f} MiB of weights")


def _gpu() -> Finding:
    names = gpu_names()
    return Finding(name="gpu", is_ok=True, found=", ".join(names) or "none; the pocket judge does not need one")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _packages,
    _rendering,
    _pocket_weights,
    _memory,
    _disk,
    _temporary,
    _scratch,
    _shared_memory,
    _ports,
    _gpu,
)


def _show(findings: list[Finding], is_fit: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    failed = {True: ("FAIL", "red"), False: ("note", "yellow")}
    for finding in findings:
        mark = ("ok  ", "green") if finding.is_ok else failed[finding.is_essential]
        console.print(Text.assemble(mark, f"  {finding.name:<18}{finding.found}"))
        if finding.fix:
            console.print(Text(f"      fix: {finding.fix}", style="bold"))
    console.print("This machine can run rlvlm." if is_fit else "This machine needs the fixes above first.")
