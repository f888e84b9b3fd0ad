from pathlib import Path

import pytest

from rlvlm.errors import MachineError
from rlvlm.runs.folder.checkpoints import CheckpointShelf, RunState


def state(step: int) -> RunState:
    return RunState(env_steps=step, wall_s=step / 10, peak_rss_mb=100.0)


def write(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("w")


def steps(shelf: CheckpointShelf) -> list[int]:
    return [checkpoint.state.env_steps for checkpoint in shelf.all()]


def test_the_newest_are_kept_and_the_best_besides(tmp_path: Path) -> None:
    shelf = CheckpointShelf(tmp_path / "checkpoints", keep=2)
    for step in (100, 200, 300, 400, 500):
        shelf.save(state(step), write, is_best=step == 200)
    assert steps(shelf) == [200, 400, 500]
    assert (shelf.path / "last").resolve().name == "step_00000500"
    best = shelf.best()
    assert best is not None and best.state == state(200)
    assert (best.algorithm / "weights").read_text() == "w"


def test_a_failed_save_leaves_the_old_ones_and_no_trace(tmp_path: Path) -> None:
    shelf = CheckpointShelf(tmp_path / "checkpoints", keep=2)
    shelf.save(state(100), write, is_best=True)

    def fail(folder: Path) -> None:
        write(folder)
        raise MachineError("the disk is full")

    with pytest.raises(MachineError):
        shelf.save(state(200), fail, is_best=True)
    assert steps(shelf) == [100]
    assert sorted(file.name for file in shelf.path.iterdir()) == ["best", "last", "step_00000100"]


def test_a_folder_that_a_kill_left_unfinished_is_no_checkpoint(tmp_path: Path) -> None:
    shelf = CheckpointShelf(tmp_path / "checkpoints", keep=2)
    (shelf.path / ".step_00000100.partial" / "algorithm").mkdir(parents=True)
    assert shelf.all() == [] and shelf.best() is None
    shelf.save(state(100), write, is_best=False)
    assert steps(shelf) == [100]


def test_later_ones_are_discarded_and_last_moves_back(tmp_path: Path) -> None:
    shelf = CheckpointShelf(tmp_path / "checkpoints", keep=3)
    for step in (100, 200, 300):
        shelf.save(state(step), write, is_best=step == 300)
    shelf.discard_after(200)
    assert steps(shelf) == [100, 200]
    assert (shelf.path / "last").resolve().name == "step_00000200"
    best = shelf.best()
    assert best is not None and best.state.env_steps == 200
