"""Frames of MP4 videos, by the times at which they are shown: of LeRobot's data sets, and plain videos."""

from functools import lru_cache
from pathlib import Path

import numpy as np
from av.error import FFmpegError
from numpy.typing import NDArray

from rlvlm.core.foreign import open_regular
from rlvlm.core.steps import Frames
from rlvlm.labels.images import MAX_PIXELS
from rlvlm.vlms.videos import open_video, upright

_DAMAGES = (OSError, ValueError, IndexError, FFmpegError)


def film_times(file: Path) -> tuple[NDArray[np.int64], float]:
    """Returns [F], when each frame of a video is shown, in ticks, and a tick in seconds; decodes nothing.

    Raises:
        ValueError: the video is missing, truncated or empty.
    """
    try:
        about = file.stat()
        return _film_times(file, about.st_size, about.st_mtime_ns)
    except _DAMAGES as error:
        raise ValueError(f"{file} is missing or torn: {error}") from error


def film_frames(file: Path, times: NDArray[np.int64]) -> Frames:
    """Returns [n, H, W, 3], the frames shown at the ascending `times` [n] of `film_times`.

    Raises:
        ValueError: the video is truncated.
    """
    images: list[NDArray[np.uint8]] = []
    wanted = times.tolist()
    try:
        first = int(film_times(file)[0][0])
        with open_regular(file) as data, open_video(data, MAX_PIXELS) as (container, stream):
            # several episodes may share a video: seek to the key frame before the first frame, and decode from there
            if wanted[0] > first:
                container.seek(wanted[0], stream=stream)
            for frame in container.decode(stream):
                if frame.pts == wanted[len(images)]:
                    images.append(upright(frame))
                if len(images) == len(wanted):
                    break
            else:
                missing_s = float(wanted[len(images)] * (stream.time_base or 0))
                raise ValueError(f"no frame {missing_s:.3f} s from its beginning")
        return np.stack(images)
    except _DAMAGES as error:
        raise ValueError(f"{file} is missing or torn: {error}") from error


@lru_cache(maxsize=16)  # number of videos in use at a time: one per camera
def _film_times(file: Path, size: int, changed_ns: int) -> tuple[NDArray[np.int64], float]:
    """Computes `film_times`, cached while the file does not change.

    Args:
        file: the film.
        size: size of the file, part of the cache's key.
        changed_ns: time of its last write, part of the cache's key.
    """
    del size, changed_ns
    with open_regular(file) as data, open_video(data, MAX_PIXELS) as (container, stream):
        if not stream.time_base:
            raise ValueError("it says no unit of time")
        # packets come in decoding order, which differs; frames before an edit list's start are not shown
        packets = container.demux(stream)
        stamps = np.unique([packet.pts for packet in packets if packet.pts is not None and not packet.is_discard])
        if not len(stamps):
            raise ValueError("it has no frame")
        return stamps.astype(np.int64), float(stream.time_base)
