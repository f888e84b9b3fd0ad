"""What a run stands on while it works: Ray, the judge's Serve app, the algorithm; each ends with its context."""

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
import torch
from ray.tune.trainable import trainable

from rlvlm.algorithms.sac_pebble.algorithm import SACPebble, SACPebbleConfig
from rlvlm.errors import MachineError
from rlvlm.experiments.config import RunConfig
from rlvlm.experiments.folder.environment import usable_cores
from rlvlm.experiments.processes.guardian import guarded_folder, sweep
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.judge import Judge
from rlvlm.judges.labels.store import LabelStore
from rlvlm.serving.apps import start_judge

logger = logging.getLogger(__name__)

START_TRIES = 3
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
def judge_session(config: RunConfig, open_store: Callable[[], LabelStore]) -> Iterator[Callable[[], Judge] | None]:
    """What makes the judge's client, while its Serve app is up; None for runs that ask no judge.

    The client remembers: after a crash, what was asked since the last checkpoint is answered from the store, for
    nothing and in the same words; so is what any other run asked the same judge, where they share one.

    Args:
        config: of the run.
        open_store: opens the store of answers in the process that asks; must pickle.

    Raises:
        JudgeUnavailable: the judge cannot be loaded, or the app named in `serve.app` is not running.
    """
    if not config.asks_judge:
        yield None
        return
    with start_judge(config.judge, config.serve, name=config.task) as running:
        yield lambda: CachedJudge(running.judge, open_store())


@contextmanager
def algorithm_session(config: RunConfig, make_judge: Callable[[], Judge] | None) -> Iterator[SACPebble]:
    """The algorithm of a run, ready to train or to be restored; it is stopped when the context closes.

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
    # RLlib makes an empty folder per algorithm, by default in the user's home, which may not even be writable.
    trainable.DEFAULT_STORAGE_PATH = ray.get_runtime_context().get_temp_dir()
    algorithm = settings.build_algo()
    try:
        yield algorithm
    finally:
        algorithm.stop()
        shutil.rmtree(algorithm.logdir, ignore_errors=True)


def _attached() -> Iterator[None]:
    ray.init(log_to_driver=False, logging_level="error")
    try:
        yield
    finally:
        ray.shutdown()  # disconnects; the cluster is not ours


def _private(config: RunConfig) -> Iterator[None]:
    parent = _make_parent()
    with guarded_folder(parent):
        _start(parent, config)
        try:
            yield
        finally:
            ray.shutdown()


def _start(parent: Path, config: RunConfig) -> None:
    """A Ray of our own, with its files in `parent`; on a busy machine it may take a second try.

    Raises:
        MachineError: no try succeeds.
    """
    # With no mode chosen Ray turns its token on by itself, and takes this one instead of writing into the home folder.
    os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(_write_token(parent)))
    failure = ""
    for number in range(START_TRIES):
        folder = parent / f"r{number}"
        try:
            _init(folder, config)
            return
        except Exception as error:  # Ray raises bare Exceptions here, for one when it had no answer in 30 seconds
            failure = next(iter(str(error).strip().splitlines()), type(error).__name__)
            logger.warning("Ray did not start: %s", failure)
            ray.shutdown()
            sweep(folder, spared=os.getpid())
    raise MachineError(f"Ray does not start: {failure}", "rlvlm doctor  (memory, /dev/shm, ports)")


def _init(folder: Path, config: RunConfig) -> None:
    ray.init(
        address="local",
        num_cpus=max(usable_cores(), 2),  # the judge's replica and Serve's own actors need a place each
        include_dashboard=config.track.dashboard,
        dashboard_host="127.0.0.1",
        dashboard_port=config.track.dashboard_port if config.track.dashboard else None,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="error",
        _temp_dir=str(folder),
        # Workers started ahead take memory, and on a busy machine Ray waits for them, without end if they are late.
        _system_config={"prestart_worker_first_driver": False, "worker_register_timeout_seconds": 300},
    )


def _make_parent() -> Path:
    """A folder only this user can enter, for Ray's files."""
    roots = [root for root in (tempfile.gettempdir(), "/tmp") if len(root) + 24 <= MAX_TEMP_PATH and _is_writable(root)]
    if not roots:
        raise MachineError("Ray needs a temporary folder with a short path", "export TMPDIR=/tmp")
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-", dir=roots[0]))


def _is_writable(root: str) -> bool:
    return os.path.isdir(root) and os.access(root, os.W_OK | os.X_OK)


def _write_token(parent: Path) -> Path:
    file = parent / "token"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(secrets.token_hex(32))
    return file
