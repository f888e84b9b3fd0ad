"""What an image file says about itself, read from its first bytes without decoding: kind, width, height, copies.

Readers of image formats do much when they open a file: they inflate text chunks, allocate a canvas of the size that
the header claims, follow a thousand scans. These few lines come first, and refuse.

Sources: PNG specification (third edition), sections 5.2 and 11.2; ITU-T T.81, annex B; WebP container specification.
"""

import struct
from dataclasses import dataclass

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"eXIf", b"IDAT", b"IEND")
_MAX_EXIF_BYTES = 65_536
"""As in a JPEG; longer ones are left out."""
_MAX_PNG_CHUNKS = 4_096
_MAX_SEGMENTS = 256
"""Segments of a JPEG, or chunks of a WebP, before the image itself."""
_MAX_JPEG_SCANS = 24
"""Each scan costs a pass over the whole image; progressive files in use have about ten."""
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}


@dataclass(frozen=True, slots=True)
class Header:
    """A still image, as its own header describes it."""

    kind: str
    """`PNG`, `JPEG` or `WEBP`."""
    width_px: int
    height_px: int
    data: bytes
    """The file without what is not needed to draw it."""

    @property
    def num_pixels(self) -> int:
        """Width times height."""
        return self.width_px * self.height_px


def read_header(data: bytes) -> Header:
    """The header of the image file `data`.

    Raises:
        ValueError: not a still PNG, JPEG or WebP, or one that is made to cost more than it shows; says which.
    """
    try:
        if data.startswith(_PNG):
            return _png(data)
        if data.startswith(b"\xff\xd8\xff"):
            return _jpeg(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp(data)
    except (struct.error, IndexError):
        raise ValueError("the file ends in the middle") from None
    raise ValueError("it is no PNG, JPEG or WebP")


def _png(data: bytes) -> Header:
    """Keeps only the chunks that draw: text, profiles and animation frames are never inflated."""
    kept = [_PNG]
    size: tuple[int, int] | None = None
    at, num_chunks = len(_PNG), 0
    while at < len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + 12 + length
        num_chunks += 1
        if end > len(data) or num_chunks > _MAX_PNG_CHUNKS:
            raise ValueError("the PNG is cut off or has too many chunks")
        if (size is None) != (name == b"IHDR"):
            raise ValueError("the PNG does not begin with its one header")
        if name == b"acTL":
            raise ValueError("it is animated")
        if name == b"IHDR":
            size = struct.unpack_from(">II", data, at + 8)
        if name in _PNG_KEPT and not (name == b"eXIf" and length > _MAX_EXIF_BYTES):
            kept.append(data[at:end])
        at = end
        if name == b"IEND":
            break
    if size is None:
        raise ValueError("the PNG has no header")
    return Header("PNG", *size, b"".join(kept))


def _jpeg(data: bytes) -> Header:
    """Walks the segments before the first scan; from there on only counts scans, as no marker hides in their data."""
    size: tuple[int, int] | None = None
    at = 2
    for _ in range(_MAX_SEGMENTS):
        fill, marker, length = struct.unpack_from(">BBH", data, at)
        if fill != 0xFF or marker in (0x00, 0xFF) or length < 2:
            raise ValueError("the JPEG is damaged before its image begins")
        if marker == 0xDA:
            break
        if marker in _OTHER_FRAMES or (marker in _FRAMES and size is not None):
            raise ValueError("it is a JPEG of a kind that cameras do not write")
        if marker in _FRAMES:
            _, height, width, num_colours = struct.unpack_from(">BHHB", data, at + 4)
            if num_colours not in (1, 3):
                raise ValueError(f"a JPEG has 1 or 3 colours, it has {num_colours}")
            size = (width, height)
        at += 2 + length
    if size is None or data.count(b"\xff\xda", at) > _MAX_JPEG_SCANS:
        raise ValueError(f"a JPEG has one header and at most {_MAX_JPEG_SCANS} scans")
    return Header("JPEG", *size, data)


def _webp(data: bytes) -> Header:
    """One frame only; the frame itself must say the same size as the canvas around it."""
    (riff_size,) = struct.unpack_from("<I", data, 4)
    if riff_size + 8 > len(data) + 1:
        raise ValueError("the WebP is cut off")
    canvas: tuple[int, int] | None = None
    at = 12
    for _ in range(_MAX_SEGMENTS):
        name, length = struct.unpack_from("<4sI", data, at)
        start = at + 8
        if name == b"VP8X":
            if data[start] & 0x02:
                raise ValueError("it is animated")
            canvas = (
                1 + int.from_bytes(data[start + 4 : start + 7], "little"),
                1 + int.from_bytes(data[start + 7 : start + 10], "little"),
            )
        elif name == b"VP8 ":
            if data[start + 3 : start + 6] != b"\x9d\x01\x2a":
                raise ValueError("the WebP does not begin with a whole image")
            width, height = struct.unpack_from("<HH", data, start + 6)
            return _webp_header(data, canvas, (width & 0x3FFF, height & 0x3FFF))
        elif name == b"VP8L":
            if data[start] != 0x2F:
                raise ValueError("the WebP does not begin with a whole image")
            (bits,) = struct.unpack_from("<I", data, start + 1)
            return _webp_header(data, canvas, (1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)))
        at = start + length + (length & 1)
    raise ValueError("the WebP has no image in it")


def _webp_header(data: bytes, canvas: tuple[int, int] | None, size: tuple[int, int]) -> Header:
    if canvas is not None and canvas != size:
        raise ValueError("the WebP names two sizes")
    return Header("WEBP", *size, data)
