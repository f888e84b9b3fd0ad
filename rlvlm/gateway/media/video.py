"""Frames out of a short MP4: measured by `mp4`, then decoded by PyAV from memory, never from a name or an address."""

import io
from typing import Any

import av
import numpy as np
from PIL import Image

from rlvlm.core.steps import Frames
from rlvlm.gateway.media.images import MAX_PIXELS, MAX_REQUEST_PIXELS, check_size, shrink
from rlvlm.gateway.media.mp4 import MAX_VIDEO_FRAMES, read_movie
from rlvlm.serving.refusal import Refusal

CODECS = frozenset(("h264", "hevc", "av1", "libdav1d", "vp9", "mpeg4", "mjpeg"))
_DEMUXER = {"protocol_whitelist": "", "enable_drefs": "0", "use_absolute_path": "0", "max_pixels": str(MAX_PIXELS)}


def read_video(data: bytes, num_frames: int, max_pixels: int | None) -> Frames:
    """Evenly spread frames of an MP4 file, the first and the last among them.

    Args:
        data: the file; it has `MAX_VIDEO_FRAMES` frames at most.
        num_frames: frames wanted, >= 1; fewer come back where the video is shorter.
        max_pixels: frames with more are made smaller, keeping their shape; None leaves them.

    Returns:
        `[L, H, W, 3]`.

    Raises:
        Refusal: not such a video, or damaged.
    """
    try:
        movie = read_movie(data)
    except ValueError as error:
        raise _refuse(str(error)) from None
    check_size(movie.width_px, movie.height_px, "the video's image")
    kept_pixels = min(movie.width_px * movie.height_px, max_pixels or MAX_PIXELS)
    count = min(num_frames, movie.num_frames)
    if count < 1 or count * kept_pixels > MAX_REQUEST_PIXELS:
        raise _refuse(f"{count} frames of {kept_pixels:,} pixels; a request has 1 to {MAX_REQUEST_PIXELS:,} pixels")
    wanted = set(np.linspace(0, movie.num_frames - 1, count).round().astype(int).tolist())
    try:
        pictures = _decode(data, wanted, max_pixels)
    except Exception as error:  # whatever FFmpeg says about a damaged file, the file is to blame
        raise _refuse("it is damaged") from error
    if not pictures or len({picture.size for picture in pictures}) > 1:
        raise _refuse("it has no frames, or frames of several sizes")
    return np.stack([np.asarray(picture, np.uint8) for picture in pictures])


def _decode(data: bytes, wanted: set[int], max_pixels: int | None) -> list[Image.Image]:
    """The wanted frames, in order; no more than `MAX_VIDEO_FRAMES` are ever decoded."""
    options: dict[str, Any] = {"format": "mp4", "options": _DEMUXER, "metadata_errors": "replace"}
    pictures = []
    with av.open(io.BytesIO(data), "r", **options) as container:
        stream = container.streams.video[0]
        if stream.codec_context.name not in CODECS:
            raise ValueError(f"codec {stream.codec_context.name}")
        stream.thread_type, stream.thread_count = "SLICE", 1
        for index, frame in enumerate(container.decode(stream)):
            if index >= MAX_VIDEO_FRAMES or frame.width * frame.height > MAX_PIXELS:
                raise ValueError("more than the header says")
            if index in wanted:
                pictures.append(shrink(frame.to_image(), max_pixels))
    return pictures


def _refuse(reason: str) -> Refusal:
    return Refusal(
        422,
        "video",
        f"the video cannot be used: {reason}",
        f"send an MP4 of at most {MAX_VIDEO_FRAMES} frames, or the frames themselves",
    )
