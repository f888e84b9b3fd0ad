"""The processes around a run: a private Ray, the judge's Serve app, and the watch on everybody's memory."""

import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from rlvlm.algorithms.sac_pebble.algorithm import SACPebble, SACPebbleConfig
from rlvlm.errors import MachineError
from rlvlm.experiments.config import RunConfig
from rlvlm.experiments.folder.environment import usable_cores
from rlvlm.judges.judge import Judge
from rlvlm.serving.apps import start_judge

OBJECT_STORE_BYTES = 200 * 2**20
"""Only queries pass through the object store, so the smallest sensible one will do."""
MAX_TEMP_PATH = 40
"""Longest path of Ray's folder: it puts sockets below, and their paths end at 107 bytes."""
_PREFIX = "rlvlm"


@contextmanager
def ray_session(config: RunConfig) -> Iterator[None]:
    """Ray while the context is open: the cluster of the job we run in, or a private one that ends with us.

    A private one has its own folder in a directory only this user can enter, and its own random token, so that
    nothing is written to the user's home and nobody else can join.

    Raises:
        MachineError: Ray does not start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ.get("RAY_ADDRESS"):
        yield from _attached()
    else:
        yield from _private(config)


@contextmanager
def judge_session(config: RunConfig) -> Iterator[Callable[[], Judge] | None]:
    """What makes the judge's client, while its Serve app is up; None for runs that ask no judge.

    Raises:
        JudgeUnavailable: the judge cannot be loaded, or the app named in `serve.app` is not running.
    """
    if not config.asks_judge:
        yield None
        return
    with start_judge(config.judge, config.serve, name=config.task) as running:
        yield lambda: running.judge


def build_algorithm(config: RunConfig, make_judge: Callable[[], Judge] | None) -> SACPebble:
    """The algorithm of a run, ready to train or to be restored.

    Args:
        config: of the run.
        make_judge: from `judge_session`.
    """
    torch.set_num_threads(1)  # batches of 256 are too small to share: two threads are slower than one
    settings = SACPebbleConfig()
    settings.worlds(task=config.task, goal=config.goal, world=config.env)
    settings.learning(sac=config.algo)
    settings.rewards(
        reward=config.reward, feedback=config.feedback, reward_model=config.reward_model,
        judge_picture_px=config.judge.picture_px,
    )  # fmt: skip
    if make_judge is not None:
        settings.rewards(make_judge=make_judge)
    settings.debugging(seed=config.seed)
    return settings.build_algo()


class MemoryWatch:
    """Samples the memory of this process and all below it while the context is open.

    Proportional set size is summed, so that pages which processes share are counted once.

    Args:
        start_mb: the peak so far, in MiB.
        period_s: seconds between samples.
    """

    def __init__(self, start_mb: float, period_s: float = 3.0) -> None:
        self.peak_mb = start_mb
        self._period_s = period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._period_s):
            self.peak_mb = max(self.peak_mb, tree_memory_mb())


def tree_memory_mb() -> float:
    """Memory of this process and all its descendants together, in MiB."""
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it ended meanwhile, or hides from us
            continue
    return total / 2**20


def _attached() -> Iterator[None]:
    import ray

    ray.init(log_to_driver=False, logging_level="error")
    try:
        yield
    finally:
        ray.shutdown()  # disconnects; the cluster is not ours


def _private(config: RunConfig) -> Iterator[None]:
    parent = _make_parent()
    # With no mode chosen Ray turns its token on by itself, and takes this one instead of writing into the home folder.
    os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(_write_token(parent)))
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=max(usable_cores(), 2),  # the judge's replica and Serve's own actors need a place each
            include_dashboard=config.track.dashboard,
            dashboard_host="127.0.0.1",
            dashboard_port=config.track.dashboard_port if config.track.dashboard else None,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=str(parent / "r"),
        )
    except (OSError, RuntimeError, TimeoutError) as error:
        shutil.rmtree(parent, ignore_errors=True)
        what = str(error).strip().splitlines() or [type(error).__name__]
        raise MachineError(f"Ray does not start: {what[0]}", "rlvlm doctor  (memory, /dev/shm, ports)") from error
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(parent, ignore_errors=True)


def _make_parent() -> Path:
    """A folder only this user can enter, for Ray's files; those of runs that were killed are taken away."""
    roots = [root for root in (tempfile.gettempdir(), "/tmp") if len(root) + 24 <= MAX_TEMP_PATH and _is_writable(root)]
    if not roots:
        raise MachineError("Ray needs a temporary folder with a short path", "export TMPDIR=/tmp")
    mark = f"{_PREFIX}-{os.getuid()}-"
    for old in Path(roots[0]).glob(f"{mark}*"):
        pid = old.name.removeprefix(mark).split("-")[0]
        if old.stat().st_uid == os.getuid() and pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{mark}{os.getpid()}-", dir=roots[0]))


def _is_writable(root: str) -> bool:
    return os.path.isdir(root) and os.access(root, os.W_OK | os.X_OK)


def _write_token(parent: Path) -> Path:
    file = parent / "token"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(secrets.token_hex(32))
    return file
