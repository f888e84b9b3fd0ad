"""Frames of MP4 films, by the times at which they are shown: recorded data of LeRobot's, and plain videos."""

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
    """[F] when the frames of a film are shown, in ticks, and a tick in seconds; nothing is decoded for it.

    Raises:
        ValueError: the film is missing, torn or empty.
    """
    try:
        about = file.stat()
        return _film_times(file, about.st_size, about.st_mtime_ns)
    except _DAMAGES as error:
        raise ValueError(f"{file} is missing or torn: {error}") from error


def film_frames(file: Path, times: NDArray[np.int64]) -> Frames:
    """[n, H, W, 3] the frames that are shown at `times` [n] of `film_times`, which rise.

    Raises:
        ValueError: the film is torn.
    """
    images: list[NDArray[np.uint8]] = []
    wanted = times.tolist()
    try:
        first = int(film_times(file)[0][0])
        with open_regular(file) as data, open_video(data, MAX_PIXELS) as (container, stream):
            # several episodes may share a film: to the key frame before this one, and on from there
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


@lru_cache(maxsize=16)  # films in use at a time: one of each camera
def _film_times(file: Path, size: int, changed_ns: int) -> tuple[NDArray[np.int64], float]:
    """See `film_times`.

    Args:
        file: the film.
        size: of the file, with which the answer holds.
        changed_ns: likewise, when it was last written.
    """
    del size, changed_ns
    with open_regular(file) as data, open_video(data, MAX_PIXELS) as (container, stream):
        if not stream.time_base:
            raise ValueError("it says no unit of time")
        # packets come as they are decoded, which is another order; those before an edit list's begin are not shown
        packets = container.demux(stream)
        stamps = np.unique([packet.pts for packet in packets if packet.pts is not None and not packet.is_discard])
        if not len(stamps):
            raise ValueError("it has no frame")
        return stamps.astype(np.int64), float(stream.time_base)
