"""Reads files from untrusted sources within bounds: a file's claims are checked against its size before memory is
allocated, and control characters in its texts are made visible.

A folder from elsewhere is data: a reader of one opens each of its files with `open_inside`, which stays within the
folder. `open_regular` is for a file that the user named himself.

Used for demonstrations, benches, label stores, checkpoints and recorded data.
"""

import codecs
import errno
import json
import math
import os
import re
import stat
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from rlvlm.core.errors import UsageError

if TYPE_CHECKING:  # --help imports modules that read files, and should not wait for this
    import numpy as np

MAX_JSON_BYTES = 64 * 2**20
_FREE_BYTES = 64 * 2**20
"""Unpacked size of arrays that is always allowed, however small the file, in bytes."""
_MAX_RATIO = 100
"""Bytes unpacked per byte of a file, beyond that; floats of a simulator shrink to a third, zeros to a thousandth."""
_MAX_DIGITS = 300
"""Digits of an integer in JSON; the largest float has 309."""

_BLOB = re.compile(r"((?:\.\./)+)blobs/([0-9a-f]{40}|[0-9a-f]{64})")
"""Link of a Hugging Face cache: up to the repository's folder, and to a file named by its SHA-1 or SHA-256."""

# all but tab and line feed: escape sequences, marks that turn the direction of writing, halves of a pair
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Returns `text` with escapes for the characters that a terminal obeys, since foreign files may have any."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def open_regular(path: Path) -> BinaryIO:
    """Opens a file that the user named, for reading; it is no device, and no pipe without a writer.

    Raises:
        OSError: it is missing, or of another kind.
    """
    return _regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path)


class OutsideFolder(UsageError, OSError):  # noqa: N818 - named for what is found
    """A name in a folder from elsewhere leads out of it."""


def open_inside(root: Path, file: Path) -> BinaryIO:
    """Opens a file of a folder that somebody else may have made, for reading; never one outside of the folder.

    The path is walked part by part from a descriptor of the folder, without following links, so neither `..` nor a link
    nor a file that is exchanged meanwhile leads out. One kind of link is followed: from a snapshot in a Hugging Face
    cache to the `blobs` beside the snapshots, which is how its files are stored.

    Args:
        root: folder that the user named; may itself be a link.
        file: `root / name`, where the name may be anybody's.

    Raises:
        OutsideFolder: the file lies outside of the folder, or behind a link.
        OSError: it is missing, or of another kind than a regular file.
    """
    if not file.is_relative_to(root) or ".." in (parts := file.relative_to(root).parts) or not parts:
        raise OutsideFolder(
            f"{file} lies outside of {root}, whose own files alone are read", "copy it into that folder"
        )
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = _open_at(folder, part, file, os.O_DIRECTORY)
            os.close(folder)
            folder = inner
        descriptor = _open_at(folder, parts[-1], file)
    finally:
        os.close(folder)
    return _regular(descriptor, file)


def _open_at(folder: int, name: str, file: Path, flags: int = 0) -> int:
    """Returns a descriptor of `name` in the folder with the descriptor `folder`, without following links out."""
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR) or not _is_link(folder, name):
            raise OSError(error.errno, os.strerror(error.errno or 0), str(file)) from error
    if blob := _BLOB.fullmatch(os.readlink(name, dir_fd=folder)):
        ups, digest = blob.groups()
        with suppress(OSError):
            # only from inside of `snapshots`, whose neighbour `blobs` then is
            if os.path.samestat(os.stat(f"{ups}snapshots", dir_fd=folder), os.stat(ups[3:] or ".", dir_fd=folder)):
                blobs = os.open(f"{ups}blobs", flags | os.O_DIRECTORY, dir_fd=folder)
                try:
                    return os.open(digest, flags, dir_fd=blobs)
                finally:
                    os.close(blobs)
    raise OutsideFolder(
        f"{file} leads through a link, {name}, and links in a folder of data are not followed (cp -rL)",
        "cp -rL FOLDER COPY, if you know what its links name, and read the copy",
    )


def _is_link(folder: int, name: str) -> bool:
    with suppress(OSError):
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def _regular(descriptor: int, file: Path) -> BinaryIO:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{file} is not a regular file")
    return open(descriptor, "rb")


def files_ending(folder: Path, *endings: str) -> list[Path]:
    """Returns the entries of a folder with one of the endings, e.g. `.mp4`, in small letters or capitals, by name;
    none if there is no such folder.
    """
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(file for file in found if file.suffix.lower() in endings)


def read_bytes(file: Path, max_bytes: int, root: Path | None = None) -> bytes:
    """Returns the content of a file.

    Args:
        file: path of the file.
        max_bytes: limit on its size.
        root: folder from elsewhere that the file belongs to; None: the user named the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than `max_bytes`.
    """
    with open_regular(file) if root is None else open_inside(root, file) as stream:
        # this many bytes are allocated before the first is read
        content = stream.read(min(max_bytes, os.fstat(stream.fileno()).st_size) + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return content


def read_text(file: Path, max_bytes: int = MAX_JSON_BYTES, root: Path | None = None) -> str:
    """Returns the text in a file, as UTF-8, or as UTF-16 if a byte order mark says so; arguments as for `read_bytes`.

    A byte order mark, as Windows writes it, is no part of the text.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than `max_bytes`, or no such text.
    """
    content = read_bytes(file, max_bytes, root)
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if is_wide else "utf-8-sig")


def read_json(file: Path, max_bytes: int = MAX_JSON_BYTES, root: Path | None = None) -> Any:
    """Returns the value in a JSON file; arguments as for `read_bytes`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than `max_bytes`, nested too deeply, or not JSON.
    """
    return parse_json(read_text(file, max_bytes, root))


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: it is nested too deeply, not JSON, or has an integer beyond every float.
    """
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:  # readers compare numbers with floats, which ends in an OverflowError
        raise ValueError(f"it has a number of {len(digits):,} digits")
    return int(digits)


def check_claim(num_bytes: int, file_bytes: int) -> None:
    """Raises ValueError if a file of `file_bytes` claims too many bytes unpacked, `num_bytes`.

    Too many are over a hundred times as many, and over 64 MiB.
    """
    if num_bytes > max(_FREE_BYTES, _MAX_RATIO * file_bytes):
        raise ValueError(f"a file of {file_bytes:,} bytes claims to hold {num_bytes:,}")


def read_arrays(path: Path, *, is_compressed: bool, root: Path | None = None) -> "dict[str, np.ndarray]":
    """Returns the arrays of an npz by name; no pickles, and none larger than its header and its file allow.

    Args:
        path: path of the file.
        is_compressed: whether arrays may be compressed, up to a hundredfold if they are larger than 64 MiB together;
            otherwise the file must hold every byte that they claim.
        root: see `read_bytes`.

    Raises:
        OSError: it cannot be read.
        ValueError: it claims more than that, or is not such a file.
        BadZipFile, zlib.error, EOFError, NotImplementedError: it is damaged.
    """
    arrays = {}
    opened = open_regular(path) if root is None else open_inside(root, path)
    with opened as file, zipfile.ZipFile(file) as archive:
        members, size = archive.infolist(), os.fstat(file.fileno()).st_size
        if not is_compressed and any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("its arrays are compressed, which ours are not")
        num_claimed = sum(member.file_size for member in members)
        if is_compressed:
            check_claim(num_claimed, size)
        elif num_claimed > size:
            raise ValueError("its arrays claim more bytes than the file has")
        for member in members:
            with archive.open(member) as stream:
                array = _read_array(stream, member.file_size)
            arrays[member.filename.removesuffix(".npy")] = array
    return arrays


def read_array(path: Path, root: Path | None = None) -> "np.ndarray":
    """Returns the array of an npy file; no pickle, and none larger than its file.

    Raises:
        OSError: it cannot be read.
        ValueError: it claims more than that, or is not such a file.
    """
    with open_regular(path) if root is None else open_inside(root, path) as stream:
        return _read_array(stream, os.fstat(stream.fileno()).st_size)


def _read_array(stream: IO[bytes], max_bytes: int) -> "np.ndarray":
    import numpy as np
    from numpy.lib import format as npy

    read_headers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    version = npy.read_magic(stream)
    if version not in read_headers:
        raise ValueError(f"an array is of format {version}")
    shape, is_fortran, dtype = read_headers[version](stream)
    num_bytes = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or num_bytes > max_bytes:
        raise ValueError(f"an array of shape {shape} and type {dtype} does not fit its bytes")
    # np.load would allocate the claimed size before it reads; here it is known to fit, and exactly as much is read: a
    # member of an archive may hold more than it says, too
    content = bytearray(stream.read(num_bytes))
    if len(content) != num_bytes or stream.read(1):
        raise ValueError(f"an array of shape {shape} and type {dtype} does not fit its bytes")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C")
