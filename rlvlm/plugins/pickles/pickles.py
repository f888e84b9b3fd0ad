"""Reads arrays from a pickle in which every name maps to a placeholder of ours: nothing that it names is imported.

A pickle is a program. Its instructions are checked before the first is run: only the few that numpy needs to write
arrays into lists are allowed, and none may request more memory than the file has bytes. Used to import label files of
the reference implementation.
"""

import io
import pickle
import pickletools
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import read_bytes

MAX_FILE_BYTES = 2 * 2**30
MAX_OPCODES = 100_000
"""Limit on instructions; seven arrays take about a hundred."""
# no objects, texts or records: arrays of those hold more than numbers
_TYPES = frozenset({"b1", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"})
_OPCODES = frozenset(
    "PROTO FRAME STOP BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE BINUNICODE8 SHORT_BINUNICODE BINBYTES BINBYTES8 "
    "SHORT_BINBYTES BYTEARRAY8 NONE NEWTRUE NEWFALSE BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET MARK EMPTY_LIST "
    "EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE APPEND APPENDS GLOBAL STACK_GLOBAL REDUCE BUILD".split()
)
"""Instructions that arrays in a list need; none for dictionaries or objects of classes."""
_BROKEN = (
    ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError, EOFError,
    BufferError, pickle.UnpicklingError,
)  # fmt: skip
"""Errors that a damaged or senseless pickle program raises."""


class RefusedPickle(UsageError):  # noqa: N818 - named for what is done with it
    """The file holds something other than arrays, or inconsistent arrays."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the file is not read: {reason}",
            "only lists of plain numpy arrays are imported, as the reference implementation's pickle.dump writes them",
        )


def read_pickled_arrays(source: Path | bytes) -> list[np.ndarray]:
    """Returns the arrays in a pickled list, in order.

    Args:
        source: a file, or its content; untrusted.

    Raises:
        RefusedPickle: it holds anything else; says which instruction or name was found.
    """
    data = source if isinstance(source, bytes) else _read(source)
    if data[:1] != b"\x80":
        raise RefusedPickle("it is no pickle of protocol 2 to 5")
    try:
        _check_program(data)
        top = _Reader(data).load()
    except _BROKEN as error:
        raise RefusedPickle(f"it is torn or makes no sense ({type(error).__name__})") from error
    if not isinstance(top, list) or not all(isinstance(item, _Array) for item in top):
        raise RefusedPickle("a list of arrays is wanted at its top")
    arrays = [item.array for item in top]
    if any(array is None for array in arrays):
        raise RefusedPickle("it has an array without content")
    return arrays


def _check_program(data: bytes) -> None:
    """Raises RefusedPickle unless every instruction is one that arrays need, and requests no memory of its own."""
    # genops only parses; a length beyond the end of the file is an error there
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if number >= MAX_OPCODES:  # a few bytes can request any number of them
            raise RefusedPickle(f"it has more than {MAX_OPCODES:,} instructions")
        if opcode.name not in _OPCODES:
            raise RefusedPickle(f"it has the instruction {opcode.name}, which no array needs")
        # the unpickler's memo is an array: five bytes that write to index 2 ** 31 allocate 32 GiB
        if opcode.name == "LONG_BINPUT" and (place := int(argument or 0)) > number:
            raise RefusedPickle(f"it puts something at place {place:,} of its memo, which no array needs")


class _Type:
    """Placeholder for a dtype."""

    def __init__(self, code: object, *_: object) -> None:
        # text first: hashing or printing nested tuples takes as long as all that they contain
        if not isinstance(code, str) or code not in _TYPES:
            raise RefusedPickle("it has an array of anything but plain numbers")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        if len(state) != 8 or state[1] not in ("<", ">", "|", "="):
            raise RefusedPickle("it sets the state of something that is no array")
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """Placeholder for an array until its content arrives."""

    def __init__(self, *_: object) -> None:
        self.array: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, raw = state
        self.fill(raw, kind, shape, "F" if is_fortran is True else "C")

    def fill(self, raw: object, kind: object, shape: object, order: object) -> "_Array":
        """Sets the content from bytes after checking that type, shape and length agree."""
        if not (isinstance(raw, bytes | bytearray) and isinstance(kind, _Type) and isinstance(shape, tuple)):
            raise RefusedPickle("an array needs bytes, a plain type and a shape")
        if len(shape) > 8 or not all(type(size) is int and size >= 0 for size in shape):
            raise RefusedPickle("an array's shape is a few whole numbers")
        # checked before anything is allocated: a shape is a claim, the bytes are real
        if prod(shape) * kind.dtype.itemsize != len(raw):
            raise RefusedPickle(f"an array of shape {shape} and type {kind.dtype} has not {len(raw):,} bytes")
        self.array = np.frombuffer(raw, kind.dtype).reshape(shape, order="F" if order == "F" else "C")
        return self


class _Reader(pickle.Unpickler):
    """Unpickles a program that passed `_check_program`."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._num_bytes = len(data)

    def find_class(self, module: str, name: str) -> Any:
        """Returns our placeholder for a name; instead of importing it, this only compares text."""
        match module, name:
            case (("numpy.core.multiarray" | "numpy._core.multiarray"), "_reconstruct"):
                return _Array  # its content arrives as its state
            case (("numpy.core.numeric" | "numpy._core.numeric"), "_frombuffer"):  # protocol 5: it comes with the call
                return lambda raw, kind, shape, order: _Array().fill(raw, kind, shape, order)
            case "numpy", "dtype":
                return _Type
            case "numpy", "ndarray":
                return name  # an argument of _reconstruct
            case "_codecs", "encode":  # protocol 2 has no bytes and writes them so
                return self._encode
            case "__builtin__", "bytes":
                return lambda: b""
        raise RefusedPickle(f"it names {module[:60]!r} {name[:60]!r}, which no array needs")

    def _encode(self, text: Any, encoding: object) -> bytes:
        if encoding != "latin1":
            raise RefusedPickle("it calls something in a way that no array needs")
        # each text of the file once, or copies of a long one would cost only a few bytes each
        self._num_bytes -= len(text)
        if self._num_bytes < 0:
            raise RefusedPickle("it encodes more text than the file has")
        return text.encode("latin1")


def _read(file: Path) -> bytes:
    """Returns the bytes of a file, which may be one of a folder that the user named.

    Raises:
        RefusedPickle: it is a link, no regular file, too large, or cannot be read.
    """
    try:
        return read_bytes(file, MAX_FILE_BYTES, file.parent)
    except (OSError, ValueError) as error:
        raise RefusedPickle(f"{file} cannot be opened: {error}") from error
