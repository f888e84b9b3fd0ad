import errno
import os
import random
import signal
import warnings
from concurrent.futures import wait
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from damaged import damage

from rlvlm.algorithms import checkpoint as files
from rlvlm.algorithms.checkpoint import (
    ADAM,
    POLICY,
    START,
    CorruptCheckpoint,
    PolicyFile,
    Saving,
    TreeWriter,
    in_background,
    load_policy_file,
    load_tree,
    marks,
    save_tree,
    tensor_file,
    write_parts,
)
from rlvlm.core.errors import MachineError
from rlvlm.runs.files.checkpoints import CheckpointStore, RunState, checkpoint_store, newest_sound
from rlvlm.runs.files.folder import create_folder, find_folder
from rlvlm.runs.settings.kinds import StepsRun


def state(step: int) -> RunState:
    return RunState(env_steps=step, wall_s=step / 10, peak_rss_mb=100.0)


def write(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("w")


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.state.env_steps for checkpoint in store.all()]


def test_the_newest_are_kept_and_the_best_besides(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    for step in (100, 200, 300, 400, 500):
        store.save(state(step), write, is_best=step == 200)
    assert steps(store) == [200, 400, 500]
    assert (store.path / "last").resolve().name == "step_00000500"
    best = store.best()
    assert best is not None and best.state == state(200)
    assert (best.algorithm / "weights").read_text() == "w"


def test_without_symbolic_links_files_name_the_last_and_the_best(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.symlink", refuse)
    folder = create_folder(StepsRun(task="drawer_open", out=tmp_path / "run"), ["rlvlm"], datetime(2026, 1, 2))
    for step in (100, 200, 300, 400, 500):
        folder.checkpoints.save(state(step), write, is_best=step == 100)
    assert steps(folder.checkpoints)[0] == 100, "the best is kept"
    best = folder.checkpoints.best()
    assert best is not None and best.step == 100
    for name, step in (("best", 100), ("last", 500)):
        found = folder.checkpoint_at(folder.checkpoints.path / name)
        assert found is not None and found.step == step


def test_half_written_files_of_a_killed_run_are_cleared(tmp_path):
    folder = create_folder(StepsRun(task="drawer_open", out=tmp_path / "run"), ["rlvlm"], datetime(2026, 1, 2))
    folder.checkpoints.save(state(100), write, is_best=False)
    half = folder.checkpoints.path / ".step_00000200.partial" / "algorithm"
    half.mkdir(parents=True)
    find_folder(folder.path)
    assert half.exists(), "looking takes nothing away from a run that works"
    with folder.locked():
        assert sorted(file.name for file in folder.checkpoints.path.iterdir()) == ["last", "step_00000100"]


def test_a_failed_save_leaves_the_old_ones_and_no_trace(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store.save(state(100), write, is_best=True)

    def fail(folder: Path) -> None:
        write(folder)
        raise MachineError("the disk is full")

    with pytest.raises(MachineError):
        store.save(state(200), fail, is_best=True)
    assert steps(store) == [100]
    assert sorted(file.name for file in store.path.iterdir()) == ["best", "last", "step_00000100"]


def test_a_folder_that_a_kill_left_unfinished_is_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    (store.path / ".step_00000100.partial" / "algorithm").mkdir(parents=True)
    assert store.all() == [] and store.best() is newest_sound(store.newest_first()) is None
    store.save(state(100), write, is_best=False)
    assert steps(store) == [100]


def test_later_ones_are_discarded_and_last_moves_back(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for step in (100, 200, 300):
        store.save(state(step), write, is_best=step == 300)
    store.discard_after(200)
    assert steps(store) == [100, 200]
    assert (store.path / "last").resolve().name == "step_00000200"
    best = store.best()
    assert best is not None and best.state.env_steps == 200


def save_real(folder: Path) -> None:
    weights = {"w": torch.arange(8.0)}
    save_tree(folder, {"steps": 7, "replay": np.arange(64.0)}, PolicyFile(kind="squashed_gaussian", weights=weights))


@pytest.fixture
def three(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for step in (100, 200, 300):
        store.save(state(step), save_real, is_best=False)
    return store


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.full)])
def test_no_flipped_bit_goes_unseen_and_the_one_before_is_taken(three, count):
    draws, newest = random.Random(0), three.all()[-1]
    files = sorted(path for path in newest.path.rglob("*") if path.is_file())
    assert len(files) == 7  # two manifests, run.json, and the algorithm's four
    for number in range(count):
        file = files[number % len(files)]
        at, lines = draws.randrange(file.stat().st_size), []
        damage(file, at)
        sound = newest_sound(three.newest_first(), lines.append)
        assert sound is not None and sound.step == 200 and len(lines) == 1, (file.name, at)
        damage(file, at)  # flipped back
    assert newest_sound(three.newest_first()) == newest


@pytest.mark.parametrize("name", ["run.json", "algorithm/manifest.json", "algorithm/arrays.npz"])
def test_a_missing_file_is_noticed_and_a_run_without_a_sound_checkpoint_says_so(three, name):
    for checkpoint in three.all():
        (checkpoint.path / name).unlink()
    with pytest.raises(CorruptCheckpoint, match="no checkpoint of the run is intact.*step_00000100"):
        newest_sound(three.newest_first())


def begin_shared(step: int, folder: Path) -> Saving:
    """Begins a checkpoint as two learners do that share out the weights: [4, 2] of them, all equal to `step`."""
    previous = folder.parent.with_name("step_00000100") / "algorithm"
    start = {tensor_file(START, rank, 2): digest for rank, digest in enumerate(read_starts(previous))}
    writer, digests = TreeWriter(folder), {}
    kinds = [POLICY, ADAM] if writer.link(previous, start) else [POLICY, ADAM, START]
    half = {"w": torch.full((2, 2), float(step))}
    parts = [{tensor_file(kind, rank, 2): half for kind in kinds} for rank in (0, 1)]
    written = [in_background(partial(write_parts, writer.partial, part)) for part in parts]
    writer.write({"step": step, "learner": {kind: marks(kind, ["w"]) for kind in (POLICY, ADAM, START)}}, "vlm", {})

    def collect(waits: bool) -> bool:
        wait(written)  # whoever still writes would do so while the rest is removed
        with writer.guarded():
            for part in written:
                digests.update(part.result())
        return True

    return Saving(collect, lambda: writer.close(digests))


def read_starts(algorithm: Path) -> list[str]:
    if not algorithm.exists():
        return []
    return [digest for name, digest in files.read_manifest(algorithm, ()).items() if name.startswith(START)]


@pytest.fixture
def shared(tmp_path):
    """A store with a checkpoint of two learners that share out the weights."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    store.save(state(100), partial(begin_shared, 100), is_best=False)
    return store


def value_of(store: CheckpointStore) -> float:
    """The one value of all tensors in the newest sound checkpoint, of which each kind has its own file a learner."""
    newest = newest_sound(store.newest_first())
    assert newest is not None
    tree = load_tree(newest.algorithm)
    values = [tree["learner"][POLICY]["w"], tree["learner"][ADAM]["w"], load_policy_file(newest.algorithm).weights["w"]]
    (value,) = {float(each) for value in values for each in value.ravel()}
    assert {value.shape for value in values} == {(4, 2)} and value == tree["step"] == newest.step
    assert (tree["learner"][START]["w"] == 100).all()  # noqa: PLR2004 - of the first one, for ever
    return value


@pytest.mark.parametrize(
    ("place", "name", "left"),
    [
        (files.TreeWriter, "write", 100),  # weights are copied, learners begin to write
        (files.os, "fsync", 100),  # a part is written, none is on disk
        (files.TreeWriter, "close", 100),  # all parts are on disk
        (files, "replace_folder", 100),  # with their manifest
        (CheckpointStore, "_complete", 100),
        (CheckpointStore, "_prune", 200),
    ],
)
def test_a_kill_while_learners_write_leaves_a_checkpoint_to_go_on_from(shared, monkeypatch, place, name, left):
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads, which ends at once
        child = os.fork()
    if not child:
        setattr(place, name, die)
        shared.save(state(200), partial(begin_shared, 200), is_best=False)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert value_of(shared) == left
    shared.clear_unfinished()
    assert not list(shared.path.glob(".*"))
    shared.save(state(300), partial(begin_shared, 300), is_best=False)
    assert value_of(shared) == 300


def test_the_weights_of_the_start_are_on_disk_once(shared):
    shared.save(state(200), partial(begin_shared, 200), is_best=False)
    first, second = (found.algorithm / tensor_file(START, 1, 2) for found in shared.all())
    assert first.samefile(second) and value_of(shared) == 200
    shared.save(state(300), partial(begin_shared, 300), is_best=False)
    for step in (100, 200):
        (shared.path / f"step_{step:08d}").rename(shared.path / f"moved_{step}")
    assert value_of(shared) == 300, "each holds all that it needs"


@pytest.mark.parametrize("count", [0, 3])
def test_a_disk_that_fills_while_learners_write_leaves_the_checkpoint_before(shared, monkeypatch, count):
    calls = []

    def fill(descriptor: int, real=os.fsync) -> None:
        calls.append(descriptor)
        if len(calls) > count:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(MachineError, match="the disk is full"):
        shared.save(state(200), partial(begin_shared, 200), is_best=False)
    monkeypatch.undo()
    assert value_of(shared) == 100
    assert sorted(file.name for file in shared.path.iterdir()) == ["last", "step_00000100"]


def test_training_goes_on_while_a_checkpoint_is_written_and_after_one_that_failed(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    lines, is_written = [], []

    def fail() -> None:
        raise MachineError("the disk is full")

    def begin(step: int, path: Path) -> Saving:
        write(path)
        return Saving(lambda waits: waits or bool(is_written), fail if step == 200 else lambda: None)

    for step in (100, 200, 300):
        store.save_meanwhile(state(step), partial(begin, step), False, lines.append)
        store.settle(lines.append)
        assert steps(store) == [100] * (step > 100), "it is still written"
    is_written.append(True)
    store.settle(lines.append, waits=True)
    assert lines == ["checkpoint at step 200 not saved: the disk is full"]
    store.save_meanwhile(state(400), partial(begin, 400), False, lines.append)
    store.settle(lines.append, waits=True)
    assert steps(store) == [300, 400]
    with pytest.raises(MachineError, match="the disk is full"):
        store.save(state(500), lambda path: Saving(close=fail), is_best=False)  # the last one is not lost in silence
    assert steps(store) == [300, 400]


def test_a_part_that_is_missing_is_noticed(shared):
    folder = shared.all()[0].algorithm
    names = [name for name in files.read_manifest(folder, ()) if name != tensor_file(POLICY, 1, 2)]
    files.write_manifest(folder, names)
    for load in (load_tree, load_policy_file):
        with pytest.raises(CorruptCheckpoint, match="of the files of policy there are 1, not 2"):
            load(folder)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RLVLM_SCRATCH", str(tmp_path / "scratch"))
    return tmp_path / "run" / "checkpoints"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("step_*"))


def test_scratch_keeps_the_newest_and_home_the_last_and_the_best(home, tmp_path):
    store = checkpoint_store(home, keep=3)
    for step in (100, 200, 300, 400, 500):
        assert store.save(state(step), write, is_best=step == 100).parent == home
    assert names(tmp_path / "scratch") == ["step_00000100", "step_00000300", "step_00000400", "step_00000500"]
    assert names(home) == ["step_00000100", "step_00000500"]
    assert (home / "last" / "algorithm" / "weights").is_file()
    best = store.best()
    assert best is not None and best.state == state(100) and best.path.parent == home
    assert [checkpoint.state.env_steps for checkpoint in store.all()] == [100, 300, 400, 500]


def test_a_purged_scratch_loses_nothing_that_a_run_needs(home, tmp_path, monkeypatch):
    store = checkpoint_store(home, keep=2)
    for step in (100, 200):
        store.save(state(step), write, is_best=step == 100)
    monkeypatch.setenv("RLVLM_SCRATCH", str(tmp_path / "another"))
    again = checkpoint_store(home, keep=2)
    newest = again.all()[-1]
    assert newest.state == state(200) and (newest.algorithm / "weights").is_file()
    assert again.save(state(300), write, is_best=False).is_dir()


def test_the_copy_on_scratch_stands_in_for_a_damaged_one_at_home(home, tmp_path):
    store = checkpoint_store(home, keep=2)
    for step in (100, 200):
        store.save(state(step), write, is_best=False)
    damage(home / "step_00000200" / "algorithm" / "weights", at=0)
    sound = newest_sound(store.newest_first())
    assert sound is not None and sound.state == state(200) and tmp_path / "scratch" in sound.path.parents


def test_later_checkpoints_go_from_both(home, tmp_path):
    store = checkpoint_store(home, keep=3)
    for step in (100, 200, 300):
        store.save(state(step), write, is_best=False)
    store.discard_after(200)
    assert names(tmp_path / "scratch") == ["step_00000100", "step_00000200"]
    assert names(home) == []
    assert store.all()[-1].state == state(200)


def test_a_scratch_that_refuses_is_passed_over(home, tmp_path, caplog):
    (tmp_path / "scratch").touch()  # no folder, so nothing can be put into it
    store = checkpoint_store(home, keep=3)
    assert store.save(state(100), write, is_best=True) == home / "step_00000100"
    assert "cannot write a checkpoint to scratch" in caplog.text


def test_a_new_run_does_not_inherit_what_an_old_one_left_on_scratch(home, tmp_path):
    config = StepsRun(task="drawer_open", out=home.parent)
    folder = create_folder(config, ["rlvlm"], datetime(2026, 1, 2))
    folder.checkpoints.save(state(100), write, is_best=True)
    folder.remove()
    assert names(tmp_path / "scratch") == ["step_00000100"]
    create_folder(config, ["rlvlm"], datetime(2026, 1, 2))
    assert names(tmp_path / "scratch") == [] and find_folder(home.parent).checkpoints.all() == []


def test_runs_of_one_name_in_two_places_share_no_folder(home, tmp_path):
    for place in ("a", "b"):
        checkpoint_store(tmp_path / place / "run" / "checkpoints", keep=2).save(state(100), write, is_best=False)
    assert len(list((tmp_path / "scratch").iterdir())) == 2
