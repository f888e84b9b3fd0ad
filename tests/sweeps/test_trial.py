"""What a trial does with its run, where Ray plays no part; whole sweeps are in `test_run_sweep`."""

from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import pytest

from rlvlm.core.errors import NumericsError, RunError
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder import RunFolder, create_folder
from rlvlm.sweeps.trial import SweepTrial


class BrokenTraining:
    """A run whose next round fails."""

    is_over = False

    def __init__(self, failure: Exception) -> None:
        self.failure = failure
        self.done: list[str] = []

    def advance(self) -> None:
        raise self.failure

    def save(self) -> None:
        self.done.append("saved")

    def finish(self, exit_reason: str) -> None:
        self.done.append(exit_reason)


def make_trial(folder: RunFolder, training: BrokenTraining) -> SweepTrial:
    trial = object.__new__(SweepTrial)  # Tune's own constructor wants a Ray
    trial._folder, trial._training, trial._stack = folder, training, ExitStack()
    trial._flat, trial._reason, trial._is_written = None, "", False
    return trial


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return create_folder(RunConfig(task="drawer_open", out=tmp_path / "run"), ["rlvlm"], datetime(2026, 1, 1))


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (NumericsError("the loss is not finite"), "NumericsError"),
        (RuntimeError("a bug"), "RunError"),
    ],
)
def test_what_broke_is_not_saved(folder: RunFolder, failure: Exception, reason: str) -> None:
    """Else the next try would begin with the weights that broke."""
    training = BrokenTraining(failure)
    trial = make_trial(folder, training)
    with pytest.raises(RunError):
        trial.step()
    trial.cleanup()
    assert training.done == [reason]


def test_what_is_stopped_half_way_is_saved_once(folder: RunFolder) -> None:
    training = BrokenTraining(RuntimeError())
    make_trial(folder, training).cleanup()
    assert training.done == ["saved", "stopped"]
