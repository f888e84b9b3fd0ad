"""Files and folders that appear whole or not at all, and lines that are appended whole. Every room writes through here.

A crash, a full disk or another process sees the old content or the new one, and never a part of either.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rlvlm.core.errors import UsageError

_CLAIM = ".claim"
"""A file in a temporary folder; who uses the folder holds a lock on it."""


@contextmanager
def replacing(path: Path, *, is_synced: bool = True) -> Iterator[Path]:
    """A temporary file beside `path` for the block to write, which takes the place of `path` when the block ends well.

    The temporary name is of this writer alone, so several may write the same file at once; the last one stays.

    Args:
        path: of the file; its folder is made if missing.
        is_synced: waits until the disk has the content, so that it outlives a power cut. Without it only other
            processes are certain to see whole files.

    Raises:
        OSError: the disk refused; `path` is as it was before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
        if is_synced:
            _sync(partial)  # before the rename: else a power cut can leave the name with no content
        os.replace(partial, path)  # atomic, as both are on one disk
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes, *, is_synced: bool = True) -> None:
    """Puts a file in place in one move; arguments and errors as of `replacing`."""
    with replacing(path, is_synced=is_synced) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Puts a JSON file in place in one move, indented for readers."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def held(file: Path, what: str, fix: str) -> Iterator[None]:
    """Holds a file for this process while the context is open; it is made where there is none.

    Args:
        file: whose content plays no part.
        what: is said where another process holds it.
        fix: what to do then.

    Raises:
        UsageError: another process holds it.
    """
    with open(file, "a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(what, fix) from error
        # the kernel lets go of the lock with the stream, also where this process is killed
        yield


def shipped(name: str) -> Path:
    """A file or folder that ships beside the package: in the checkout, else in the installed package."""
    package = Path(__file__).resolve().parents[1]
    return next((path for root in (package.parent, package) if (path := root / name).exists()), package / name)


def expand_home(text: str) -> str:
    """A word of a command line or a value of a file, with the home folder in place of a `~` that begins a path: shells
    do that for `--out ~/x`, but not for `--out=~/x`, and YAML never does.
    """
    path = re.fullmatch(r"(--[\w.-]+=|)(~(?:/.*)?)", text, re.DOTALL)
    return path[1] + os.path.expanduser(path[2]) if path else text


def append_whole(path: Path, content: bytes) -> None:
    """Adds `content` to the end of a file, and returns once the disk has it.

    Raises:
        OSError: the disk refused; the file has its old length again.
    """
    data = memoryview(content)
    # Unbuffered, so that closing after a failure has nothing left to write.
    with open(path, "ab", buffering=0) as file:
        length = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError:
            # a full disk may have taken half a line, which the next one would be glued to
            with suppress(OSError):
                file.truncate(length)
            raise


def replace_folder(partial: Path, folder: Path) -> None:
    """Renames the complete folder `partial` to `folder`, and sets aside what was there until the new one stands.

    Raises:
        OSError: the disk refused; `folder` is as it was before.
    """
    # a folder that is not empty cannot be renamed over: for a moment between the two renames there is none
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    had_one = folder.exists()
    if had_one:
        os.rename(folder, aside)
    try:
        os.rename(partial, folder)
    except OSError:
        if had_one:
            os.rename(aside, folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Returns once the disk has every file below `folder`, and the folders' own entries."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def claim(folder: Path) -> IO[bytes]:
    """Marks a temporary folder as in use by this process, until the file that is returned is closed or the process ends
    in whatever way; then `clear_abandoned` may take the folder away.
    """
    partial = folder / f"{_CLAIM}.partial"
    file = open(partial, "wb")  # noqa: SIM115 - held by the caller
    fcntl.flock(file, fcntl.LOCK_EX)
    os.replace(partial, folder / _CLAIM)  # locked before anybody can find it
    return file


def clear_abandoned(prefix: str) -> None:
    """Removes folders that a killed process left among the temporary ones.

    Args:
        prefix: of their names. Of these, folders that somebody alive has claimed stay, and so do those without a claim.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # in use, somebody else's, or gone by now
            if folder.is_symlink():
                continue
            with open(folder / _CLAIM, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
