"""`rlvlm doctor`: checks this machine's requirements for a run, and suggests fixes for failures."""

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.text import Text

from rlvlm.core.console.arguments import parse
from rlvlm.core.console.screen import QuietConsole
from rlvlm.core.errors import EXIT_DONE, MachineError, RunError
from rlvlm.core.guests import guests
from rlvlm.core.install import TRAIN_FIX, is_kit
from rlvlm.envs.rendering import BACKENDS, FIX, try_renderer
from rlvlm.judges.config import POCKET_FIX
from rlvlm.pocket.models import weights_folder
from rlvlm.runs.files.checkpoints import VARIABLE as SCRATCH
from rlvlm.runs.files.environment import PACKAGES, gpu_names, package_version, usable_cores
from rlvlm.runs.start.preflight import cluster_address, free_port, port_is_free

GIB = 2**30
DISK_BYTES = 2 * GIB
MEMORY_BYTES = 4 * GIB
SHM_BYTES = 256 * 2**20
DASHBOARD_PORT = 8265


@dataclass(frozen=True)
class DoctorArguments:
    """Check what a run needs of this machine, and suggest fixes for failures."""

    json: bool = False
    """Print one JSON object instead of lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Result of one check."""

    name: str
    found: str
    fix: str = ""
    """Fix for a failure; empty if the check passed."""
    is_essential: bool = True
    """Whether no run works without it."""

    @property
    def is_ok(self) -> bool:
        """Whether the check passed."""
        return not self.fix


def command(words: Sequence[str], prog: str) -> int:
    """Runs `doctor [--json]`: prints the findings, and whether runs work here."""
    arguments = parse(DoctorArguments, words, prog)
    findings = [finding for check in CHECKS for finding in _findings(check)]
    # a failure that is not essential is only a note
    is_fit = all(finding.is_ok for finding in findings if finding.is_essential)
    if arguments.json:
        report = {"is_fit": is_fit, "findings": [asdict(finding) | {"is_ok": finding.is_ok} for finding in findings]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return EXIT_DONE if is_fit else MachineError.exit_code
    console = QuietConsole(soft_wrap=True)
    failed = {True: ("FAIL", "red"), False: ("note", "yellow")}
    for finding in findings:
        mark = ("ok  ", "green") if finding.is_ok else failed[finding.is_essential]
        console.print(Text.assemble(mark, f"  {finding.name:<18}{finding.found}"))
        if finding.fix:
            console.print(Text(f"      fix: {finding.fix}", style="bold"))
    fit = "This machine can measure and ask judges." if is_kit() else "This machine can run rlvlm."
    console.print(fit if is_fit else "This machine needs the fixes above first.")
    return EXIT_DONE if is_fit else MachineError.exit_code


def _findings(check: Callable[[], Iterator[CheckResult]]) -> Iterator[CheckResult]:
    """Yields the findings of a check; an exception is a finding too, and the other checks go on."""
    try:
        yield from check()
    except Exception as error:  # foreign packages and the machine's own state may fail in any way
        place = traceback.extract_tb(error.__traceback__)[-1]
        found = f"{type(error).__name__}: {error} (in {place.filename}, line {place.lineno})"
        yield CheckResult(name=check.__name__, found=found, fix="mend what the message names; then again")


def software() -> Iterator[CheckResult]:
    """Checks Python, the packages, the pocket judge's weights, and whether LIBERO's packages can be imported."""
    fix = "" if (3, 11) <= sys.version_info[:2] <= (3, 13) else "use Python 3.11, 3.12 or 3.13"
    yield CheckResult(name="python", found=sys.version.split()[0], fix=fix)
    versions = {name: package_version(name) for name in PACKAGES}
    if is_kit():
        versions = {name: version for name, version in versions.items() if version is not None}
        kit = "the judge's kit, without torch, Ray and simulators"
        yield CheckResult(name="install", found=kit, fix=f"to train: {TRAIN_FIX}", is_essential=False)
    missing = [name for name, version in versions.items() if version is None]
    found = f"missing: {', '.join(missing)}" if missing else ", ".join(f"{n} {v}" for n, v in versions.items())
    yield CheckResult(name="packages", found=found, fix="make setup" if missing else "")
    added = {
        name: [*guest.commands, *(f"judge.backend {backend}" for backend in guest.judges)] or [guest.about]
        for name, guest in guests().items()
    }
    found = "; ".join(f"{name}: {', '.join(adds)}" for name, adds in added.items())
    yield CheckResult(name="guests", found=found or "none")
    folder = weights_folder()
    # the folder may exist without its weights
    size = sum(file.stat().st_size for file in folder.iterdir()) if any(folder.glob("*.safetensors")) else 0
    found = f"{size / 2**20:.0f} MiB of weights" if size else f"no weights in {folder}"
    yield CheckResult(name="pocket judge", found=found, fix="" if size else POCKET_FIX)
    if is_kit():
        return
    from rlvlm.envs.robosuite.scene import load  # MuJoCo is not needed for help

    found, fix = "its packages load", ""
    try:
        load("libero.libero.envs")  # imported, since an installed package may lack its assets
    except MachineError as error:
        found, fix = f"{error}; no other task does", error.fix
    except Exception as error:  # foreign packages may fail in any way
        found, fix = f"{type(error).__name__}: {error}", "pip install --force-reinstall '.[libero]'"
    yield CheckResult(name="libero", found=found, fix=fix, is_essential=False)


def rendering() -> Iterator[CheckResult]:
    """Checks whether images can be drawn off-screen, and with which backends."""
    if is_kit():
        return
    tried = {backend: try_renderer(backend) for backend in BACKENDS}
    # any working one will do, unless MUJOCO_GL insists on one that does not work
    working = [backend for backend, failure in tried.items() if failure is None]
    found = "; ".join(f"{backend}: {failure or 'works'}" for backend, failure in tried.items())
    fix = "" if working else FIX
    forced = os.environ.get("MUJOCO_GL", "").strip().lower()
    if forced and forced not in working:
        found, fix = f"MUJOCO_GL={forced}; {found}", fix or "unset MUJOCO_GL"
    yield CheckResult(name="rendering", found=found, fix=fix)


def memory() -> Iterator[CheckResult]:
    """Checks main memory and cores, shared memory, and GPUs."""
    free = psutil.virtual_memory().available
    fix = "" if free >= MEMORY_BYTES else f"end other programs: a run takes up to {MEMORY_BYTES / GIB:.0f} GiB"
    yield CheckResult(name="memory and cores", found=f"{free / GIB:.1f} GiB available, {usable_cores()} cores", fix=fix)
    # Ray's object store is there; if it is too small, Ray uses a slower file on disk
    shm = Path("/dev/shm")
    free = shutil.disk_usage(shm).free if shm.is_dir() else 0
    fix = "" if free >= SHM_BYTES else "give the container more: docker run --shm-size=1g"
    yield CheckResult(name="shared memory", found=f"{free / GIB:.1f} GiB in {shm}", fix=fix, is_essential=False)
    yield CheckResult(name="gpu", found=", ".join(gpu_names()) or "none; the pocket judge does not need one")


def disks() -> Iterator[CheckResult]:
    """Checks the disk space for runs, temporary files and checkpoints, and the home folder, which Ray needs."""
    found, is_ok = _tried_folder(Path.home(), 0)
    yield CheckResult(name="home folder", found=found, fix="" if is_ok else "export HOME=/tmp/home")
    free = shutil.disk_usage(Path.cwd()).free
    fix = "" if free >= DISK_BYTES else "free some space, or use --out on another disk"
    yield CheckResult(name="disk here", found=f"{free / GIB:.1f} GiB free", fix=fix)
    root = Path(tempfile.gettempdir())
    found, is_ok = _tried_folder(root, GIB)
    fix = "" if is_ok else f"free some space in {root}, or export TMPDIR=/tmp"
    yield CheckResult(name="temporary folder", found=found, fix=fix)
    found, is_ok = f"{SCRATCH} is not set; checkpoints are kept in the run's folder", True
    if scratch := os.environ.get(SCRATCH, ""):
        found, is_ok = _tried_folder(Path(scratch).expanduser(), 0)
    fix = "" if is_ok else f"unset {SCRATCH}, or name a folder you may write to"
    yield CheckResult(name="scratch", found=found, fix=fix, is_essential=False)


def network() -> Iterator[CheckResult]:
    """Checks the cluster that RAY_ADDRESS names, and ports on the loopback address."""
    try:
        found, fix = cluster_address() or "RAY_ADDRESS is not set: a run starts its own Ray", ""
    except RunError as error:
        found, fix = str(error), error.fix
    yield CheckResult(name="ray cluster", found=found, fix=fix)
    try:
        free_port()
    except OSError as error:  # some containers have no loopback interface, over which Ray's processes talk
        yield CheckResult(name="ports", found=f"no loopback port: {error.strerror}", fix="ip link set lo up")
        return
    found, fix = f"loopback works, {DASHBOARD_PORT} is free for a dashboard", ""
    if not port_is_free(DASHBOARD_PORT):
        found, fix = f"{DASHBOARD_PORT} is taken", "only for --track.dashboard: choose another --track.dashboard-port"
    yield CheckResult(name="ports", found=found, fix=fix, is_essential=False)


CHECKS: tuple[Callable[[], Iterator[CheckResult]], ...] = (software, rendering, memory, disks, network)


def _tried_folder(folder: Path, min_bytes: int) -> tuple[str, bool]:
    """Returns the free space of a folder, or why it cannot be written, and whether that suffices."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # permissions alone say too little: the disk may be read-only, or a quota used up
        with tempfile.NamedTemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder}: {error.strerror}", False
    return f"{folder}, {free / GIB:.1f} GiB free", free >= min_bytes
