"""Videos by name: the one folder that callers may name files of, walked without following anything out of it."""

import os
import stat
from pathlib import Path

from rlvlm.core.errors import MachineError
from rlvlm.serving.refusal import Refusal

MAX_VIDEO_BYTES = 32 * 2**20
MAX_PARTS = 16
SUFFIXES = (".mp4", ".m4v", ".mov")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class MediaRoot:
    """The folder that `video_path` may name files of.

    A name is walked one part at a time from an open descriptor of the folder, so that nothing that is swapped
    underneath, no link and no `..` leads out. Whatever is wrong, the caller reads one and the same refusal: it tells
    nothing about what is there.
    """

    def __init__(self, root: str) -> None:
        """Opens the folder; an empty name means that every `video_path` is refused.

        Raises:
            MachineError: it is not a folder that can be read.
        """
        self._name = root.rstrip("/")
        try:
            self._root = os.open(root, _DIRECTORY & ~os.O_NOFOLLOW) if root else None
        except OSError as error:
            raise MachineError(
                f"the media root {root} cannot be opened: {error.strerror}",
                "make it, or name another: --media-root DIR",
            ) from error

    def read(self, name: str) -> bytes:
        """The whole file that `name` means, relative to the root, or absolute and inside it.

        Raises:
            Refusal: it names no video that this server may read.
        """
        try:
            return self._read(self._parts(name))
        except (OSError, ValueError):
            raise Refusal(
                400,
                "video_path",
                "video_path names no video that this server may read",
                "name an MP4 inside its media root, or upload frames",
            ) from None

    def _parts(self, name: str) -> list[str]:
        if self._root is None or not name.isprintable() or len(name) > 1_024:
            raise ValueError
        inside = name.removeprefix(self._name + "/")
        parts = inside.split("/")
        if len(parts) > MAX_PARTS or any(part in ("", ".", "..") or "\\" in part for part in parts):
            raise ValueError
        if Path(parts[-1]).suffix.lower() not in SUFFIXES:
            raise ValueError
        return parts

    def _read(self, parts: list[str]) -> bytes:
        assert self._root is not None
        folder = os.dup(self._root)
        try:
            for part in parts[:-1]:
                inner = os.open(part, _DIRECTORY, dir_fd=folder)
                os.close(folder)
                folder = inner
            descriptor = os.open(parts[-1], _FILE, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            _check(os.fstat(descriptor))
            with open(descriptor, "rb", closefd=False) as stream:
                data = stream.read(MAX_VIDEO_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(data) > MAX_VIDEO_BYTES or data[4:8] != b"ftyp":
            raise ValueError
        return data


def _check(found: os.stat_result) -> None:
    """Raises ValueError unless it is a plain file of ours, of a size to be read, and known by one name alone."""
    is_plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
    if not (is_plain and found.st_uid == os.geteuid() and found.st_size <= MAX_VIDEO_BYTES):
        raise ValueError
