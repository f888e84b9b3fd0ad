"""Reads files from untrusted sources within bounds: a file's claims are checked against its size before memory is
allocated, and control characters in its texts are made visible.

Used for demonstrations, benches, checkpoints and recorded data.
"""

import json
import math
import os
import re
import stat
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:  # --help imports modules that read files, and should not wait for this
    import numpy as np

MAX_JSON_BYTES = 64 * 2**20
_FREE_BYTES = 64 * 2**20
"""Unpacked size of arrays that is always allowed, however small the file, in bytes."""
_MAX_RATIO = 100
"""Bytes unpacked per byte of a file, beyond that; floats of a simulator shrink to a third, zeros to a thousandth."""

# all but tab and line feed: escape sequences, marks that turn the direction of writing, halves of a pair
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Returns `text` with escapes for the characters that a terminal obeys, since foreign files may have any."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading that is no device, and no pipe without a writer.

    Raises:
        OSError: it is missing, or of another kind.
    """
    stream = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 - for the caller
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(f"{path} is not a regular file")
    return stream


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than `max_bytes`.
    """
    with open_regular(path) as stream:
        # this many bytes are allocated before the first is read
        content = stream.read(min(max_bytes, os.fstat(stream.fileno()).st_size) + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return content


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Returns the value in a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than `max_bytes`, nested too deeply, or not JSON.
    """
    content = read_bytes(path, max_bytes)
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_claim(num_bytes: int, file_bytes: int) -> None:
    """Raises ValueError if a file of `file_bytes` claims too many bytes unpacked, `num_bytes`.

    Too many are over a hundred times as many, and over 64 MiB.
    """
    if num_bytes > max(_FREE_BYTES, _MAX_RATIO * file_bytes):
        raise ValueError(f"a file of {file_bytes:,} bytes claims to hold {num_bytes:,}")


def read_arrays(path: Path, *, is_compressed: bool) -> "dict[str, np.ndarray]":
    """Returns the arrays of an npz by name; no pickles, and none larger than its header and its file allow.

    Args:
        path: path of the file.
        is_compressed: whether arrays may be compressed, up to a hundredfold if they are larger than 64 MiB together;
            otherwise the file must hold every byte that they claim.

    Raises:
        OSError: it cannot be read.
        ValueError: it claims more than that, or is not such a file.
        BadZipFile, zlib.error, EOFError, NotImplementedError: it is damaged.
    """
    import numpy as np
    from numpy.lib import format as npy

    read_headers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    arrays = {}
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
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
                version = npy.read_magic(stream)
                if version not in read_headers:
                    raise ValueError(f"an array is of format {version}")
                shape, is_fortran, dtype = read_headers[version](stream)
                num_bytes = math.prod(shape) * dtype.itemsize
                if dtype.hasobject or num_bytes > member.file_size:
                    raise ValueError(f"an array of shape {shape} and type {dtype} does not fit its bytes")
                # np.load would allocate the claimed size before it reads; here it is known to fit, and exactly as much
                # is unpacked: a member may hold more than it says, too
                content = bytearray(stream.read(num_bytes))
                if len(content) != num_bytes or stream.read(1):
                    raise ValueError(f"an array of shape {shape} and type {dtype} does not fit its bytes")
            array = np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C")
            arrays[member.filename.removesuffix(".npy")] = array
    return arrays
