"""Files and folders that appear whole or not at all, and lines that are appended whole. Every room writes through here.

A crash, a full disk or another process sees the old content or the new one, and never a part of either.

Some file systems have no symbolic links (exFAT, CIFS), locks (Lustre without `flock`) or fsync of folders (CIFS, FUSE).
What only adds safety is then left out, with a warning; a lock is replaced by a claim file.
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
from typing import IO, Any

from rlvlm.core.errors import UsageError

_CLAIM = ".claim"
"""A file in a temporary folder; a process that uses the folder holds a lock on it."""
HEARTBEAT_S = 15.0
"""Seconds between two signs of life in a claim file."""
STALE_S = 60.0
"""A claim of another machine that gives no sign of life for so long is of a process that is gone."""
NOT_OFFERED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOLCK, errno.EISDIR, errno.EBADF)
"""Numbers of an OSError that says that a file system does not know what it was asked for."""

logger = logging.getLogger(__name__)


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
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
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
            if error.errno not in NOT_OFFERED:
                raise UsageError(what, fix) from error
            without("locks (flock)", file, "a claim file keeps other processes out")
            with _claimed(file.with_name(f".{file.name}.claim"), what, fix):
                yield
            return
        # the kernel lets go of the lock with the stream, also where this process is killed
        yield


@contextmanager
def _claimed(claim: Path, what: str, fix: str) -> Iterator[None]:
    """`held` by a file that exists while the context is open, and shows in its time that its process lives.

    A claim that a process of this machine left is known by that process. One of another machine is watched for
    `STALE_S`; clocks, which may differ, play no part.

    Raises:
        UsageError: a process that lives has claimed it.
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
        # of several that see the same stale claim one makes this file, and it alone may replace the claim
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
    """What a claim says; None where it is gone, or not written yet."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        text = claim.read_text()
        # the token becomes part of a file's name
        return text if re.fullmatch(r"[0-9a-f]{16}", json.loads(text)["token"]) else None
    return None


def _lives(claim: Path, text: str) -> bool:
    """Whether the process that wrote a claim is still there."""
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
        except OSError:  # it was given up meanwhile: the next process may have it
            return True
    return False


@functools.cache
def _machine() -> str:
    """Where process numbers mean what they mean here: host, start of its kernel, and container."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(pid: object) -> str:
    """When a process of this machine was started, in ticks of its kernel; empty where there is none of that number."""
    with suppress(OSError):
        # the name of the program, in brackets, may hold anything
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


@functools.cache
def _warn(lacks: str, kind: str, instead: str) -> None:
    logger.warning("the file system (%s) has no %s: %s", kind, lacks, instead)


def without(lacks: str, path: Path, instead: str) -> None:
    """Says once what the file system of `path` lacks, and what is done instead."""
    _warn(lacks, file_system(path), instead)


def file_system(path: Path) -> str:
    """Kind and place of the file system that `path` is on, e.g. `exfat at /media/stick`."""
    kind, place, here = "unknown", "", path.absolute()
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            point = Path(line.split()[1].replace("\\040", " "))
            if here.is_relative_to(point) and len(str(point)) >= len(place):
                kind, place = line.split()[2], str(point)
    return f"{kind} at {place or here}"


def shipped(name: str) -> Path:
    """A file or folder that ships beside the package: in the checkout, else in the installed package."""
    package = Path(__file__).resolve().parents[1]
    return next((path for root in (package.parent, package) if (path := root / name).exists()), package / name)


def make_output_folder(folder: Path) -> None:
    """Makes the folder of a command's results and tries it, before hours or money are spent on them.

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
    with open(path, "ab", buffering=0, opener=no_link) as file:
        length = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
            _sync_open(file.fileno(), path)
        except OSError as error:
            error.filename = error.filename or str(path)
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
    """Returns once the disk has every file below `folder`, and the folders' own entries."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def claim(folder: Path) -> IO[bytes]:
    """Marks a temporary folder as in use by this process, until the file that is returned is closed or the process ends
    in whatever way; then `clear_abandoned` may take the folder away.
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
    """Removes folders that a killed process left among the temporary ones.

    Args:
        prefix: of their names. Of these, folders that a live process has claimed stay, and so do those without a claim.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # in use, somebody else's, or gone by now
            if folder.is_symlink():
                continue
            with open(folder / _CLAIM, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def no_link(path: str, flags: int) -> int:
    """Opens a file as `open` does, unless its name is a symbolic link, which somebody else may have put there."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def check_links(folder: Path) -> None:
    """Raises where a symbolic link below `folder` leads out of it: what is written there would land elsewhere.

    Raises:
        UsageError: says which does.
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
    """Says what the file system of `folder` lacks, before hours of work depend on it.

    Raises:
        OSError: it refuses for another reason.
    """
    make_link(folder / ".try", "nothing")
    (folder / ".try").unlink()
    _sync(folder)


def make_link(link: Path, name: str) -> None:
    """A symbolic link to `name`, or a file with the name in it where the file system has no links."""
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
    """Returns once the disk has what was written, or at once where the file system cannot say so."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        without("fsync of folders" if path.is_dir() else "fsync", path, "a power cut may cost the newest files")
