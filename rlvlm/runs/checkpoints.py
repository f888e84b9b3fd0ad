"""The checkpoints of a run: whole step folders, the links `last` and `best`, and how many are kept.

On clusters the variable RLVLM_SCRATCH may name a fast disk that is purged now and then: checkpoints are written there
first, and the newest and the best are copied to the run's folder, so what a run needs never lies on scratch alone.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlvlm.algorithms.checkpoint import MANIFEST, CorruptCheckpoint, check_folder, write_manifest
from rlvlm.core.disk import make_link, sync_tree, write_whole
from rlvlm.core.errors import MachineError
from rlvlm.core.foreign import read_json

PREFIX = "step_"
STATE = "run.json"
_OTHERS = "name another checkpoint of the run"
VARIABLE = "RLVLM_SCRATCH"
KEPT_AT_HOME = 1
"""Newest checkpoints in the run's folder, besides the best, where there is a fast disk."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """What the run loop itself remembers across an interruption; the algorithm's state lies beside it."""

    env_steps: int
    """Env steps taken so far."""
    wall_s: float
    """Seconds spent in training so far, over all starts of the run."""
    peak_rss_mb: float
    """Largest memory of all processes together so far, in MiB."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Every setting that the run had but its place, by dotted name."""
    changes: tuple[str, ...] = ()
    """Which settings were changed on the way, from which step on, in words."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One finished step folder, sound or not."""

    path: Path

    @property
    def step(self) -> int:
        """Env steps by which it was saved, as its name says."""
        return int(self.path.name.removeprefix(PREFIX))

    @property
    def state(self) -> RunState:
        """What the run loop remembered.

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
        """Where the algorithm keeps its own files."""
        return self.path / "algorithm"

    def check(self) -> None:
        """Checks that every file is as it was written.

        Raises:
            CorruptCheckpoint: says which file is not.
        """
        check_folder(self.path)
        if (self.algorithm / MANIFEST).exists():  # a user's own algorithm need not write one
            check_folder(self.algorithm)
        if self.state.env_steps != self.step:
            raise CorruptCheckpoint(f"{self.path} was saved at another step, {self.state.env_steps:,}", _OTHERS)


class CheckpointStore:
    """The folder `checkpoints/`, and a second one on a fast disk where there is one.

    Args:
        path: the folder; it is made at the first checkpoint.
        keep: newest checkpoints kept, besides the best.
        scratch: folder on the fast disk. It then keeps as many, and `path` the newest and the best.
    """

    def __init__(self, path: Path, keep: int, scratch: Path | None = None) -> None:
        self.path = path
        # the run's folder keeps what a run needs; more of them lie on the fast disk
        self._keep = KEPT_AT_HOME if scratch else keep
        self._scratch = CheckpointStore(scratch, keep) if scratch else None

    def save(self, state: RunState, write: Callable[[Path], None], is_best: bool) -> Path:
        """Makes the step folder of `state` in one move: it exists whole or not at all, on scratch and at `path`.

        Args:
            state: the run loop's own numbers.
            write: makes the folder it is given, with the algorithm's files.
            is_best: whether the link `best` moves here.

        Returns:
            The step folder at `path`; where scratch refuses, it is the only one.

        Raises:
            OSError: the disk of `path` refused; older checkpoints are untouched.
        """
        fast: Path | None = None
        if self._scratch is not None:
            try:
                fast = self._scratch.save(state, write, is_best)
            except (MachineError, OSError) as error:
                logger.warning("cannot write a checkpoint to scratch, so it goes to %s: %s", self.path, error)
        final = self.path / f"{PREFIX}{state.env_steps:08d}"
        partial = self.path / f".{final.name}.partial"
        if not final.exists():  # the state of a step is always the same, so one that is there stays
            shutil.rmtree(partial, ignore_errors=True)
            try:
                partial.mkdir(parents=True)
                if fast is None:
                    write(partial / "algorithm")
                else:
                    shutil.copytree(fast / "algorithm", partial / "algorithm")
                write_whole(partial / STATE, json.dumps(asdict(state)))
                # files for which the algorithm's own manifest speaks are not hashed a second time
                manifest = partial / "algorithm" / MANIFEST
                spoken_for = json.loads(manifest.read_bytes()) if manifest.exists() else {}
                files = sorted(path for path in partial.rglob("*") if path.is_file())
                own = [file for file in files if file.parent != manifest.parent or file.name not in spoken_for]
                write_manifest(partial, [str(file.relative_to(partial)) for file in own])
                # on the disk before it gets its name: a power cut leaves a whole checkpoint or none
                sync_tree(partial)
                os.replace(partial, final)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        self._point("last", final)
        if is_best:
            self._point("best", final)
        # only the newest are kept; the best may be older than all of them
        best = self.best()
        for checkpoint in self._own()[: -self._keep]:
            if best is None or checkpoint.path != best.path:
                shutil.rmtree(checkpoint.path)
        return final

    def all(self) -> list[Checkpoint]:
        """The finished checkpoints, oldest first, the copies at `path` where scratch has them too; nobody has looked
        yet whether they are sound.
        """
        found = {checkpoint.path.name: checkpoint for checkpoint in reversed(list(self.newest_first()))}
        return list(found.values())

    def newest_first(self) -> Iterable[Checkpoint]:
        """What a run may go on from, in this order: of each step the copy at `path` before that on scratch."""
        # sorting is stable: of equal steps the copy at home stays before that on scratch
        copies = [*self._own(), *(self._scratch.all() if self._scratch else ())]
        return sorted(copies, key=lambda checkpoint: checkpoint.step, reverse=True)

    def _own(self) -> list[Checkpoint]:
        """Those at `path`, oldest first."""
        found = (path for path in self.path.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit())
        return sorted(map(Checkpoint, found), key=lambda checkpoint: checkpoint.step)

    def best(self) -> Checkpoint | None:
        """The checkpoint of the best evaluation, or the newest where none was marked."""
        # a dangling or missing link resolves to no checkpoint, and the newest stands in for it
        target = resolved(self.path / "best")
        found = self._own()
        return next((c for c in found if c.path.resolve() == target), found[-1] if found else None)

    def clear_unfinished(self) -> None:
        """Removes what a killed process left half written; only for a process that holds the run's folder."""
        for path in self.path.glob(".*.partial"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if self._scratch is not None:
            self._scratch.clear_unfinished()

    def discard_after(self, step: int) -> None:
        """Removes the checkpoints of later steps than `step`: they could not be read."""
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
    """`path` with its links followed, also where a file that holds a name stands in for a link."""
    # a file of some tens of bytes; anything larger is none of ours
    if path.name in ("last", "best") and path.is_file() and path.stat().st_size < 100:
        return path.with_name(path.read_text()).resolve()
    return path.resolve()


def newest_sound(
    candidates: Iterable[Checkpoint], log: Callable[[CorruptCheckpoint], None] = lambda damage: None
) -> Checkpoint | None:
    """The first of `candidates` all of whose files are as they were written; None where there are none at all.

    Args:
        candidates: as `newest_first` gives them.
        log: takes what is wrong with each that is passed over.

    Raises:
        CorruptCheckpoint: there are some, and none is sound.
    """
    damage: CorruptCheckpoint | None = None
    # the first sound one is taken; older ones are not looked at, which for large policies takes minutes
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
    """The store of a run's checkpoints in `path`, and on scratch too where the environment names one.

    Args:
        path: the folder `checkpoints/` of a run.
        keep: newest checkpoints kept, besides the best.
    """
    scratch = os.environ.get(VARIABLE, "")
    if not scratch:
        return CheckpointStore(path, keep)
    place = path.absolute().parent
    digest = hashlib.sha256(str(place.resolve()).encode()).hexdigest()[:8]  # runs of one name in two places stay apart
    return CheckpointStore(path, keep, Path(scratch).expanduser() / f"{place.name}-{digest}" / path.name)
