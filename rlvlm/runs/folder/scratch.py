"""Checkpoints on a fast disk that may be purged, with the newest and the best copied to the run's folder.

For clusters: where the variable RLVLM_SCRATCH names a folder, checkpoints are written there first. What a run needs to
go on, or to be played, never lies on scratch alone.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from rlvlm.core.disk import sync_tree
from rlvlm.core.errors import MachineError
from rlvlm.runs.folder.checkpoints import Checkpoint, CheckpointStore, RunState

logger = logging.getLogger(__name__)

VARIABLE = "RLVLM_SCRATCH"
KEPT_AT_HOME = 1
"""Newest checkpoints in the run's folder, besides the best."""


class ScratchCheckpointStore:
    """A store on scratch and one at home, used like one.

    Args:
        home: in the run's folder; keeps the newest and the best.
        scratch: on the fast disk; keeps as many as the run is told to.
    """

    def __init__(self, home: CheckpointStore, scratch: CheckpointStore) -> None:
        self._home = home
        self._scratch = scratch

    def save(self, state: RunState, write: Callable[[Path], None], is_best: bool) -> Path:
        """Saves on scratch and copies the checkpoint home, each whole or not at all; returns the copy.

        Where scratch refuses, the checkpoint is written at home.

        Raises:
            OSError: home refused; older checkpoints are untouched.
        """
        try:
            fast = self._scratch.save(state, write, is_best)
        except (MachineError, OSError) as error:
            logger.warning("scratch refuses a checkpoint, it goes to %s: %s", self._home.path, error)
            return self._home.save(state, write, is_best)
        return self._home.save(state, lambda folder: _copy(fast / "algorithm", folder), is_best)

    def all(self) -> list[Checkpoint]:
        """The finished checkpoints of both, oldest first; those at home where both have them."""
        found = {checkpoint.path.name: checkpoint for checkpoint in (*self._scratch.all(), *self._home.all())}
        return sorted(found.values(), key=lambda checkpoint: checkpoint.step)

    def newest_first(self) -> Iterable[Checkpoint]:
        """What a run may go on from, in this order: of each step the copy at home before that on scratch."""
        copies = (*self._home.all(), *self._scratch.all())
        return sorted(copies, key=lambda checkpoint: checkpoint.step, reverse=True)

    def best(self) -> Checkpoint | None:
        """The checkpoint of the best evaluation, or the newest where none was marked."""
        return self._home.best()

    def discard_after(self, step: int) -> None:
        """Removes the checkpoints of later steps than `step`."""
        for store in (self._home, self._scratch):
            store.discard_after(step)


def checkpoint_store(path: Path, keep: int) -> CheckpointStore | ScratchCheckpointStore:
    """The store of a run's checkpoints in `path`, and on scratch too where there is one.

    Args:
        path: the folder `checkpoints/` of a run.
        keep: newest checkpoints kept, besides the best.
    """
    scratch = os.environ.get(VARIABLE, "")
    if not scratch:
        return CheckpointStore(path, keep)
    place = path.absolute().parent
    digest = hashlib.sha256(str(place.resolve()).encode()).hexdigest()[:8]  # runs of one name in two places stay apart
    fast = CheckpointStore(Path(scratch).expanduser() / f"{place.name}-{digest}" / path.name, keep)
    return ScratchCheckpointStore(CheckpointStore(path, KEPT_AT_HOME), fast)


def _copy(source: Path, target: Path) -> None:
    """Copies a folder of files, all of them on the disk when this returns."""
    shutil.copytree(source, target)
    sync_tree(target)
