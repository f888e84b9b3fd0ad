"""The checkpoints of a run: complete step folders, the links `last` and `best`, and how many to keep.

On clusters the variable RLVLM_SCRATCH may name a fast disk that is purged from time to time: checkpoints are first
written there, and the newest and the best are copied to the run's folder, so that no needed file is on scratch alone.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlvlm.algorithms.checkpoint import MANIFEST, CorruptCheckpoint, Saving, check_folder, write_manifest
from rlvlm.core.disk import make_link, sync_tree, write_whole
from rlvlm.core.errors import MachineError
from rlvlm.core.foreign import read_json

PREFIX = "step_"
STATE = "run.json"
_OTHERS = "name another checkpoint of the run"
VARIABLE = "RLVLM_SCRATCH"
KEPT_AT_HOME = 1
"""Number of newest checkpoints in the run's folder, besides the best, if there is a fast disk."""

Write = Callable[[Path], Saving | None]
"""Writes an algorithm's files into a folder, or begins to."""
Log = Callable[[str], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The run loop's own state in a checkpoint; the algorithm's state is saved beside it."""

    env_steps: int
    """Env steps taken so far."""
    wall_s: float
    """Seconds of training so far, over all starts of the run."""
    peak_rss_mb: float
    """Peak memory of all processes together so far, MiB."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Every setting of the run except its folder, by dotted name."""
    changes: tuple[str, ...] = ()
    """Settings changed during the run, with the step of the change, in words."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One finished step folder, possibly corrupt."""

    path: Path

    @property
    def step(self) -> int:
        """Env steps at which it was saved, from its name."""
        return int(self.path.name.removeprefix(PREFIX))

    @property
    def state(self) -> RunState:
        """Reads the run loop's state.

        Raises:
            CorruptCheckpoint: it cannot be read.
        """
        try:
            found = read_json(self.path / STATE)
            return RunState(**{**found, "changes": tuple(found["changes"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CorruptCheckpoint(f"{self.path / STATE} is damaged: {error}", _OTHERS) from error

    @property
    def algorithm(self) -> Path:
        """Folder of the algorithm's own files."""
        return self.path / "algorithm"

    def check(self) -> None:
        """Checks that every file is unchanged since it was written.

        Raises:
            CorruptCheckpoint: a file is not; the message names it.
        """
        check_folder(self.path)
        if (self.algorithm / MANIFEST).exists():  # a user's own algorithm need not write one
            check_folder(self.algorithm)
        if self.state.env_steps != self.step:
            raise CorruptCheckpoint(f"{self.path} was saved at another step, {self.state.env_steps:,}", _OTHERS)


class CheckpointStore:
    """The folder `checkpoints/`, and a second one on a fast disk if there is one.

    Args:
        path: the folder; created by the first checkpoint.
        keep: number of newest checkpoints to keep, besides the best.
        scratch: folder on the fast disk, which then keeps that number, and `path` only the newest and the best.
    """

    def __init__(self, path: Path, keep: int, scratch: Path | None = None) -> None:
        self.path = path
        # the run's folder keeps what a run needs; further checkpoints are on the fast disk
        self._keep = KEPT_AT_HOME if scratch else keep
        self._scratch = CheckpointStore(scratch, keep) if scratch else None
        self._under_way: tuple[int, Saving] | None = None
        """Step of the checkpoint that `save_meanwhile` has begun."""

    def save_meanwhile(self, state: RunState, write: Write, is_best: bool, log: Log) -> None:
        """Begins a checkpoint as `begin` does, once the one before is complete, and leaves it under way. If it cannot
        be written, `log` says so; the next one is tried.
        """
        self.settle(log, waits=True)  # never two copies of all weights
        try:
            self._under_way = state.env_steps, self.begin(state, write, is_best)
        except (MachineError, OSError) as error:
            log(f"checkpoint at step {state.env_steps:,} not saved: {error}")
        self.settle(log)  # with nothing left to collect, a thread completes it from now on

    def settle(self, log: Log, *, waits: bool = False) -> None:
        """Completes the checkpoint under way if its files are written, or waits for them; `log` says if that failed."""
        if self._under_way is None:
            return
        (step, saving), self._under_way = self._under_way, None
        try:
            if not saving.has_ended(waits=waits):
                self._under_way = step, saving
        except (MachineError, OSError) as error:
            log(f"checkpoint at step {step:,} not saved: {error}")

    def save(self, state: RunState, write: Write, is_best: bool) -> Path:
        """Writes a checkpoint as `begin` does, and returns its folder at `path` once it is complete.

        Raises:
            MachineError, OSError: writing to `path` failed; older checkpoints are unchanged.
        """
        assert self._under_way is None, "the one under way is settled first"
        scratch = self._scratch
        try:
            self.begin(state, write, is_best).has_ended(waits=True)
        except (MachineError, OSError):
            if self._scratch is scratch:
                raise
            self.begin(state, write, is_best).has_ended(waits=True)
        return self._folder(state)

    def begin(self, state: RunState, write: Write, is_best: bool) -> Saving:
        """Begins the step folder of `state`, on scratch and at `path`, each of which gets its name once it is complete.

        Args:
            state: state of the run loop.
            write: writes the algorithm's files.
            is_best: whether to move the link `best` to it.

        Raises:
            MachineError, OSError: writing to `path` failed; older checkpoints are unchanged.
        """
        self.clear_unfinished()  # one may have been given up while a learner still wrote
        fast: Saving | None = None
        if self._scratch is not None:
            try:
                fast = self._scratch.begin(state, write, is_best)
            except (MachineError, OSError) as error:
                logger.warning("cannot write a checkpoint to scratch, so it goes to %s: %s", self.path, error)
        final = self._folder(state)
        partial, is_new = self.path / f".{final.name}.partial", not final.exists()
        parts = fast or Saving()
        if is_new:  # the state of a step never differs, so an existing folder stays
            with self._removing(partial):
                partial.mkdir(parents=True)
                if fast is None:
                    parts = write(partial / "algorithm") or parts

        def collect(waits: bool) -> bool:
            with self._removing(partial), self._leaving_scratch(is_used=fast is not None):
                return parts.collect(waits)

        def close() -> None:
            with self._removing(partial):
                with self._leaving_scratch(is_used=fast is not None):
                    parts.close()
                if is_new:
                    if fast is not None and self._scratch is not None:
                        shutil.copytree(self._scratch._folder(state) / "algorithm", partial / "algorithm")
                    self._complete(partial, state)
                    os.replace(partial, final)
            self._point("last", final)
            if is_best:
                self._point("best", final)
            self._prune()

        return Saving(collect, close)

    def _folder(self, state: RunState) -> Path:
        return self.path / f"{PREFIX}{state.env_steps:08d}"

    def _prune(self) -> None:
        """Keeps only the newest, and the best, which may be older than all of them."""
        best = self.best()
        for checkpoint in self._own()[: -self._keep]:
            if best is None or checkpoint.path != best.path:
                shutil.rmtree(checkpoint.path)

    def _complete(self, partial: Path, state: RunState) -> None:
        """Writes the run loop's state and the manifest beside the algorithm's files in `partial`, all of it to disk."""
        write_whole(partial / STATE, json.dumps(asdict(state)))
        # files covered by the algorithm's own manifest are not hashed again
        manifest = partial / "algorithm" / MANIFEST
        spoken_for = json.loads(manifest.read_bytes()) if manifest.exists() else {}
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        own = [file for file in files if file.parent != manifest.parent or file.name not in spoken_for]
        write_manifest(partial, [str(file.relative_to(partial)) for file in own])
        # synced before it gets its name: a power cut leaves a complete checkpoint or none
        sync_tree(partial)

    @contextmanager
    def _removing(self, partial: Path) -> Iterator[None]:
        try:
            yield
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    @contextmanager
    def _leaving_scratch(self, *, is_used: bool) -> Iterator[None]:
        """Lets later checkpoints go to `path` alone if scratch fails while one is written."""
        try:
            yield
        except (MachineError, OSError) as error:
            if is_used:
                self._scratch = None
                logger.warning("cannot write to scratch, so later checkpoints go to %s: %s", self.path, error)
            raise

    def all(self) -> list[Checkpoint]:
        """Returns the finished checkpoints, oldest first, copies at `path` rather than on scratch; maybe corrupt."""
        found = {checkpoint.path.name: checkpoint for checkpoint in reversed(list(self.newest_first()))}
        return list(found.values())

    def newest_first(self) -> Iterable[Checkpoint]:
        """Returns the checkpoints to resume from, in this order; of each step the copy at `path` comes first."""
        # sorting is stable: for equal steps the copy at `path` stays before that on scratch
        copies = [*self._own(), *(self._scratch.all() if self._scratch else ())]
        return sorted(copies, key=lambda checkpoint: checkpoint.step, reverse=True)

    def _own(self) -> list[Checkpoint]:
        """Returns the checkpoints at `path`, oldest first."""
        found = (path for path in self.path.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit())
        return sorted(map(Checkpoint, found), key=lambda checkpoint: checkpoint.step)

    def best(self) -> Checkpoint | None:
        """Returns the checkpoint of the best evaluation, or the newest if none is marked."""
        # a dangling or missing link leads to no checkpoint, and the newest replaces it
        target = resolved(self.path / "best")
        found = self._own()
        return next((c for c in found if c.path.resolve() == target), found[-1] if found else None)

    def clear_unfinished(self) -> None:
        """Removes half-written files of a killed process; only for a process that holds the run's folder."""
        for path in self.path.glob(".*.partial"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if self._scratch is not None:
            self._scratch.clear_unfinished()

    def discard_after(self, step: int) -> None:
        """Removes the checkpoints after `step`: they could not be read."""
        if self._scratch is not None:
            self._scratch.discard_after(step)
        for checkpoint in self._own():
            if checkpoint.step > step:
                shutil.rmtree(checkpoint.path)
        if found := self._own():
            self._point("last", found[-1].path)

    def _point(self, name: str, target: Path) -> None:
        link, partial = self.path / name, self.path / f".{name}.partial"
        partial.unlink(missing_ok=True)
        # relative, so that a run's folder can be moved; renamed over the old link, so that there always is one
        make_link(partial, target.name)
        os.replace(partial, link)


def resolved(path: Path) -> Path:
    """Returns `path` with its links followed, including files that contain a name instead of a link."""
    # such a file has some tens of bytes; anything larger is not ours
    if path.name in ("last", "best") and path.is_file() and path.stat().st_size < 100:
        return path.with_name(path.read_text()).resolve()
    return path.resolve()


def newest_sound(
    candidates: Iterable[Checkpoint], log: Callable[[CorruptCheckpoint], None] = lambda damage: None
) -> Checkpoint | None:
    """Returns the first of `candidates` whose files are all intact; None if there are no candidates.

    Args:
        candidates: as returned by `newest_first`.
        log: called with the error of each corrupt one.

    Raises:
        CorruptCheckpoint: there are candidates, but all are corrupt.
    """
    damage: CorruptCheckpoint | None = None
    # stops at the first intact one: checking a large policy takes minutes
    for checkpoint in candidates:
        try:
            checkpoint.check()
            return checkpoint
        except CorruptCheckpoint as error:
            damage = error
            log(error)
    if damage is not None:
        raise CorruptCheckpoint(
            f"no checkpoint of the run is intact; the oldest: {damage}",
            "run its command.txt again with another --out; --judge.store FOLDER/labels keeps a judge's answers",
        )
    return None


def checkpoint_store(path: Path, keep: int) -> CheckpointStore:
    """Returns the store of a run's checkpoints in `path` and, if the environment names one, on a scratch disk.

    Args:
        path: the folder `checkpoints/` of a run.
        keep: number of newest checkpoints to keep, besides the best.
    """
    scratch = os.environ.get(VARIABLE, "")
    if not scratch:
        return CheckpointStore(path, keep)
    place = path.absolute().parent
    digest = hashlib.sha256(str(place.resolve()).encode()).hexdigest()[:8]  # keeps runs of one name in two places apart
    return CheckpointStore(path, keep, Path(scratch).expanduser() / f"{place.name}-{digest}" / path.name)
