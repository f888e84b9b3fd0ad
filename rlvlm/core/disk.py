"""Files and folders that appear whole or not at all, and lines that are appended whole. All packages write through
here.

After a crash or with a full disk, and for another process, there is the old content or the new, never a part of it.

Some file systems have no symbolic links (exFAT, CIFS), locks (Lustre without `flock`) or fsync of folders (CIFS, FUSE).
Anything that only adds safety is then left out, with a warning; a lock is replaced by a claim file.
"""

import errno
import fcntl
import functools
import json
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rlvlm.core.errors import UsageError

_CLAIM = ".claim"
"""File in a temporary folder that a process locks while it uses the folder."""
HEARTBEAT_S = 15.0
"""Interval between two updates of a claim file, in seconds."""
STALE_S = 60.0
"""Time without an update after which another machine's claim counts as stale, in seconds."""
NOT_OFFERED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOLCK, errno.EISDIR, errno.EBADF)
"""Error numbers of an OSError for operations that a file system does not support."""

logger = logging.getLogger(__name__)


@contextmanager
def replacing(path: Path, *, is_synced: bool = True) -> Iterator[Path]:
    """Yields a temporary file beside `path` to write, which replaces `path` if the block ends without an error.

    The temporary name is unique, so several writers may write the same file at once; the last one wins.

    Args:
        path: path of the file; its folder is created if missing.
        is_synced: waits until the content is on disk, so that it survives a power cut. Without it only other processes
            are certain to see whole files.

    Raises:
        OSError: the disk cannot be written; `path` is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
        if is_synced:
            _sync(partial)  # before the rename: else a power cut could leave the name without content
        os.replace(partial, path)  # atomic, as both are on one disk
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes, *, is_synced: bool = True) -> None:
    """Writes a file in one move; arguments and errors as for `replacing`."""
    with replacing(path, is_synced=is_synced) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file in one move, indented for readers."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def held(file: Path, what: str, fix: str) -> Iterator[None]:
    """Holds a lock on a file for this process while the context is open; the file is created if missing.

    Args:
        file: the lock file; its content is not used.
        what: error message if another process holds it.
        fix: advice for that case.

    Raises:
        UsageError: another process holds it.
    """
    with open(file, "a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NOT_OFFERED:
                raise UsageError(what, fix) from error
            without("locks (flock)", file, "a claim file keeps other processes out")
            with _claimed(file.with_name(f".{file.name}.claim"), what, fix):
                yield
            return
        # the kernel releases the lock with the stream, also if this process is killed
        yield


@contextmanager
def _claimed(claim: Path, what: str, fix: str) -> Iterator[None]:
    """Implements `held` by a file that exists while the context is open, and whose time shows that its process lives.

    A stale claim of this machine is recognised by its process. One of another machine is watched for `STALE_S`; clocks,
    which may differ, are not compared.

    Raises:
        UsageError: a living process has claimed it.
    """
    own = {"token": secrets.token_hex(8), "machine": _machine(), "pid": os.getpid(), "started": _started(os.getpid())}
    text = json.dumps(own)
    try:
        with open(claim, "x") as file:
            file.write(text)
    except FileExistsError as error:
        found = _read(claim)
        if found is None or _lives(claim, found):
            raise UsageError(what, f"{fix}; if none lives, remove {claim}") from error
        # of several processes that see the same stale claim only the one that creates this file may replace it
        mark = claim.with_name(f"{claim.name}.after-{json.loads(found)['token']}")
        try:
            open(mark, "x").close()
        except FileExistsError as lost:
            raise UsageError(what, f"{fix}; if none lives, remove {claim} and {mark}") from lost
        try:
            if _read(claim) != found:
                raise UsageError(what, fix) from error
            write_whole(claim, text)
        finally:
            mark.unlink()
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            with suppress(OSError):
                if _read(claim) == text:
                    os.utime(claim)
                elif claim.exists():  # this process stood still for too long
                    logger.critical("%s is another process's now: this one ends, with nothing more written", claim)
                    os._exit(3)

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        done.set()
        if _read(claim) == text:
            claim.unlink()


def _read(claim: Path) -> str | None:
    """Returns the text of a claim; None if it is gone, or not written yet."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        text = claim.read_text()
        # the token becomes part of a file's name
        return text if re.fullmatch(r"[0-9a-f]{16}", json.loads(text)["token"]) else None
    return None


def _lives(claim: Path, text: str) -> bool:
    """Returns whether the process that wrote a claim is still alive."""
    found = json.loads(text)
    if found.get("machine") == _machine():
        return _started(found.get("pid")) == found.get("started") != ""
    logger.warning(
        "%s is of another machine (pid %s): waiting %g s for a sign of life", claim, found.get("pid"), STALE_S
    )
    seen, end = claim.stat().st_mtime_ns, time.monotonic() + STALE_S
    while time.monotonic() < end:
        time.sleep(min(1.0, STALE_S / 10))
        try:
            if claim.stat().st_mtime_ns != seen or _read(claim) != text:
                return True
        except OSError:  # it was released meanwhile: the next process may have it
            return True
    return False


@functools.cache
def _machine() -> str:
    """Returns an id of the machine on which process numbers are valid: host, boot of its kernel, and container."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(pid: object) -> str:
    """Returns the start time of a process of this machine, in kernel ticks; empty if there is no such process."""
    with suppress(OSError):
        # the name of the program, in brackets, may hold anything
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


@functools.cache
def _warn(lacks: str, kind: str, instead: str) -> None:
    logger.warning("the file system (%s) has no %s: %s", kind, lacks, instead)


def without(lacks: str, path: Path, instead: str) -> None:
    """Warns once about a missing feature of `path`'s file system and its replacement."""
    _warn(lacks, file_system(path), instead)


def file_system(path: Path) -> str:
    """Returns type and mount point of the file system of `path`, e.g. `exfat at /media/stick`."""
    kind, place, here = "unknown", "", path.absolute()
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            point = Path(line.split()[1].replace("\\040", " "))
            if here.is_relative_to(point) and len(str(point)) >= len(place):
                kind, place = line.split()[2], str(point)
    return f"{kind} at {place or here}"


def shipped(name: str) -> Path:
    """Returns a file or folder that ships beside the package: in the checkout, else in the installed package."""
    package = Path(__file__).resolve().parents[1]
    return next((path for root in (package.parent, package) if (path := root / name).exists()), package / name)


def make_output_folder(folder: Path) -> None:
    """Creates the folder of a command's results and tries it, before hours or money are spent on them.

    Raises:
        UsageError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"nothing can be written to {folder}: {error.strerror}", "name another folder") from error


def expand_home(text: str) -> str:
    """Expands a `~` that begins a path in a command-line argument or a value of a file.

    Shells do that for `--out ~/x`, but not for `--out=~/x`, and YAML never does.
    """
    path = re.fullmatch(r"(--[\w.-]+=|)(~(?:/.*)?)", text, re.DOTALL)
    return path[1] + os.path.expanduser(path[2]) if path else text


def append_whole(path: Path, content: bytes) -> None:
    """Appends `content` to a file, and returns once it is on disk.

    Raises:
        OSError: the disk cannot be written; the file has its old length again.
    """
    data = memoryview(content)
    # unbuffered, so that closing after a failure has nothing left to write
    with open(path, "ab", buffering=0, opener=no_link) as file:
        length = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
            _sync_open(file.fileno(), path)
        except OSError as error:
            error.filename = error.filename or str(path)
            # a full disk may have taken half a line, which the next one would be joined to
            with suppress(OSError):
                file.truncate(length)
            raise


def replace_folder(partial: Path, folder: Path) -> None:
    """Renames the complete folder `partial` to `folder`, and keeps the old one aside until the new one is in place.

    Raises:
        OSError: the disk cannot be written; `folder` is unchanged.
    """
    # a folder that is not empty cannot be replaced by a rename: between the two renames there is none for a moment
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    had_folder = folder.exists()
    if had_folder:
        os.rename(folder, aside)
    try:
        os.rename(partial, folder)
    except OSError:
        if had_folder:
            os.rename(aside, folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Returns once every file below `folder` and the folders' entries are on disk."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def claim(folder: Path) -> IO[bytes]:
    """Marks a temporary folder as used by this process, until the returned file is closed or the process ends.

    Then `clear_abandoned` may remove the folder.
    """
    partial = folder / f"{_CLAIM}.partial"
    file = open(partial, "wb")  # noqa: SIM115 - held by the caller
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        without("locks (flock)", folder, "what a killed process leaves there stays")
    os.replace(partial, folder / _CLAIM)  # locked before another process can find it
    return file


def clear_abandoned(prefix: str) -> None:
    """Removes temporary folders that a killed process left behind.

    Args:
        prefix: start of their names. Folders that a living process has claimed stay, and so do those without a claim.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # in use, another user's, or gone by now
            if folder.is_symlink():
                continue
            with open(folder / _CLAIM, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def no_link(path: str, flags: int) -> int:
    """Opens a file as `open` does, unless its name is a symbolic link, which another user may have put there."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def check_links(folder: Path) -> None:
    """Raises if a symbolic link below `folder` leads out of it: files written there would land elsewhere.

    Raises:
        UsageError: names the link.
    """
    home = folder.resolve()
    for place, names, files in os.walk(folder):
        for path in (Path(place, name) for name in (*names, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                what = f"{path} is a symbolic link that leads out of its folder, to {path.resolve()}"
                fix = (
                    "remove the link, or put what it leads to in its place (RLVLM_SCRATCH names a disk for checkpoints)"
                )
                raise UsageError(what, fix)


def try_file_system(folder: Path) -> None:
    """Reports missing features of the file system of `folder`, before hours of work depend on it.

    Raises:
        OSError: it fails for another reason.
    """
    make_link(folder / ".try", "nothing")
    (folder / ".try").unlink()
    _sync(folder)


def make_link(link: Path, name: str) -> None:
    """Creates a symbolic link to `name`, or a file with the name in it if the file system has no links."""
    try:
        link.symlink_to(name)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        without("symbolic links (symlink)", link.parent, "`last` and `best` are files with a checkpoint's name in them")
        link.write_text(name)


def _sync(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        if not path.is_dir() or error.errno not in (*NOT_OFFERED, errno.EACCES):
            raise
        without("fsync of folders", path, "a power cut may cost the newest files")
        return
    try:
        _sync_open(descriptor, path)
    finally:
        os.close(descriptor)


def _sync_open(descriptor: int, path: Path) -> None:
    """Returns once the written data are on disk, or at once if the file system does not support that."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        without("fsync of folders" if path.is_dir() else "fsync", path, "a power cut may cost the newest files")
