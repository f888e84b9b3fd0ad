"""Index of a large store's lines, in one file: a process that opens the store reads what came after it, and holds that.

The segments alone are the truth. Whoever finds much that the index lacks writes it anew, in one move; an index that is
lost, torn or another's costs time and no answer, as each line that it leads to is checked by its key.
"""

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.disk import replacing
from rlvlm.core.foreign import open_inside, parse_json
from rlvlm.labels.segments import MAX_LINE_BYTES, Place

_WHAT = "rlvlm label index 1"
_MAX_HEADER_BYTES = 64 * 2**20
"""Maximum length of the header, which names every segment: some 80 bytes each."""
_COLUMNS = {"keys": "<u8", "offsets": "<u8", "lengths": "<u4", "segments": "<u4"}
"""Columns of the file after its header, one after the other."""


def _head(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


@dataclass(frozen=True)
class Index:
    """Places of answers by the first eight bytes of their keys, which lie on disk and are paged in where needed."""

    folder: Path = Path()
    """Folder of the segments."""
    covered: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each segment up to which it is indexed, by name, in their order."""
    keys: NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.uint64))
    """[N] first bytes of the keys, ascending; of one key the first line that counts is the first here."""
    offsets: NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.uint64))
    """[N] first byte of each line."""
    lengths: NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.uint32))
    """[N] bytes of each line."""
    segments: NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.uint32))
    """[N] index of each line's segment in `covered`."""

    @classmethod
    def read(cls, file: Path, folder: Path) -> Self:
        """Returns the index in a file, mapped into memory; an empty one if there is none that fits the segments."""
        try:
            with open_inside(file.parent, file) as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = parse_json(stream.read(min(size, _MAX_HEADER_BYTES)))
                covered, num = {str(name): int(end) for name, end in header["covered"].items()}, int(header["num"])
                data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            begin, columns = 8 + size, {}
            for name, kind in _COLUMNS.items():
                columns[name] = np.frombuffer(data, kind, num, begin)
                begin += columns[name].nbytes
            # a segment that is gone or shorter is another store's, or was repaired by hand
            fits = all(
                (folder / name).name == name and (folder / name).stat().st_size >= covered[name] for name in covered
            )
            if header["what"] != _WHAT or begin != len(data) or not fits:
                return cls(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return cls(folder)
        return cls(folder, covered, **columns)

    def find(self, key: bytes) -> Iterator[Place]:
        """Yields the lines that may hold the answer with this key, the first that counts first."""
        names, head = list(self.covered), np.uint64(_head(key))
        first = int(np.searchsorted(self.keys, head))
        while first < len(self.keys) and self.keys[first] == head:
            offset, length = int(self.offsets[first]), int(self.lengths[first])
            if self.segments[first] < len(names) and length <= MAX_LINE_BYTES:
                name = names[self.segments[first]]
                if offset + length <= self.covered[name]:
                    yield Place(self.folder / name, offset, length)
            first += 1

    def num_new(self, keys: Iterator[bytes]) -> int:
        """Returns the number of those keys that are not indexed."""
        heads = np.fromiter(map(_head, keys), np.uint64)
        return int((~np.isin(heads, self.keys)).sum())

    def joined(self, places: Mapping[bytes, tuple[Path, int, int]], covered: Mapping[str, int]) -> "Index":
        """Returns an index of these lines too, in memory.

        Args:
            places: file, offset and length of further lines, by key.
            covered: bytes of each segment up to which all its lines are in one of the two, by name.
        """
        names = {name: number for number, name in enumerate(sorted(covered))}
        numbers = np.array([names[name] for name in self.covered], np.uint32)
        rows = [(_head(key), offset, length, names[file.name]) for key, (file, offset, length) in places.items()]
        added = list(zip(*rows, strict=True)) or [()] * 4
        own = self.keys, self.offsets, self.lengths, numbers[self.segments]
        kinds = _COLUMNS.values()
        keys, offsets, lengths, segments = (
            np.concatenate([old, np.array(new, kind)]) for old, new, kind in zip(own, added, kinds, strict=True)
        )
        order = np.lexsort((offsets, segments, keys))
        return Index(
            self.folder,
            {name: covered[name] for name in names},
            keys[order],
            offsets[order],
            lengths[order],
            segments[order],
        )

    def write(self, file: Path) -> None:
        """Writes the index in one move; raises OSError if the disk cannot be written."""
        header = json.dumps({"what": _WHAT, "covered": dict(self.covered), "num": len(self.keys)}).encode()
        header += b" " * (-len(header) % 8)  # the columns begin where their numbers are aligned
        # not synced: one that is lost in a power cut is written anew
        with replacing(file, is_synced=False) as partial, open(partial, "wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            for name in _COLUMNS:
                stream.write(np.ascontiguousarray(getattr(self, name)).data)
