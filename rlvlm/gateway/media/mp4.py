"""What an MP4 file says about itself, read from its boxes before any decoder sees it.

A demuxer allocates an index entry per frame that the header claims, and a box of twenty bytes can claim a billion. So
the boxes are walked here first: only plain, unfragmented, self-contained files with few frames pass.

Source: ISO/IEC 14496-12, sections 4.2, 8.4 to 8.7.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAX_VIDEO_FRAMES = 64
"""Frames of a video, which is also the most that is ever decoded."""
MAX_OTHER_SAMPLES = 20_000
"""Samples of a sound track, which is not decoded."""
_MAX_BOXES = 1_024
_INSIDE_TABLE = frozenset(
    (b"stsd", b"stts", b"stss", b"ctts", b"stsc", b"stsz", b"stco", b"co64", b"sdtp", b"sgpd", b"sbgp")
)


@dataclass(frozen=True, slots=True)
class Movie:
    """The one video track of a file, as its own header describes it."""

    num_frames: int
    width_px: int
    height_px: int


def read_movie(data: bytes) -> Movie:
    """The video track of the MP4 file `data`.

    Raises:
        ValueError: no MP4, or one that is not plain: fragments, outside data, several videos, too many frames.
    """
    try:
        boxes = list(_boxes(data, 0, len(data)))
        if not boxes or boxes[0][0] != b"ftyp":
            raise ValueError("it is no MP4")
        movies = [box for box in boxes if box[0] == b"moov"]
        if len(movies) != 1 or any(name in (b"moof", b"sidx") for name, _, _ in boxes):
            raise ValueError("it is no plain MP4 with one movie in it")
        _, first, last = movies[0]
        tracks = [_track(data, start, end) for name, start, end in _boxes(data, first, last) if _is_track(name)]
    except struct.error:
        raise ValueError("the MP4 ends in the middle") from None
    videos = [track for track in tracks if track is not None]
    if len(videos) != 1:
        raise ValueError(f"it has {len(videos)} video tracks, one is needed")
    return videos[0]


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Name, first and last byte of the content of each box in `data[start:end]`."""
    for _ in range(_MAX_BOXES):
        if start == end:
            return
        size, name = struct.unpack_from(">I4s", data, start)
        content = start + 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, content)
            content += 8
        stop = start + size if size else end
        if not content <= stop <= end:
            raise ValueError(f"the box {name!r} does not fit into what holds it")
        yield name, content, stop
        start = stop
    raise ValueError("it has too many boxes")


def _is_track(name: bytes) -> bool:
    if name in (b"mvex", b"cmov", b"rmra"):
        raise ValueError("it is fragmented, compressed, or refers to other files")
    return name == b"trak"


def _track(data: bytes, start: int, end: int) -> Movie | None:
    """The track if it is a video, None if it is of another kind; checked in any case."""
    media = _only(data, start, end, b"mdia")
    handler, _ = _only(data, *media, b"hdlr")
    is_video = data[handler + 8 : handler + 12] == b"vide"
    info = _only(data, *media, b"minf")
    table = _only(data, *info, b"stbl")
    inside: dict[bytes, tuple[int, int]] = {}
    for name, first, last in _boxes(data, *table):
        if name not in _INSIDE_TABLE or (name in inside and name not in (b"sgpd", b"sbgp")):
            raise ValueError(f"its sample table holds {name!r}")
        inside[name] = first, last
        _check_runs(data, name, first, last)
    if not {b"stsd", b"stts", b"stsc", b"stsz"} <= inside.keys():
        raise ValueError("its sample table is incomplete")
    (num_samples,) = struct.unpack_from(">I", data, inside[b"stsz"][0] + 8)
    limit = MAX_VIDEO_FRAMES if is_video else MAX_OTHER_SAMPLES
    if num_samples > limit:
        raise ValueError(
            f"a video has at most {MAX_VIDEO_FRAMES} frames, it says {num_samples}; pick frames before you send it"
        )
    return _picture_size(data, *inside[b"stsd"], num_samples) if is_video else None


def _check_runs(data: bytes, name: bytes, start: int, end: int) -> None:
    """Raises ValueError where a table of runs covers more samples than a track may have."""
    if name not in (b"stts", b"ctts"):
        return
    (num_entries,) = struct.unpack_from(">I", data, start + 4)
    if num_entries * 8 > end - start - 8:
        raise ValueError(f"its table {name!r} is cut off")
    runs = struct.iter_unpack(">II", data[start + 8 : start + 8 + 8 * num_entries])
    if sum(num_samples for num_samples, _ in runs) > MAX_OTHER_SAMPLES:
        raise ValueError(f"its table {name!r} covers too many samples")


def _picture_size(data: bytes, start: int, end: int, num_frames: int) -> Movie:
    (num_entries,) = struct.unpack_from(">I", data, start + 4)
    if num_entries != 1:
        raise ValueError("its images change their coding on the way")
    _, entry, stop = next(_boxes(data, start + 8, end))
    if stop - entry < 28:
        raise ValueError("it does not say how large its images are")
    width, height = struct.unpack_from(">HH", data, entry + 24)
    return Movie(num_frames, width, height)


def _only(data: bytes, start: int, end: int, wanted: bytes) -> tuple[int, int]:
    """Where the content of the one box `wanted` is."""
    found = [(first, last) for name, first, last in _boxes(data, start, end) if name == wanted]
    if len(found) != 1:
        raise ValueError(f"it needs one box {wanted!r} in its place, it has {len(found)}")
    return found[0]
