"""Arrays out of a pickle that nobody unpickles: the opcodes are read, and nothing they name is ever imported or called.

A pickle is a program. This reader knows the few instructions with which numpy writes arrays into lists, carries them
out by hand on plain values, and refuses every other. Used to import label files of the reference implementation.
"""

import os
import pickletools
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError

MAX_FILE_BYTES = 2 * 2**30
MAX_OPCODES = 100_000
"""Seven arrays take about a hundred."""
# no objects, texts or records: an array of those holds more than numbers
_TYPES = frozenset({"b1", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"})
_VALUES = frozenset(
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE BINUNICODE8 SHORT_BINUNICODE BINBYTES BINBYTES8 "
    "SHORT_BINBYTES BYTEARRAY8".split()
)
"""Instructions that put their argument on the stack as it is."""
_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy._core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy.core.numeric", "_frombuffer"): "frombuffer",
    ("numpy._core.numeric", "_frombuffer"): "frombuffer",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
    ("__builtin__", "bytes"): "bytes",
}
"""All that a pickle may name, and what we take it for. None of it is imported."""


class RefusedPickle(UsageError):  # noqa: N818 - named for what is done with it
    """A file that holds anything but arrays, or arrays that contradict themselves."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the file is not read: {reason}",
            "only lists of plain numpy arrays are imported, as the reference implementation's pickle.dump writes them",
        )


@dataclass(slots=True)
class _Name:
    """Stands where a global was named."""

    what: str


@dataclass(slots=True)
class _Type:
    """Stands where a dtype is made."""

    code: str
    order: str = "="


@dataclass(slots=True)
class _Array:
    """Stands where an array is made, until its state comes."""

    array: NDArray[Any] | None = None


def read_pickled_arrays(source: Path | bytes) -> list[NDArray[Any]]:
    """The arrays in a pickled list, in order.

    Args:
        source: a file, or its content; untrusted.

    Raises:
        RefusedPickle: it holds anything else; says which instruction or name was met.
    """
    data = source if isinstance(source, bytes) else _read(source)
    if data[:1] != b"\x80":
        raise RefusedPickle("it is no pickle of protocol 2 to 5")
    try:
        (top,) = _run(data)
    except RefusedPickle:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise RefusedPickle(f"it is torn or makes no sense ({type(error).__name__})") from error
    if not isinstance(top, list) or not all(isinstance(item, _Array) for item in top):
        raise RefusedPickle("a list of arrays is wanted at its top")
    arrays = [item.array for item in top]
    if any(array is None for array in arrays):
        raise RefusedPickle("it has an array without content")
    return arrays


def _run(data: bytes) -> list[Any]:  # noqa: C901 - one instruction after the other
    """The stack when the program ends: plain values, and placeholders for names, types and arrays.

    Raises:
        RefusedPickle: an instruction is none of those that arrays are made of.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def take(count: int) -> list[Any]:
        if count > len(stack):  # a slice would give fewer without a word
            raise RefusedPickle("it takes more than there is")
        taken = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return taken

    # genops only parses; a length that lies beyond the end of the file is an error there
    program = cast(Iterator[tuple[pickletools.OpcodeInfo, Any, Any]], pickletools.genops(data))
    for number, (opcode, argument, _) in enumerate(program):
        if number >= MAX_OPCODES:  # a few bytes can ask for any number of them
            raise RefusedPickle(f"it has more than {MAX_OPCODES:,} instructions")
        match opcode.name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case name if name in _VALUES:
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE" as name:
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                stack.append(tuple(take(int(name[-1]))))
            case "TUPLE":
                stack.append(tuple(take(len(stack) - marks.pop())))
            case "APPEND" | "APPENDS" as name:
                items = take(1 if name == "APPEND" else len(stack) - marks.pop())
                if not isinstance(stack[-1], list):
                    raise RefusedPickle("it appends to what is no list")
                stack[-1].extend(items)
            case "GLOBAL":
                stack.append(_named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(_named(*take(2)))
            case "REDUCE":
                stack.append(_made_by(*take(2)))
            case "BUILD":
                stack.append(_filled(*take(2)))
            case name:
                raise RefusedPickle(f"it has the instruction {name}, which no array needs")
    return stack


def _named(module: Any, name: Any) -> _Name:
    """Where unpickling would import, this only compares words."""
    if not (isinstance(module, str) and isinstance(name, str)) or (module, name) not in _NAMES:
        raise RefusedPickle(f"it names {str(module)[:60]!r} {str(name)[:60]!r}, which no array needs")
    return _Name(_NAMES[module, name])


def _made_by(callee: Any, arguments: Any) -> Any:
    """Where unpickling would call, this makes a placeholder."""
    what = callee.what if isinstance(callee, _Name) else ""
    if what == "reconstruct" and len(arguments) == 3 and arguments[0] == _Name("ndarray"):
        return _Array()
    if what == "dtype" and arguments[0] in _TYPES:
        return _Type(arguments[0])
    if what == "frombuffer":  # protocol 5: the bytes come with the call, older protocols set them as a state
        raw, kind, shape, order = arguments
        return _Array(_make(raw, kind, shape, order == "F"))
    if what == "bytes" and not arguments:
        return b""
    if what == "encode" and len(arguments) == 2 and arguments[1] == "latin1":
        return arguments[0].encode("latin1")  # how protocol 2, which knows no bytes, writes them
    raise RefusedPickle("it calls something in a way that no array needs")


def _filled(target: Any, state: Any) -> Any:
    """Where unpickling would set a state, this fills a placeholder."""
    if isinstance(target, _Type) and len(state) == 8 and state[1] in ("<", ">", "|", "="):
        target.order = state[1]
    elif isinstance(target, _Array) and len(state) == 5:
        _, shape, kind, is_fortran, raw = state
        target.array = _make(raw, kind, shape, is_fortran is True)
    else:
        raise RefusedPickle("it sets the state of something that is no array")
    return target


def _make(raw: Any, kind: Any, shape: Any, is_fortran: bool) -> NDArray[Any]:
    """An array of the bytes given, once type, shape and length agree."""
    if not (isinstance(raw, bytes | bytearray) and isinstance(kind, _Type) and isinstance(shape, tuple)):
        raise RefusedPickle("an array needs bytes, a plain type and a shape")
    if len(shape) > 8 or not all(type(size) is int and size >= 0 for size in shape):
        raise RefusedPickle("an array's shape is a few whole numbers")
    dtype = np.dtype(kind.order + kind.code)
    # checked before anything is allocated: a shape is a claim, the bytes are what there is
    if prod(shape) * dtype.itemsize != len(raw):
        raise RefusedPickle(f"an array of shape {shape} and type {dtype} has not {len(raw):,} bytes")
    return np.frombuffer(raw, dtype).reshape(shape, order="F" if is_fortran else "C")


def _read(file: Path) -> bytes:
    """A regular file's bytes.

    Raises:
        RefusedPickle: it is no file, too large, or cannot be read.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise RefusedPickle(f"{file} is no regular file")
            if about.st_size > MAX_FILE_BYTES:
                raise RefusedPickle(f"{file} has {about.st_size:,} bytes, at most {MAX_FILE_BYTES:,} are read")
            return stream.read()
    except OSError as error:
        raise RefusedPickle(f"{file} cannot be opened: {error.strerror}") from error
