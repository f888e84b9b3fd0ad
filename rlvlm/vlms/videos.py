"""MP4 files from any source: opened without access to other files, their frames rotated as players show them.

Every video is decoded here: uploads and `video_path` of the server, videos of recorded data.
"""

import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import av
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream
from numpy.typing import NDArray

from rlvlm.core.foreign import check_claim

# only the opened file is read: a playlist, or a reference inside an MP4, could name any file or address
_DEMUXER = {"protocol_whitelist": "", "enable_drefs": "0", "use_absolute_path": "0"}
MAX_HEADER_BYTES = 64 * 2**20
"""Limit on the bytes of a video besides its frames: an hour needs some 2 MB for each track."""
_MAX_BOXES = 100_000
"""Limit on the boxes of the outermost level; a fragmented video has a few for each fragment."""
_SAMPLE_BYTES = 32
"""Bytes of memory that FFmpeg takes for each frame that a header lists."""
_TABLE = re.compile(rb"stsz|stz2|stts|ctts|stsc|stco|co64|stss|stps|trun|cmov")
_WALKED = (b"moov", b"trak", b"mdia", b"minf", b"udta", b"meta", b"ilst")
"""Boxes that hold boxes, on the way to texts."""
_TEXTS = (b"hdlr", b"keys", b"uuid", b"covr", b"desc", b"ldes", b"cprt", b"titl", b"dscp", b"auth", b"name", b"mean")
"""Boxes of texts and cover pictures, in which FFmpeg looks for no tables; so are those whose names begin with a
copyright sign or a zero."""
_MAX_DEPTH = 10
_ENTRY_BYTES = {b"stts": 8, b"ctts": 8, b"stsc": 12, b"stco": 4, b"co64": 8, b"stss": 4, b"stps": 4}
"""Bytes per entry of the tables that begin with their number of entries."""


class CorruptVideo(ValueError):  # noqa: N818 - named for what is found
    """A video that is not of a kind we accept, described in words for its sender."""


@contextmanager
def open_video(
    data: BinaryIO, max_pixels: int, max_header_bytes: int = MAX_HEADER_BYTES
) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Opens an MP4 and yields it with its only film, before any frame is decoded; a cover picture is no film.

    Args:
        data: untrusted, seekable.
        max_pixels: maximum pixels of a frame.
        max_header_bytes: maximum bytes besides the frames.

    Raises:
        CorruptVideo: it has several video tracks, or none, or its header is too large, claims too large frames, or more
            of them than a file of its size can hold.
        FFmpegError: it is damaged.
    """
    _check_tables(_header(data, max_header_bytes), data.seek(0, 2))
    data.seek(0)
    options = _DEMUXER | {"max_pixels": str(max_pixels)}
    with av.open(data, "r", format="mp4", options=options, metadata_errors="replace") as container:
        films = [stream for stream in container.streams.video if not _is_cover(stream, container)]
        if len(films) != 1:
            raise CorruptVideo(f"it has {len(films)} video tracks, one is needed")
        stream = films[0]
        if stream.width * stream.height > max_pixels:
            raise CorruptVideo(f"a frame has at most {max_pixels:,} pixels, it says {stream.width} x {stream.height}")
        yield container, stream


def _is_cover(stream: VideoStream, container: InputContainer) -> bool:
    """Returns whether a track is a cover picture: it says so, or is one still image beside a film."""
    is_still = stream.frames == 1 and stream.codec_context.name in ("mjpeg", "png")
    is_marked = bool(stream.disposition & Disposition.attached_pic)
    return len(container.streams.video) > 1 and (is_still or is_marked)


def _header(data: BinaryIO, max_bytes: int) -> bytes:
    """Returns all of an MP4 besides its frames.

    Raises:
        CorruptVideo: it is too large, or damaged.

    Source: ISO/IEC 14496-12, section 4.2.
    """
    size = data.seek(0, 2)
    begin, header = 0, bytearray()
    for _ in range(_MAX_BOXES):
        if begin + 8 > size:
            return bytes(header)
        data.seek(begin)
        start = data.read(16)
        length, name = struct.unpack_from(">I4s", start)
        # 1: the size follows in 64 bits; 0: the box extends to the end of the file
        if length == 1 and len(start) == 16:
            (length,) = struct.unpack_from(">Q", start, 8)
        length = min(length or size, size - begin)
        if length < 8:
            raise CorruptVideo("it is damaged")
        num_kept = 16 if name == b"mdat" else length
        if len(header) + num_kept > max_bytes:
            raise CorruptVideo(f"an MP4 has at most {max_bytes:,} bytes besides its frames")
        data.seek(begin)
        header += data.read(num_kept)
        begin += length
    raise CorruptVideo(f"an MP4 has at most {_MAX_BOXES:,} parts")


def _check_tables(header: bytes, file_bytes: int) -> None:
    """Limits what FFmpeg allocates before decoding anything: it believes a kilobyte that claims a hundred million
    frames, and allocates gigabytes for them.

    Raises:
        CorruptVideo: the header claims more frames than the file can hold, or is damaged.

    Source: ISO/IEC 14496-12, sections 8.6, 8.7 (tables) and 8.8.8 (track run).
    """
    num_samples = 0
    # anywhere but in texts: FFmpeg finds tables in boxes of many kinds, and a title may be "open the trunk"
    texts = _text_spans(header)
    begins = [begin for begin, _ in texts]
    for table in _TABLE.finditer(header):
        before = bisect_right(begins, table.start()) - 1
        if before >= 0 and table.end() <= texts[before][1]:
            continue
        name, begin, entry_bytes = table[0], table.end(), _ENTRY_BYTES.get(table[0], 0)
        count_at = begin + (8 if name in (b"stsz", b"stz2") else 4)
        if name == b"cmov":
            raise CorruptVideo("its header is compressed")
        count = int.from_bytes(header[count_at : count_at + 4], "big")
        if count_at + 4 + count * entry_bytes > len(header):
            raise CorruptVideo("it is damaged")
        if name in (b"stts", b"ctts"):  # run-length coded times: so many frames, one time
            count = int(np.frombuffer(header, ">u4", 2 * count, count_at + 4)[::2].sum(dtype=np.uint64))
        num_samples += count
    try:
        check_claim(_SAMPLE_BYTES * num_samples, file_bytes)
    except ValueError as error:
        raise CorruptVideo(f"{file_bytes:,} bytes cannot hold the frames that its header speaks of") from error


def _text_spans(header: bytes) -> list[tuple[int, int]]:
    """Returns begin and end of the contents of the boxes of texts in a header, in order.

    Boxes are walked as FFmpeg's `mov_read_default` does, so that it finds no table in what is called a text here.

    Raises:
        CorruptVideo: there are too many boxes.
    """
    num_boxes = 0

    def walk(begin: int, end: int, depth: int) -> Iterator[tuple[int, int]]:
        nonlocal num_boxes
        while begin + 8 <= end:
            num_boxes += 1
            if num_boxes > _MAX_BOXES:
                raise CorruptVideo(f"an MP4 has at most {_MAX_BOXES:,} parts")
            length, name = struct.unpack_from(">I4s", header, begin)
            content = begin + 8
            if length == 1 and begin + 16 <= end:
                (length,) = struct.unpack_from(">Q", header, content)
                content += 8
            box_end = min(begin + length, end) if length else end
            if name == b"mdat" and depth == 0:
                box_end = min(begin + 16, end)  # `_header` keeps so much of it
            if box_end < content:
                return
            if name in _TEXTS or name[:1] in (b"\xa9", b"\0"):
                yield content, box_end
            elif name in _WALKED and depth < _MAX_DEPTH:
                if name == b"meta":  # its handler comes first, after version and flags in ISO's files
                    marks = (at for at in range(content, content + 64, 4) if header[at : at + 4] == b"hdlr")
                    content = next(marks, box_end + 4) - 4
                yield from walk(content, box_end, depth + 1)
            begin = box_end

    return list(walk(0, len(header), 0))


def upright(frame: av.VideoFrame) -> NDArray[np.uint8]:
    """Returns [H, W, 3], a frame in RGB rotated by its display matrix: upright cameras record frames on their side.

    Source: ISO/IEC 14496-12, section 8.3.2 (the matrix of a track header).
    """
    image = frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
    # both count counterclockwise; players rotate by right angles only, too
    return np.ascontiguousarray(np.rot90(image, round(frame.rotation / 90)))
