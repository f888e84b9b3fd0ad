"""Frames of MP4 videos, by the times at which they are shown: of LeRobot's data sets, and plain videos.

Each function takes the folder of the data, which may be anybody's, and the path of a video in it (`open_inside`).
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import lru_cache, partial
from pathlib import Path
from threading import Thread
from typing import TypeVar

import numpy as np
from av.error import FFmpegError
from numpy.typing import NDArray

from rlvlm.core.foreign import OutsideFolder, open_inside
from rlvlm.core.steps import Frames
from rlvlm.labels.images import MAX_PIXELS
from rlvlm.vlms.videos import open_video, upright

Part = TypeVar("Part")
MAX_READ_S = 300.0
"""Time in which a film is looked through or the frames of one call are decoded, seconds; it then counts as torn."""
_DAMAGES = (OSError, ValueError, IndexError, FFmpegError)
_slow: set[tuple[Path, Path]] = set()
"""Films that took longer, which no other frame of theirs waits for."""


def film_times(root: Path, file: Path) -> tuple[NDArray[np.int64], float]:
    """Returns [F], when each frame of a video is shown, in ticks, and a tick in seconds; decodes nothing.

    Raises:
        OutsideFolder: see `open_inside`.
        ValueError: the video is missing, truncated or empty.
    """
    try:
        return _in_time(root, file, lambda: _film_times(root, file, *_version(root, file)))
    except OutsideFolder:  # it says what to do
        raise
    except _DAMAGES as error:
        raise ValueError(f"{file} is missing or torn: {error}") from error


def film_digest(root: Path, file: Path) -> str:
    """Returns the SHA-256 of a video's file.

    Raises:
        OSError: it cannot be read.
    """
    return _film_digest(root, file, *_version(root, file))


def film_frames(root: Path, file: Path, times: NDArray[np.int64]) -> Frames:
    """Returns [n, H, W, 3], the frames shown at the ascending `times` [n] of `film_times`.

    Raises:
        OutsideFolder: see `open_inside`.
        ValueError: the video is truncated.
    """
    try:
        first = int(film_times(root, file)[0][0])
        return _in_time(root, file, lambda: _decoded(root, file, times.tolist(), first))
    except OutsideFolder:  # it says what to do
        raise
    except _DAMAGES as error:
        raise ValueError(f"{file} is missing or torn: {error}") from error


def _decoded(root: Path, file: Path, wanted: list[int], first: int) -> Frames:
    """Returns [n, H, W, 3], the frames shown at the ascending times `wanted` [n] of a film that begins at `first`."""
    images: list[NDArray[np.uint8]] = []
    with open_inside(root, file) as data, open_video(data, MAX_PIXELS) as (container, stream):
        # several episodes may share a video: seek to the key frame before the first frame, and decode from there
        if wanted[0] > first:
            container.seek(wanted[0], stream=stream)
        for frame in _while_wanted(root, file, container.decode(stream)):
            if frame.pts == wanted[len(images)]:
                images.append(upright(frame))
            if len(images) == len(wanted):
                return np.stack(images)
        missing_s = float(wanted[len(images)] * (stream.time_base or 0))
    raise ValueError(f"no frame {missing_s:.3f} s from its beginning")


def _in_time(root: Path, file: Path, read: Callable[[], Part]) -> Part:
    """Returns what `read` finds in a film.

    Raises:
        ValueError: it takes, or a call before took, more than `MAX_READ_S`.
        Exception: what `read` raises.
    """
    found: Future[Part] = Future()

    def answer() -> None:
        try:
            found.set_result(read())
        except Exception as error:
            found.set_exception(error)

    # in a thread that is left behind: nothing interrupts a decoder within a frame, or a disk that does not answer
    if (root, file) not in _slow:
        Thread(target=answer, name="film", daemon=True).start()
        try:
            return found.result(MAX_READ_S)
        except TimeoutError:
            if found.done():  # the disk's own
                raise
            _slow.add((root, file))
    raise ValueError(f"what is wanted of it is not decoded within {MAX_READ_S:g} s")


def _while_wanted(root: Path, file: Path, parts: Iterable[Part]) -> Iterator[Part]:
    """Yields what PyAV finds in a film until it has been given up, so that its thread ends."""
    for part in parts:
        if (root, file) in _slow:
            return
        yield part


def _version(root: Path, file: Path) -> tuple[int, int]:
    """Returns size in bytes and time of the last write, by which a cached result is known to be of this file."""
    with open_inside(root, file) as data:
        about = os.fstat(data.fileno())
    return about.st_size, about.st_mtime_ns


@lru_cache(maxsize=16)
def _film_digest(root: Path, file: Path, size: int, changed_ns: int) -> str:
    del size, changed_ns  # part of the cache's key
    digest = hashlib.sha256()
    with open_inside(root, file) as data:
        for block in iter(partial(data.read, 2**20), b""):
            digest.update(block)
    return digest.hexdigest()


@lru_cache(maxsize=16)  # number of videos in use at a time: one per camera
def _film_times(root: Path, file: Path, size: int, changed_ns: int) -> tuple[NDArray[np.int64], float]:
    del size, changed_ns  # part of the cache's key
    with open_inside(root, file) as data, open_video(data, MAX_PIXELS) as (container, stream):
        if not stream.time_base:
            raise ValueError("it says no unit of time")
        # packets come in decoding order, which differs; frames before an edit list's start are not shown
        packets = _while_wanted(root, file, container.demux(stream))
        stamps = np.unique([packet.pts for packet in packets if packet.pts is not None and not packet.is_discard])
        if not len(stamps):
            raise ValueError("it has no frame")
        return stamps.astype(np.int64), float(stream.time_base)
