"""Files stay as they were when a writer fails, and come whole when it does not."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlvlm.core.disk import (
    append_whole,
    claim,
    clear_abandoned,
    replace_folder,
    replacing,
    sync_tree,
    write_json,
    write_whole,
)


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_new_content_takes_the_place_of_the_old(tmp_path: Path) -> None:
    file = tmp_path / "made" / "by the way.txt"
    write_whole(file, "old")
    write_whole(file, b"new")
    assert file.read_bytes() == b"new"
    write_json(file, {"a": [1, 2]})
    assert file.read_text() == '{\n  "a": [\n    1,\n    2\n  ]\n}\n'
    assert list(file.parent.iterdir()) == [file]


def test_a_full_disk_leaves_a_whole_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "summary.json"
    write_whole(file, "old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
    write_whole(file, "not waited for", is_synced=False)
    assert file.read_text() == "not waited for"


def test_a_writer_that_fails_leaves_no_partial_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "table.parquet") as partial:
        partial.write_text("half of it")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    file = tmp_path / "mark"
    with replacing(file) as one, replacing(file) as other:
        one.write_text("one")
        other.write_text("other")
        assert one != other
        assert not file.exists()
    assert file.read_text() == "one"  # its block ended last


def test_a_full_disk_leaves_a_growing_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lines"
    append_whole(file, b"first\n")
    append_whole(file, b"second\n")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        append_whole(file, b"third\n")
    assert file.read_bytes() == b"first\nsecond\n"


def test_a_folder_that_cannot_be_renamed_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_tree_is_synced_to_its_last_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a" / "b" / "file", "x")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    sync_tree(tmp_path)
    assert {Path(path).name for path in synced} == {"file", "a", "b", tmp_path.name}


def test_what_a_killed_process_left_is_cleared_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
