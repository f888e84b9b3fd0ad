"""Choice of the OpenGL backend that draws off-screen on this machine. Used by all envs on OpenGL and by `rlvlm doctor`.

The choice is made once: it is written to the environment variable MUJOCO_GL, which child processes inherit.
"""

import logging
import os
import platform
import subprocess
import sys

from rlvlm.core.errors import MachineError

BACKENDS = ("egl", "osmesa")
"""Off-screen backends that need no display, in the order they are tried."""
_INSTALL = {
    "debian": "apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6 libgles2 libopengl0 "
    "libgl1 libglib2.0-0",
    "fedora": "dnf install -y mesa-libEGL mesa-dri-drivers libglvnd-egl libglvnd-gles libglvnd-opengl "
    "libglvnd-glx glib2",
}
"""By distribution: command that installs the backends (EGL alone on Fedora) and, at its end, the libraries of OpenCV,
which robosuite imports. The line for Fedora is untested."""


def install_line() -> str:
    """Returns the command that installs a renderer here; Debian's if the distribution is unknown."""
    if sys.platform == "darwin":
        return "run it on Linux, e.g. in a container of cluster/Dockerfile: macOS has neither EGL nor OSMesa"
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    names = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]  # Ubuntu lists Debian, RHEL lists Fedora
    return next((_INSTALL[name] for name in names if name in _INSTALL), _INSTALL["debian"])


FIX = install_line()
"""Fix to propose when nothing can be drawn."""

_VARIABLE = "MUJOCO_GL"
_LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
_PROBE = """
import ctypes.util, importlib, sys
backend, library = sys.argv[1:]
try:
    context = importlib.import_module("mujoco." + backend).GLContext(16, 16)
    context.make_current()
    context.free()
except Exception:
    # PyOpenGL's own error is that None has no attribute of it
    if library and not ctypes.util.find_library(library):
        sys.exit(f"lib{library} is not installed")
    raise
"""
_LOGGER = logging.getLogger(__name__)


def ensure_renderer() -> str:
    """Returns the backend to draw with: `egl`, `osmesa` or `glfw`.

    MUJOCO_GL is respected if set. Otherwise it is set to the first of `BACKENDS` that works, tried in a child process
    because a failed attempt breaks OpenGL for the whole process.

    Raises:
        MachineError: MUJOCO_GL names no backend, or none works.
    """
    chosen = os.environ.get(_VARIABLE, "").strip().lower()
    if chosen in (*BACKENDS, "glfw"):
        return chosen
    if chosen:
        raise MachineError(
            f"{_VARIABLE} must be one of {', '.join(BACKENDS)}, glfw or unset, got {chosen!r}", f"unset {_VARIABLE}"
        )
    failures = []
    for backend in BACKENDS:
        failure = try_renderer(backend)
        if failure is None:
            os.environ[_VARIABLE] = backend
            _LOGGER.debug("drawing with %s", backend)
            return backend
        failures.append(f"{backend}: {failure}")
    raise MachineError("no off-screen renderer works; " + "; ".join(failures), FIX)


def try_renderer(backend: str, timeout_s: float = 60.0) -> str | None:
    """Returns None if a child process can open an OpenGL context with `backend`, else the last line of its error.

    Args:
        backend: one of `BACKENDS`, or `glfw`.
        timeout_s: time limit for the child, seconds.
    """
    environment = os.environ | {_VARIABLE: backend, "PYOPENGL_PLATFORM": backend}
    command = [sys.executable, "-c", _PROBE, backend, _LIBRARIES.get(backend, "")]
    try:
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    if child.returncode == 0:
        return None
    lines = [line for line in child.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit status {child.returncode}"
