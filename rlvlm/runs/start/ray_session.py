"""Ray for the duration of a command: the cluster of the present job, or a private one that ends with the process."""

import itertools
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private.node import Node

from rlvlm.core.errors import MachineError, first_line
from rlvlm.runs.files.environment import usable_cores
from rlvlm.runs.start.dashboard import signed_in_link
from rlvlm.runs.start.guardian import guarded_folder, sweep
from rlvlm.runs.start.preflight import cluster_address

logger = logging.getLogger(__name__)

START_TRIES = 3
SLOW_S, PATIENCE_S = 20.0, 420.0
"""Duration after which a failed try is blamed on a busy machine, and total time for such tries, seconds."""
OBJECT_STORE_BYTES = 200 * 2**20
"""Minimum size of the object store, bytes: it suffices for queries and episodes."""
_ROOM = 2**30
"""Its size beside the weights of large policies where /dev/shm allows it, bytes: what hundreds of envs ask served
policies and judges at once has room, and only what is used takes memory."""
_SHM = Path("/dev/shm")
_SHARE_OF_SHM = 0.8
"""Maximum share of the free space in /dev/shm for the store of a private Ray."""
MAX_TEMP_PATH = 40
"""Maximum length of Ray's folder's path: it creates sockets below, whose paths are limited to 107 bytes."""
WATCH_S = 1.0
HEAD_GONE_S, CLUSTER_GONE_S = 5.0, 45.0
"""Silence of Ray's head after which it counts as dead, seconds: a private one never returns, and a cluster's is waited
for nearly as long as Ray does, which then ends this process."""
_NEVER = re.compile(r"(?:^(?:ModuleNotFoundError|ImportError): |failed to install properly: )(.+)$", re.MULTILINE)
"""Pattern of log messages and errors about a missing package, without which no try can succeed."""
_IDLE = ("start_api_server", "start_monitor", "start_log_monitor")
"""Methods of Ray's node that start, in this order, processes that only dashboards and autoscaling need: usage
statistics, the autoscaler, and copying of workers' output to drivers."""
_UV = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
"""Ray's variable, and its constant, that says whether it ships the environment of `uv run` to all workers."""
_PREFIX = "rlvlm"
_TOKEN = secrets.token_hex(32)
"""Token of every Ray started by this process: Ray reads it once per process, and sends the same to the next Ray."""
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_PROXY = ("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "rlvlm.serving.proxy.bound_headers")
"""Makes Serve's HTTP proxy, if there is one, limit the length of headers."""


@contextmanager
def ray_session(
    dashboard_port: int | None = None,
    num_workers: int = 0,
    *,
    exports_metrics: bool = False,
    log: Callable[[str], None] = logger.warning,
    on_lost: Callable[[str], None] = logger.error,
    weights_bytes: int = 0,
) -> Iterator[str]:
    """Runs Ray while the context is open: the cluster in RAY_ADDRESS, or a private one that ends with the process.

    Yields a line with the dashboard's address if `dashboard_port` is given, else an empty one.

    A process already on Ray, such as a sweep's run, stays on it. A private one has its own folder in a directory that
    only this user can enter, and its own random token, so that nothing is written to the user's home and no other
    process can join.

    Args:
        dashboard_port: port of a private Ray's dashboard, on the loopback address; a cluster has its own. None: no
            dashboard is wanted.
        num_workers: processes of one core each that will be started in it, besides judges; with fewer cores they share
            them.
        exports_metrics: whether to open the metrics port of a private Ray, which has no token and all of the machine's
            interfaces; a dashboard opens it too.
        log: called with a message if Ray takes long to start.
        on_lost: called with a message if Ray's head is dead, after which the process ends, see `watched_head`.
        weights_bytes: bytes of weights in the object store of a private Ray at a time.

    Raises:
        UsageError: RAY_ADDRESS is not the address of a cluster.
        MachineError: Ray does not start, or the cluster does not answer.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        yield ""
        return
    link = ""
    with ExitStack() as stack:
        # a foreign cluster: nothing is configured, and it continues when the run ends
        if address := cluster_address():
            with _sigterm_kept():
                url = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR).dashboard_url
            link = f"http://{url}, and it asks for the cluster's token" if url else "this cluster has none"
        else:
            parent = make_parent()
            stack.enter_context(guarded_folder(parent))
            stack.callback(_forget_token, parent)
            url = start_ray(
                parent, dashboard_port, num_workers,
                exports_metrics=exports_metrics, log=log, store_bytes=store_room(weights_bytes),
            )  # fmt: skip
            if dashboard_port is not None:
                link = stack.enter_context(signed_in_link(url))
        stack.callback(ray.shutdown)  # only disconnects from a foreign cluster
        gone_s = CLUSTER_GONE_S if address else HEAD_GONE_S
        stack.enter_context(watched_head(ray.get_runtime_context().gcs_address, gone_s, on_lost))
        for line in small_stores(weights_bytes):
            logger.warning(line)
        yield "" if dashboard_port is None else f"Ray's dashboard: {link}"


def small_stores(weights_bytes: int) -> list[str]:
    """Returns a line on the nodes of this Ray whose object stores have no room for these weights, if there are any."""
    rooms = {
        str(node["NodeManagerAddress"]): node["Resources"].get("object_store_memory", 0.0)
        for node in ray.nodes()
        if node["Alive"]
    }
    small = [f"{address} ({room / 2**30:.1f} GiB)" for address, room in rooms.items() if room < weights_bytes]
    if not small:
        return []
    return [
        f"{weights_bytes / 2**30:.1f} GiB of weights are sent, more than the object store has on {', '.join(small)}: "
        "there they go through the disk, several times as slow, and end the run if it is full; start Ray with "
        f"--object-store-memory {weights_bytes + _ROOM}, in containers with as large a {_SHM}"
    ]


def store_room(weights_bytes: int = 0) -> int:
    """Returns the size of an object store for these weights, as far as /dev/shm allows: the rest goes through the disk,
    which is several times as slow.

    Raises:
        MachineError: this is Linux without /dev/shm, where Ray does not start.
    """
    if not _SHM.is_dir() and sys.platform == "linux":
        raise MachineError(
            f"there is no {_SHM}, where Ray keeps what processes share",
            f"mount it (mount -t tmpfs tmpfs {_SHM}); a container has it unless it is told otherwise",
        )
    free = shutil.disk_usage(_SHM).free if _SHM.is_dir() else 0
    return max(OBJECT_STORE_BYTES, min(_ROOM + weights_bytes, int(_SHARE_OF_SHM * free)))


@contextmanager
def watched_head(address: str, gone_s: float, on_lost: Callable[[str], None]) -> Iterator[None]:
    """Ends this process with a message and the exit code of a `MachineError` if Ray's head (its GCS) dies while the
    context is open. Ray itself would end it within a minute, with code 1, without a message and in the middle of
    anything.

    Args:
        address: address of the head, HOST:PORT.
        gone_s: silence after which it counts as dead, seconds.
        on_lost: called with the message.
    """
    host, _, port = address.rpartition(":")
    is_over = threading.Event()

    def watch() -> None:
        last_answer = time.monotonic()
        while not is_over.wait(WATCH_S):
            # the kernel answers for a process that is merely slow
            with suppress(OSError):
                socket.create_connection((host.strip("[]"), int(port)), timeout=WATCH_S).close()
                last_answer = time.monotonic()
            if time.monotonic() - last_answer > gone_s:
                with suppress(Exception):
                    on_lost(f"Ray's head (its GCS, at {address}) does not answer any more, so that nothing can go on")
                # skips all contexts, each of which would ask the head; the guardian cleans up after a private Ray
                os._exit(MachineError.exit_code)

    thread = threading.Thread(target=watch, name="ray-head", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def start_ray(
    parent: Path,
    dashboard_port: int | None = None,
    num_workers: int = 0,
    node_ip: str | None = None,
    *,
    exports_metrics: bool = False,
    log: Callable[[str], None] = logger.warning,
    store_bytes: int | None = None,
) -> str:
    """Starts a Ray of our own in this process, and returns its dashboard's address, HOST:PORT, if it has one; on a busy
    machine it may take several tries.

    Args:
        parent: folder for its files.
        dashboard_port: see `ray_session`.
        num_workers: see `ray_session`.
        node_ip: address of this machine under which others may join; None: only this machine.
        exports_metrics: see `ray_session`.
        log: see `ray_session`.
        store_bytes: size of the object store; None: `store_room` of no weights.

    Raises:
        MachineError: no try succeeds, or a required package is missing.
    """
    # Without a mode Ray enables its token itself, and uses this one instead of writing into the home folder.
    os.environ.setdefault(_TOKEN_PATH, str(write_token(parent)))
    os.environ.setdefault(*_PROXY)
    system = {
        # Prestarted workers take memory, and on a busy machine Ray may wait for them for ever.
        "prestart_worker_first_driver": False,
        "worker_register_timeout_seconds": 300,
        # Ray's own 15 leaves a judge's replica no core wherever anything else computes, this process included, and a
        # run then waits for its answers.
        "worker_niceness": 0,
        "enable_metrics_collection": exports_metrics or dashboard_port is not None,
    }
    first, is_alone = time.monotonic(), dashboard_port is None and node_ip is None
    said = _Said()
    for number in itertools.count():
        folder, begun = parent / f"r{number}", time.monotonic()
        # logged while waiting, because Ray itself says nothing for its first 30 seconds
        slow = threading.Timer(SLOW_S, lambda: log(f"Ray is still starting ({_load()}); waiting for its processes"))
        slow.daemon = True
        slow.start()
        logging.getLogger("ray").addHandler(said)
        try:
            with _own_way(), _no_idle_processes() if is_alone else nullcontext():
                context = ray.init(
                    address="local",
                    # the judge's replica and Serve's own actors need a slot each
                    num_cpus=max(usable_cores(), 2 + num_workers),
                    include_dashboard=dashboard_port is not None,
                    dashboard_host="127.0.0.1",
                    dashboard_port=dashboard_port,
                    object_store_memory=store_room() if store_bytes is None else store_bytes,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(folder),
                    _node_ip_address=node_ip,
                    _system_config=system,
                )
            # Otherwise a job submitted to this Ray would get the address of any Ray on this machine.
            ray_utils.write_ray_address(ray.get_runtime_context().gcs_address, str(folder))
            return context.dashboard_url or ""
        except Exception as error:  # Ray raises bare Exceptions here, e.g. without an answer for 30 seconds
            # what it logs names the cause more often than what it raises
            failure = "; ".join(dict.fromkeys([first_line(error), *(line.strip() for line in said.lines[-1:])]))
            now = time.monotonic()
            ray.shutdown()
            logged = [*said.lines, *(file.read_text(errors="replace") for file in folder.rglob("*.err"))]
            sweep(folder, spared=os.getpid())
            if missing := _NEVER.search("\n".join(logged)):
                raise MachineError(
                    f"Ray cannot start here: {missing[1]}", "rlvlm doctor  (packages), then make setup"
                ) from error
            # a fast failure is caused by a wrong setting or a taken port, and would repeat
            is_busy = now - begun > SLOW_S and now - first < PATIENCE_S
            if number + 1 >= START_TRIES and not is_busy:
                raise MachineError(
                    f"Ray does not start, after {number + 1} tries in {(now - first) / 60:.1f} minutes: {failure}",
                    "rlvlm doctor  (memory, /dev/shm, ports, load); where the machine is merely busy, try again later",
                ) from error
            left_min = max(0.0, first + PATIENCE_S - now) / 60
            log(
                f"Ray was not ready after {now - begun:.0f} s ({_load()}): {failure}; try {number + 2} of those that "
                f"begin in the next {left_min:.0f} minutes"
            )
        finally:
            slow.cancel()
            logging.getLogger("ray").removeHandler(said)
    raise AssertionError("there is always another number")


@contextmanager
def _own_way() -> Iterator[None]:
    """Makes a starting Ray of our own differ in what it has no settings for.

    - Each of its processes, and with it all workers, is in a session of its own. A signal to the group of the run's
      process (a scheduler's, that of `timeout`, Ctrl-C, a closed terminal) would end Ray too, and a run needs it to
      save. Ray ends with this process as before: by the kernel's doing and by the guardian's.
    - Under `uv run` it would pack the working folder, however large, for workers of other machines. Here they have the
      interpreter and the folder of this process anyway. A user who sets Ray's variable decides.
    """
    popen, is_asked = services.ConsolePopen, _UV in os.environ
    with (
        _changed(services, ConsolePopen=partial(popen, start_new_session=True)),
        _sigterm_kept(),
        nullcontext() if is_asked else _changed(ray_constants, **{_UV: False}),
    ):
        yield


def _sigterm_kept() -> AbstractContextManager[None]:
    """Makes Ray leave SIGTERM to whoever handles it: its own would end the run with exit code 15 and no word."""
    return _changed(ray_utils, set_sigterm_handler=lambda _: None)


def _no_idle_processes() -> AbstractContextManager[None]:
    """Makes a starting Ray leave out three processes that a run without a dashboard does not need, some 160 MiB. It
    would wait for the first, during seconds in which all cores are busy with imports.
    """
    return _changed(Node, **dict.fromkeys(_IDLE, lambda *_, **__: None))


@contextmanager
def _changed(owner: Any, **values: Any) -> Iterator[None]:
    """Gives attributes of a module or class of Ray other values while the context is open."""
    kept = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


class _Said(logging.Handler):
    """Collects the errors that Ray logs: the exceptions it raises often leave out the cause."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _load() -> str:
    return f"load {os.getloadavg()[0]:.0f} on {usable_cores()} cores"


def make_parent() -> Path:
    """Creates a folder that only this user can enter, for the files of one Ray.

    Raises:
        MachineError: no temporary folder has a short enough path.
    """
    # TMPDIR of batch systems is often too long for a socket's path
    for root in (tempfile.gettempdir(), "/tmp"):
        if len(root) + 24 <= MAX_TEMP_PATH and os.path.isdir(root) and os.access(root, os.W_OK | os.X_OK):
            return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-", dir=root))
    raise MachineError("Ray needs a temporary folder with a short path", "export TMPDIR=/tmp")


def write_token(parent: Path) -> Path:
    """Writes a file `token` in `parent` with this process's random token, which only this user can read."""
    file = parent / "token"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(_TOKEN)
    return file


def _forget_token(parent: Path) -> None:
    """Lets the next Ray of this process name a token's file of its own: that in `parent` goes away with the folder, and
    Ray's servers wait for it without end.
    """
    if os.environ.get(_TOKEN_PATH) == str(parent / "token"):
        del os.environ[_TOKEN_PATH]
