"""The checkpoints of a run: whole step folders, the links `last` and `best`, and how many are kept."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlvlm.disk import write_whole

PREFIX = "step_"
STATE = "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """What the run loop itself remembers across an interruption; the algorithm's state lies beside it."""

    env_steps: int
    """Env steps taken so far."""
    wall_s: float
    """Seconds spent in training so far, over all sittings."""
    peak_rss_mb: float
    """Largest memory of all processes together so far, in MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One finished step folder."""

    path: Path
    state: RunState

    @property
    def algorithm(self) -> Path:
        """Where the algorithm keeps its own files."""
        return self.path / "algorithm"


class CheckpointShelf:
    """The folder `checkpoints/`.

    Args:
        path: the folder; it is made at the first checkpoint.
        keep: newest checkpoints kept, besides the best.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.keep = keep

    def save(self, state: RunState, write: Callable[[Path], None], is_best: bool) -> Path:
        """Makes the step folder of `state` in one move: it exists whole or not at all.

        Args:
            state: the run loop's own numbers.
            write: makes the folder it is given, with the algorithm's files.
            is_best: whether the link `best` moves here.

        Returns:
            The step folder.

        Raises:
            OSError: the disk refused; older checkpoints are untouched.
        """
        final = self.path / f"{PREFIX}{state.env_steps:08d}"
        partial = self.path / f".{final.name}.partial"
        if not final.exists():  # the state of a step is always the same, so one that is there stays
            shutil.rmtree(partial, ignore_errors=True)
            try:
                partial.mkdir(parents=True)
                write(partial / "algorithm")
                write_whole(partial / STATE, json.dumps(asdict(state)))
                os.replace(partial, final)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        self._point("last", final)
        if is_best:
            self._point("best", final)
        self._prune()
        return final

    def all(self) -> list[Checkpoint]:
        """The finished checkpoints, oldest first."""
        found = sorted(self.path.glob(f"{PREFIX}*/{STATE}"))
        return [Checkpoint(path=file.parent, state=RunState(**json.loads(file.read_text()))) for file in found]

    def best(self) -> Checkpoint | None:
        """The checkpoint of the best evaluation, or the newest where none was marked."""
        target = (self.path / "best").resolve()
        found = self.all()
        return next((c for c in found if c.path.resolve() == target), found[-1] if found else None)

    def discard_after(self, step: int) -> None:
        """Removes the checkpoints of later steps than `step`: they could not be read."""
        for checkpoint in self.all():
            if checkpoint.state.env_steps > step:
                shutil.rmtree(checkpoint.path)
        found = self.all()
        if found:
            self._point("last", found[-1].path)

    def _point(self, name: str, target: Path) -> None:
        link, partial = self.path / name, self.path / f".{name}.partial"
        partial.unlink(missing_ok=True)
        partial.symlink_to(target.name)
        os.replace(partial, link)

    def _prune(self) -> None:
        found = self.all()
        best = self.best()
        for checkpoint in found[: -self.keep]:
            if best is None or checkpoint.path != best.path:
                shutil.rmtree(checkpoint.path)
