"""Arrays out of a pickle that nobody unpickles: the opcodes are read, and nothing they name is ever imported or called.

A pickle is a program. This reader knows the few instructions with which numpy writes arrays into lists, carries them
out by hand on plain values, and refuses every other. Used to import label files of the reference implementation.
"""

import os
import pickletools
import stat
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError

MAX_FILE_BYTES = 2 * 2**30
MAX_OPCODES = 100_000
"""Seven arrays take about a hundred."""
_TYPES = frozenset({"b1", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"})
_VALUES = frozenset(
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE BINUNICODE8 SHORT_BINUNICODE BINBYTES BINBYTES8 "
    "SHORT_BINBYTES BYTEARRAY8".split()
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = frozenset({"BINPUT", "LONG_BINPUT"}), frozenset({"BINGET", "LONG_BINGET"})
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
    machine = _Machine()
    try:
        # genops only parses; a length that lies beyond the end of the file is an error there
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number >= MAX_OPCODES:
                raise RefusedPickle(f"it has more than {MAX_OPCODES:,} instructions")
            machine.do(opcode.name, argument)
        return machine.result()
    except RefusedPickle:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise RefusedPickle(f"it is torn or makes no sense ({type(error).__name__})") from error


class _Machine:
    """A pickle's stack, marks and memo, with plain values on them."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def do(self, opcode: str, argument: Any) -> None:
        """Carries out one instruction.

        Raises:
            RefusedPickle: it is none of those that arrays are made of.
        """
        if opcode in _VALUES:
            self._stack.append(argument)
        elif opcode in _CONSTANTS:
            self._stack.append(_CONSTANTS[opcode])
        elif opcode in _PUTS or opcode == "MEMOIZE":
            self._memo[len(self._memo) if opcode == "MEMOIZE" else argument] = self._stack[-1]
        elif opcode in _GETS:
            self._stack.append(self._memo[argument])
        elif opcode in _TUPLES:
            self._stack.append(tuple(self._take(_TUPLES[opcode])))
        elif handler := _HANDLERS.get(opcode):
            handler(self, argument)
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            raise RefusedPickle(f"it has the instruction {opcode}, which no array needs")

    def result(self) -> list[NDArray[Any]]:
        """What is left on the stack when the program ends."""
        (top,) = self._stack
        if not isinstance(top, list) or not all(isinstance(item, _Array) for item in top):
            raise RefusedPickle("a list of arrays is wanted at its top")
        arrays = [item.array for item in top]
        if any(array is None for array in arrays):
            raise RefusedPickle("it has an array without content")
        return arrays

    def _take(self, count: int) -> list[Any]:
        if count > len(self._stack):
            raise RefusedPickle("it takes more than there is")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return taken

    def _since_mark(self) -> list[Any]:
        return self._take(len(self._stack) - self._marks.pop())

    def _grow(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise RefusedPickle("it appends to what is no list")
        self._stack[-1].extend(items)

    def _name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)) or (module, name) not in _NAMES:
            raise RefusedPickle(f"it names {str(module)[:60]!r} {str(name)[:60]!r}, which no array needs")
        self._stack.append(_Name(_NAMES[module, name]))

    def _reduce(self) -> None:
        """Where unpickling would call, this makes a placeholder."""
        callee, arguments = self._take(2)
        what = callee.what if isinstance(callee, _Name) else ""
        if what == "reconstruct" and len(arguments) == 3 and arguments[0] == _Name("ndarray"):
            self._stack.append(_Array())
        elif what == "dtype" and arguments[0] in _TYPES:
            self._stack.append(_Type(arguments[0]))
        elif what == "frombuffer":
            raw, kind, shape, order = arguments
            self._stack.append(_Array(_make(raw, kind, shape, order == "F")))
        elif what == "bytes" and not arguments:
            self._stack.append(b"")
        elif what == "encode" and len(arguments) == 2 and arguments[1] == "latin1":
            self._stack.append(arguments[0].encode("latin1"))
        else:
            raise RefusedPickle("it calls something in a way that no array needs")

    def _build(self) -> None:
        """Where unpickling would set a state, this fills a placeholder."""
        target, state = self._take(2)
        if isinstance(target, _Type) and len(state) == 8 and state[1] in ("<", ">", "|", "="):
            target.order = state[1]
        elif isinstance(target, _Array) and len(state) == 5:
            _, shape, kind, is_fortran, raw = state
            target.array = _make(raw, kind, shape, is_fortran is True)
        else:
            raise RefusedPickle("it sets the state of something that is no array")
        self._stack.append(target)


_HANDLERS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": lambda machine, _: machine._marks.append(len(machine._stack)),
    "EMPTY_LIST": lambda machine, _: machine._stack.append([]),
    "TUPLE": lambda machine, _: machine._stack.append(tuple(machine._since_mark())),
    "EMPTY_TUPLE": lambda machine, _: machine._stack.append(()),
    "APPEND": lambda machine, _: machine._grow(machine._take(1)),
    "APPENDS": lambda machine, _: machine._grow(machine._since_mark()),
    "GLOBAL": lambda machine, argument: machine._name(*argument.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine._name(*machine._take(2)),
    "REDUCE": lambda machine, _: machine._reduce(),
    "BUILD": lambda machine, _: machine._build(),
}


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
