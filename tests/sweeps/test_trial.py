"""What a trial does with its run, where Ray plays no part; whole sweeps are in `test_run_sweep`."""

from contextlib import ExitStack
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pytest

from rlvlm.core.errors import NumericsError, RunError
from rlvlm.runs.files.folder import RunFolder, create_folder
from rlvlm.runs.settings.kinds import StepsRun
from rlvlm.sweeps.callback import Halving, cause_of
from rlvlm.sweeps.config import FlatConfig, HalvingConfig
from rlvlm.sweeps.trial import SweepTrial, is_flat


class BrokenTraining:
    """A run whose next round fails."""

    is_over = False

    def __init__(self, failure: Exception) -> None:
        self.failure = failure
        self.done: list[str] = []
        self.state = SimpleNamespace(env_steps=7)

    def advance(self) -> None:
        raise self.failure

    def save(self) -> None:
        self.done.append("saved")

    def finish(self, exit_reason: str, *, has_pages: bool = True) -> None:
        self.done.append(exit_reason if has_pages else f"{exit_reason}, briefly")


def make_trial(folder: RunFolder, training: BrokenTraining) -> SweepTrial:
    trial = object.__new__(SweepTrial)  # Tune's own constructor wants a Ray
    trial._folder, trial._training, trial._stack = folder, training, ExitStack()
    trial._flat, trial._reason, trial._is_written = None, "", False
    return trial


@pytest.fixture
def folder(tmp_path):
    return create_folder(StepsRun(task="drawer_open", out=tmp_path / "run"), ["rlvlm"], datetime(2026, 1, 1))


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(NumericsError("the loss is not finite"), "NumericsError"), (RuntimeError("a bug"), "RunError")],
)
def test_a_broken_run_is_not_saved(folder, failure, reason):
    """Else the next try would begin with the weights that broke."""
    training = BrokenTraining(failure)
    trial = make_trial(folder, training)
    with pytest.raises(RunError):
        trial.step()
    trial.cleanup()
    assert training.done == [reason]


def test_a_stopped_run_is_saved_once(folder):
    training = BrokenTraining(RuntimeError())
    make_trial(folder, training).cleanup()
    assert training.done == ["saved", "stopped"]


def test_a_run_that_is_paused_is_saved_without_its_pages(folder):
    training = BrokenTraining(RuntimeError())
    trial = make_trial(folder, training)
    trial.save_checkpoint("")
    trial.cleanup()
    assert training.done == ["saved", "paused, briefly"]


def test_the_lower_half_stops_at_a_rung():
    """Rungs at 100, 200 and 400 steps; a run passes when it is not below the median of those that came before it."""
    halving = Halving(HalvingConfig(first_rung=100, keep_one_in=2), total_steps=400)
    assert not halving.is_halted("a", 50, 0.0)  # no rung yet
    assert not halving.is_halted("a", 100, 0.5)  # the first one there passes
    assert halving.is_halted("b", 100, 0.4)
    assert not halving.is_halted("c", 120, 0.6)
    assert not halving.is_halted("a", 200, 0.7)
    assert halving.is_halted("c", 230, 0.6)
    assert not halving.is_halted("a", 250, 0.0)  # between the rungs nothing is decided


THIRD = FlatConfig(share=1 / 3, tolerance=0.02, after=1 / 3)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0, 0, 0, 0], False),  # at step 400 of 900 only 100 steps count, from 300 on
        ([0, 0, 0, 0, 0, 0], True),  # 300 to 600 is a third
        ([0, 1, 1, 1, 1], False),
        ([0, 0, 1, 1, 1, 1], True),
        ([0, 0, 1, 1, 1, 0.9], False),  # it moved
        ([0, 0, 1, 1, 0.99, 1], True),
        ([0, 0, 0, 0, 0.5, 0.5, 0.5], False),  # flat for 200 steps
        ([], False),
    ],
)
def test_a_third_of_900_steps_must_not_move(scores, expected):
    steps = 100 * np.arange(1, len(scores) + 1, dtype=np.float32)
    assert is_flat(steps, np.array(scores, np.float32), 900, THIRD) is expected


def test_the_beginning_may_count_too():
    steps = np.array([100, 200, 300, 400], np.float32)
    never = np.zeros(4, np.float32)
    assert is_flat(steps, never, 900, FlatConfig(share=1 / 3, after=0.0))
    assert not is_flat(steps[:3], never[:3], 900, FlatConfig(share=1 / 3, after=0.0))


def test_a_cause_is_the_last_line_that_was_noted(tmp_path):
    file = tmp_path / "error.txt"
    file.write_text("Failure # 1 (at 2026-01-01)\n  File train.py\nrlvlm.core.errors.NumericsError: the loss: nan\n\n")
    assert cause_of(SimpleNamespace(error_file=str(file))) == "the loss: nan"
    file.write_text("Failure # 1\nThe actor died because its process was killed.\n")
    assert cause_of(SimpleNamespace(error_file=str(file))) == "The actor died because its process was killed."
    assert cause_of(SimpleNamespace(error_file=None)) == "its process ended"
