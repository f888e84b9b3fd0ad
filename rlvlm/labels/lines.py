"""One record per line, each with its own checksum: a torn or flipped line is known as such and costs only itself."""

import json
import zlib
from typing import Any

MAX_LINE_BYTES = 4 * 2**20
"""Longer lines are not ours: the longest text that a judge writes is a thousand times shorter."""
_CHECKSUM_CHARS = 8


class DamagedLine(ValueError):  # noqa: N818 - named for what is found
    """A line that is not what was written, or that nobody of ours wrote."""


def encode_line(record: dict[str, Any]) -> bytes:
    """The line of a record, with its line break: CRC-32 in hex, a space, JSON."""
    body = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode_line(line: bytes) -> dict[str, Any]:
    """The record of a line.

    Args:
        line: with or without its line break; untrusted.

    Raises:
        DamagedLine: the checksum does not fit, or what it covers is no JSON object.
    """
    line = line.rstrip(b"\n")
    checksum, body = line[:_CHECKSUM_CHARS], line[_CHECKSUM_CHARS + 1 :]
    if len(line) > MAX_LINE_BYTES:
        raise DamagedLine(f"longer than {MAX_LINE_BYTES} bytes")
    if line[_CHECKSUM_CHARS : _CHECKSUM_CHARS + 1] != b" " or checksum != b"%08x" % zlib.crc32(body):
        raise DamagedLine("its checksum does not fit")
    try:
        record = json.loads(body)
    except (ValueError, RecursionError) as error:  # an attacker can compute a checksum too
        raise DamagedLine(f"no JSON behind its checksum: {type(error).__name__}") from error
    if not isinstance(record, dict):
        raise DamagedLine(f"a JSON object is wanted, got {type(record).__name__}")
    return record
