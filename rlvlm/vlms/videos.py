"""MP4 files, whoever made them: opened so that they name no other file, their frames turned as people see them.

Every video that is decoded goes through here: uploads and `video_path` of the server, films of recorded data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

# nothing but what was opened is read: a playlist, or a reference inside of an MP4, could name any file or address
_DEMUXER = {"protocol_whitelist": "", "enable_drefs": "0", "use_absolute_path": "0"}


class UnfitVideo(ValueError):  # noqa: N818 - named for what is found
    """A video that says of itself that it is none of those we take, in words for its sender."""


@contextmanager
def open_video(data: BinaryIO, max_pixels: int) -> Iterator[tuple[InputContainer, VideoStream]]:
    """An MP4 and its only video track; no frame has been decoded.

    Args:
        data: untrusted.
        max_pixels: of a frame.

    Raises:
        UnfitVideo: it has several video tracks, or none, or its header says that frames are larger.
        FFmpegError: it is damaged.
    """
    options = _DEMUXER | {"max_pixels": str(max_pixels)}
    with av.open(data, "r", format="mp4", options=options, metadata_errors="replace") as container:
        if len(container.streams.video) != 1:
            raise UnfitVideo(f"it has {len(container.streams.video)} video tracks, one is needed")
        stream = container.streams.video[0]
        if stream.width * stream.height > max_pixels:
            raise UnfitVideo(f"a frame has at most {max_pixels:,} pixels, it says {stream.width} x {stream.height}")
        yield container, stream


def upright(frame: av.VideoFrame) -> NDArray[np.uint8]:
    """[H, W, 3] a frame in RGB, turned as its display matrix says: cameras that were held upright record lying frames.

    Source: ISO/IEC 14496-12, section 8.3.2 (the matrix of a track header).
    """
    image = frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
    # both count counterclockwise; players turn by right angles, too
    return np.ascontiguousarray(np.rot90(image, round(frame.rotation / 90)))
