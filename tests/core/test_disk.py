"""Files stay as they were when a writer fails, and come whole when it does not."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from rlvlm.core import disk
from rlvlm.core.disk import (
    append_whole,
    check_links,
    claim,
    clear_abandoned,
    held,
    replace_folder,
    replacing,
    sync_tree,
    write_json,
    write_whole,
)
from rlvlm.core.errors import UsageError


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_new_content_takes_the_place_of_the_old(tmp_path):
    file = tmp_path / "made" / "by the way.txt"
    write_whole(file, "old")
    write_whole(file, b"new")
    assert file.read_bytes() == b"new"
    write_json(file, {"a": [1, 2]})
    assert file.read_text() == '{\n  "a": [\n    1,\n    2\n  ]\n}\n'
    assert list(file.parent.iterdir()) == [file]


def test_a_full_disk_leaves_a_whole_file_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "summary.json"
    write_whole(file, "old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
    write_whole(file, "not waited for", is_synced=False)
    assert file.read_text() == "not waited for"


def test_a_writer_that_fails_leaves_no_partial_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "table.parquet") as partial:
        partial.write_text("half of it")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    file = tmp_path / "mark"
    with replacing(file) as one, replacing(file) as other:
        one.write_text("one")
        other.write_text("other")
        assert one != other
        assert not file.exists()
    assert file.read_text() == "one"  # its block ended last


def test_a_full_disk_leaves_a_growing_file_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "lines"
    append_whole(file, b"first\n")
    append_whole(file, b"second\n")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        append_whole(file, b"third\n")
    assert file.read_bytes() == b"first\nsecond\n"


def test_a_folder_that_cannot_be_renamed_leaves_the_old_one(tmp_path, monkeypatch):
    for name in ("folder", "partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)

    def refuse(source: Path, target: Path, real=os.rename) -> None:
        if Path(source).name == "partial":
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="Input/output"):
        replace_folder(tmp_path / "partial", tmp_path / "folder")
    assert (tmp_path / "folder" / "who").read_text() == "folder"
    monkeypatch.undo()
    replace_folder(tmp_path / "partial", tmp_path / "folder")
    assert (tmp_path / "folder" / "who").read_text() == "partial"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_tree_is_synced_to_its_last_file(tmp_path, monkeypatch):
    write_whole(tmp_path / "a" / "b" / "file", "x")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    sync_tree(tmp_path)
    assert {Path(path).name for path in synced} == {"file", "a", "b", tmp_path.name}


def test_only_the_files_of_a_killed_process_are_cleared(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = {name: tmp_path / name for name in ("w-killed", "w-own", "w-unmarked", "other")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "weights").write_bytes(b"1")
    (tmp_path / "w-link").symlink_to(folders["other"])
    held = [claim(folders["w-own"])]
    code = "import sys, time; from rlvlm.core.disk import claim; held = claim(__import__('pathlib').Path(sys.argv[1]));"
    words = [sys.executable, "-c", f"{code} print('claimed', flush=True); time.sleep(600)", str(folders["w-killed"])]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"claimed\n"
        clear_abandoned("w-")
        assert folders["w-killed"].exists(), "its process lives"
        child.kill()
    clear_abandoned("w-")
    assert {path.name for path in tmp_path.iterdir()} == {"w-own", "w-unmarked", "other", "w-link"}
    held.pop().close()
    claim(folders["other"]).close()
    clear_abandoned("w-")
    assert {path.name for path in tmp_path.iterdir()} == {"w-unmarked", "other", "w-link"}, "a link is not followed"


@pytest.fixture
def no_locks(monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(disk, "STALE_S", 0.4)
    monkeypatch.setattr(disk, "HEARTBEAT_S", 0.05)


def is_refused(file: Path) -> bool:
    try:
        with held(file, "another process is writing", "wait"):
            assert (file.parent / f".{file.name}.claim").exists(), "never without a claim"
        return False
    except UsageError:
        return True


def test_without_locks_a_claim_file_keeps_others_out_until_its_process_ends(tmp_path, no_locks):
    file, claim = tmp_path / "command.txt", tmp_path / ".command.txt.claim"
    with held(file, "another process is writing", "wait"):
        assert is_refused(file) and is_refused(file)
    assert not is_refused(file) and not claim.exists()
    with held(file, "", ""):
        own = json.loads(claim.read_text())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        left = own | {"pid": child.pid, "started": disk._started(child.pid)}
        claim.write_text(json.dumps(left))
        assert is_refused(file), "it lives"
        child.kill()
    assert not is_refused(file) and not list(tmp_path.glob(".*")), "it is gone, and leaves nothing"
    claim.write_text(json.dumps(left | {"pid": os.getpid()}))
    assert not is_refused(file), "another process has its number"
    claim.write_text(json.dumps(own | {"token": "../../etc"}))
    assert is_refused(file), "nothing that we wrote: left to the user"


@pytest.mark.slow
def test_a_claim_of_another_machine_is_stale_when_it_gives_no_sign_of_life(tmp_path, no_locks):
    file, claim = tmp_path / "command.txt", tmp_path / ".command.txt.claim"
    with held(file, "", ""):
        elsewhere = json.dumps(json.loads(claim.read_text()) | {"machine": "node7", "token": "0" * 16})
    claim.write_text(elsewhere)
    beat = threading.Timer(0.2, os.utime, (claim,))
    beat.start()
    assert is_refused(file), "it lives"
    beat.join()
    (mark := tmp_path / f"{claim.name}.after-{'0' * 16}").touch()
    assert is_refused(file), "another process is taking it over"
    mark.unlink()
    assert not is_refused(file) and not list(tmp_path.glob(".*"))
    with held(file, "", ""):
        before = claim.stat().st_mtime_ns
        time.sleep(0.3)
        assert claim.stat().st_mtime_ns > before, "a sign of life"


def test_a_file_system_without_fsync_of_folders_is_named_and_used(tmp_path, monkeypatch, caplog):
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    disk._warn.cache_clear()
    monkeypatch.setattr(os, "fsync", refuse)
    sync_tree(tmp_path)
    sync_tree(tmp_path)
    assert len(caplog.messages) == 1 and "has no fsync of folders" in caplog.text
    assert disk.file_system(tmp_path).split(" at ")[1] in (str(tmp_path), *map(str, tmp_path.parents))


def test_a_link_that_leads_out_is_not_written_through(tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / "last").symlink_to("step_1")
    check_links(folder)
    (folder / "lines").symlink_to(outside / "lines")
    with pytest.raises(OSError, match="symbolic links"):
        append_whole(folder / "lines", b"x")
    (folder / "lines").unlink()
    for name in ("videos", "checkpoints/step_1"):
        link = folder / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(outside)
        with pytest.raises(UsageError, match=f"{link} is a symbolic link that leads out"):
            check_links(folder)
        link.unlink()
    assert list(outside.iterdir()) == []
