"""The growing files of a store: each writer appends to its own, every reader reads them all.

One record per line, each with its own checksum: a torn or flipped line is detected and affects no other.
"""

import json
import logging
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlvlm.core.disk import append_whole
from rlvlm.core.foreign import open_inside, parse_json

logger = logging.getLogger(__name__)

SUFFIX = ".jsonl"
MAX_LINE_BYTES = 4 * 2**20
"""Length in bytes above which a line is not ours: the longest text of a judge is a thousand times shorter."""
_CHECKSUM_CHARS = 8
_CHUNK_BYTES = 2**20
_NAME = re.compile(r"(\d{8}T\d{6})(?:\.(\d{6}))?-[0-9a-f]{16}" + re.escape(SUFFIX))
"""Pattern of a segment's name: the second in which it was begun, and its number; older versions gave it no number."""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a line."""

    file: Path
    offset: int
    length: int
    """Bytes, without the line break."""


class CorruptLine(ValueError):  # noqa: N818 - named for what is found
    """The line is damaged, or was not written by rlvlm."""


def encode_line(record: dict[str, Any]) -> bytes:
    """Returns the line of a record, with its line break: CRC-32 in hex, a space, JSON."""
    # ASCII by default: models write lone surrogates, which have no UTF-8
    body = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode_line(line: bytes) -> dict[str, Any]:
    """Returns the record of an untrusted line, with or without its line break.

    Raises:
        CorruptLine: the checksum does not match, or its content is no JSON object.
    """
    line = line.rstrip(b"\n")
    checksum, body = line[:_CHECKSUM_CHARS], line[_CHECKSUM_CHARS + 1 :]
    # before the JSON is parsed, which takes many times the memory of its text
    if len(line) > MAX_LINE_BYTES:
        raise CorruptLine(f"longer than {MAX_LINE_BYTES} bytes")
    if line[_CHECKSUM_CHARS : _CHECKSUM_CHARS + 1] != b" " or checksum != b"%08x" % zlib.crc32(body):
        raise CorruptLine("its checksum does not fit")
    try:
        record = parse_json(body)
    except ValueError as error:  # an attacker can compute a checksum too
        raise CorruptLine(f"no JSON behind its checksum: {type(error).__name__}") from error
    if not isinstance(record, dict):
        raise CorruptLine(f"a JSON object is wanted, got {type(record).__name__}")
    return record


class Segments:
    """The folder of all segments, created with the first: appends to its own segment, reads them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own: Path | None = None
        self._process = 0
        self._read_to: dict[Path, int] = {}
        self.damaged: list[tuple[Place, str]] = []
        """Lines that were rejected, with the reason."""

    @property
    def read_to(self) -> dict[str, int]:
        """Bytes of each segment that were read, by its name."""
        return {file.name: end for file, end in self._read_to.items()}

    def skip(self, read_to: Mapping[str, int]) -> None:
        """Takes so many bytes of each segment, by its name, as read before."""
        self._read_to = {self._folder / name: end for name, end in read_to.items()}

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        """Adds whole lines in one write, and returns once they are on disk.

        Raises:
            OSError: the disk cannot be written; the segment is unchanged.
        """
        if not records:
            return
        # made with the first record; a fork of a writer's process begins its own segment
        if self._own is None or self._process != os.getpid():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._own, self._process = self._folder / self._next_name(), os.getpid()
            self._own.touch(exist_ok=False)
        # one segment per writer: on a network file system, appends from several machines to one file overwrite each
        # other
        append_whole(self._own, b"".join(map(encode_line, records)))

    def new_records(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Yields the records not yielded before, segment by segment in the order in which the segments were begun.

        A last line without a line break is left for the next call: its writer may still be at work, or died. A damaged
        line is added to `damaged` and skipped.
        """
        for file in self._files():
            start = self._read_to.get(file, 0)
            # a store of many runs has thousands of segments, and one of them grows
            for place, line in _whole_lines(file, start) if file.stat().st_size > start else ():
                # before decoding, so that a damaged line is reported only once
                self._read_to[file] = place.offset + place.length + 1
                try:
                    record = decode_line(line)
                except CorruptLine as damage:
                    self.report(place, str(damage))
                else:
                    yield place, record

    def num_unfinished(self) -> int:
        """Returns the number of segments without a final line break: their writer is at work, or died."""
        return sum(file.stat().st_size > self._read_to.get(file, 0) for file in self._files())

    def report(self, place: Place, reason: str) -> None:
        """Records a rejected line."""
        self.damaged.append((place, reason))
        logger.warning("%s, byte %d: a line is damaged (%s) and not believed", place.file, place.offset, reason)

    def _next_name(self) -> str:
        """Returns a name that sorts after those of all segments that are there, whatever the clocks of their machines
        said; the random part tells writers apart that begin at the same moment.
        """
        found = (_NAME.fullmatch(file.name) for file in self._files())
        last, number = max(((match[1], int(match[2] or 0)) for match in found if match), default=("", 0))
        second = f"{datetime.now(UTC):%Y%m%dT%H%M%S}"
        second, number = (second, 0) if second > last else (last, number + 1)
        return f"{second}.{number:06d}-{secrets.token_hex(8)}{SUFFIX}"

    def _files(self) -> list[Path]:
        """Returns the regular files in the order of their names: a link or a device among them is no segment."""
        files = self._folder.glob(f"*{SUFFIX}") if self._folder.is_dir() else ()
        return sorted(file for file in files if stat.S_ISREG(file.lstat().st_mode))


def read_record(place: Place) -> dict[str, Any]:
    """Reads the record of one line again.

    Raises:
        CorruptLine: the line has changed.
        OSError: its file is gone.
    """
    with open_inside(place.file.parents[1], place.file) as stream:
        stream.seek(place.offset)
        return decode_line(stream.read(place.length))


def _whole_lines(file: Path, start: int) -> Iterator[tuple[Place, bytes]]:
    """Yields complete lines from byte `start` on, in constant memory; a line that is far too long is cut."""
    with open_inside(file.parents[1], file) as stream:  # in a folder of a store
        stream.seek(start)
        while line := stream.readline(MAX_LINE_BYTES + 2):
            length = len(line)
            # the rest of an endless line is counted and dropped; its last byte shows whether it is complete
            while not line.endswith(b"\n") and (more := stream.readline(_CHUNK_BYTES)):
                length += len(more)
                line = line[: MAX_LINE_BYTES + 1] + more[-1:]
            if line.endswith(b"\n"):
                yield Place(file, start, length - 1), line
            start += length
