"""Decoding of callers' images and videos with Pillow and PyAV, within limits on files, pixels and frames.

Pillow reads a header without decoding, and the header is checked before anything is decoded. What the two libraries do
not limit themselves is limited here, and `tests/attacks/test_bombs.py` fails without it: reads of an image file
(`_CountedFile`), scans of a JPEG, chunks of a WebP, and bytes of an MP4 that FFmpeg would parse (`_check_boxes`).
`MediaRoot` opens the videos that callers may name; `tests/attacks/test_video_paths.py` fails without it.
"""

import binascii
import io
import math
import os
import re
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from rlvlm.core.errors import MachineError
from rlvlm.core.steps import Frames
from rlvlm.serving.config import NUM_IMAGES
from rlvlm.serving.refusal import Refusal
from rlvlm.vlms.stills import to_rgb
from rlvlm.vlms.videos import CorruptVideo, open_video, upright

MAX_PIXELS = 4 * 2**20
"""Maximum pixels of one image, e.g. 2048 x 2048."""
MAX_REQUEST_PIXELS = 16 * 2**20
"""Maximum pixels of all images of a request: 48 MiB once decoded."""
MAX_VIDEO_FRAMES = 64
"""Maximum frames of a video; no more than these are ever decoded."""
MAX_VIDEO_BYTES = 32 * 2**20
_MIN_SIDE_PX = 2
_MAX_ASPECT = 100
"""Maximum ratio of longest to shortest side; VLM processors cannot cut thinner strips into patches."""
_MAX_READS = 4_000
"""Maximum reads of one image file: a PNG of 4 Mpixel takes some 3,000, one of 100,000 chunks 300,000."""
_MAX_JPEG_READS = 1_500
"""Maximum reads of a JPEG's header: some four per marker; real files have less than a hundred markers."""
_MAX_JPEG_SCANS = 24
"""Maximum scans of a JPEG: each is a pass over the whole image; real progressive files have about ten."""
_MAX_WEBP_CHUNKS = 64
"""Maximum chunks of a WebP, all of which libwebp parses; real files have less than ten."""
_MAX_EXIF_BYTES = 65_536
"""Maximum size of EXIF data, as in a JPEG; PNG and WebP allow more, whose tags Pillow reads one by one."""
_MAX_HEADER_BYTES = 2**18
"""Maximum bytes of an MP4 besides its frames: 64 frames and a soundtrack need some 100 kB."""
_FORMATS = ("PNG", "JPEG", "WEBP")
_CODECS = frozenset(("h264", "hevc", "av1", "libdav1d", "vp9", "mpeg4", "mjpeg"))
_SUFFIXES = (".mp4", ".m4v", ".mov")
_DATA_URI = re.compile(r"data:image/[\w.+-]+(?:;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)
"""Pattern of any image type, such as `image/jpg`, and parameters: the actual type is read from the file itself."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def read_images(
    groups: Sequence[Sequence[str]], max_pixels: int | None = None, *, max_images: int = NUM_IMAGES
) -> list[Frames]:
    """Decodes the images of a request, in groups; within a group all images have the same size.

    Args:
        groups: base64 texts of PNG, JPEG or WebP files, bare or as `data:image/...;base64,` URIs.
        max_pixels: larger images are scaled down, keeping their aspect ratio; None keeps them.
        max_images: maximum number of images.

    Returns:
        One `[L, H, W, 3]` per group; `[0, 0, 0, 3]` for a group without images.

    Raises:
        Refusal: too many, too large, of another type, corrupt, or of several sizes in one group.
    """
    texts = [text for group in groups for text in group]
    if len(texts) > max_images:
        raise _refuse("pictures", f"a request has at most {max_images} images here, got {len(texts)}")
    opened = []
    for number, text in enumerate(texts, start=1):  # all headers first: nothing of too large a request is decoded
        try:
            opened.append(_open_image(text))
        except Exception as error:  # any error of Pillow's is the fault of a corrupt file
            raise _refuse("picture", f"image {number} of {len(texts)}: {_reason(error)}") from error
    # images, each within its limit, may still be too large together
    total = sum(image.width * image.height for image in opened)
    if total > MAX_REQUEST_PIXELS:
        raise _refuse("pictures", f"all images together have at most {MAX_REQUEST_PIXELS:,} pixels, got {total:,}")
    decoded = []
    for number, image in enumerate(opened, start=1):
        try:
            decoded.append(_shrink(to_rgb(image), max_pixels))
        except Exception as error:
            raise _refuse("picture", f"image {number} of {len(texts)}: {_reason(error)}") from error
    images, frames = iter(decoded), []
    for group in groups:
        members = [next(images) for _ in group]
        if len(sizes := {image.size for image in members}) > 1:
            raise _refuse("pictures", f"the images of a clip share one size, got {sorted(sizes)}")
        frames.append(np.stack(list(map(np.asarray, members))) if members else np.zeros((0, 0, 0, 3), np.uint8))
    return frames


def read_video(data: bytes, num_frames: int, max_pixels: int | None) -> Frames:
    """Decodes evenly spaced frames `[L, H, W, 3]` of an MP4 file, including the first and the last.

    Args:
        data: content of the file, which has at most `MAX_VIDEO_FRAMES` frames.
        num_frames: number of frames, >= 1; a shorter video gives fewer.
        max_pixels: larger frames are scaled down, keeping their aspect ratio; None keeps them.

    Raises:
        Refusal: not such a video, or corrupt.
    """
    try:
        # these are the header's claims; nothing is decoded before they are within the limits
        with open_video(io.BytesIO(data), MAX_PIXELS, _MAX_HEADER_BYTES) as (container, stream):
            # 0 if it does not say, which would disable the limit
            if not 1 <= stream.frames <= MAX_VIDEO_FRAMES:
                raise _CorruptMedia(f"a video has at most {MAX_VIDEO_FRAMES} frames, it says {stream.frames}")
            if stream.codec_context.name not in _CODECS:
                raise _CorruptMedia(f"it is coded as {stream.codec_context.name}")
            _check_size(stream.width, stream.height)
            kept_pixels = min(stream.width * stream.height, max_pixels or MAX_PIXELS)
            count = min(num_frames, stream.frames)
            if count * kept_pixels > MAX_REQUEST_PIXELS:
                raise _CorruptMedia(
                    f"{count} frames of {kept_pixels:,} pixels; a request has {MAX_REQUEST_PIXELS:,} pixels"
                )
            # by index rather than by time stamps, which a file can set freely
            wanted = set(np.linspace(0, stream.frames - 1, count).round().astype(int).tolist())
            # frame threads decode ahead, in memory that is not counted
            stream.thread_type, stream.thread_count = "SLICE", 1
            images = []
            for index, frame in enumerate(container.decode(stream)):
                # the stream may contain more frames, and larger ones, than the header claims
                if index >= MAX_VIDEO_FRAMES or frame.width * frame.height > MAX_PIXELS:
                    raise _CorruptMedia("it holds more than its header says")
                if index in wanted:
                    images.append(_shrink(Image.fromarray(upright(frame)), max_pixels))
        if not images or len({image.size for image in images}) > 1:
            raise _CorruptMedia("it has no frames, or frames of several sizes")
    except Exception as error:  # any error of FFmpeg's is the fault of a corrupt file
        raise Refusal(
            422,
            "video",
            f"the video cannot be used: {_reason(error)}",
            f"send an MP4 of at most {MAX_VIDEO_FRAMES} frames, or the frames themselves",
        ) from error
    return np.stack(list(map(np.asarray, images)))


class MediaRoot:
    """Folder from which `video_path` may name files.

    A path is walked one part at a time from an open descriptor of the folder, so that neither files swapped meanwhile
    nor links nor `..` lead out. Every error gives the caller the same refusal, which reveals nothing about the folder's
    contents.
    """

    def __init__(self, root: str) -> None:
        """Opens the folder; with an empty name every `video_path` is refused.

        Raises:
            MachineError: it is not a readable folder.
        """
        self._name = root.rstrip("/")
        try:
            self._root = os.open(root, _DIRECTORY & ~os.O_NOFOLLOW) if root else None
        except OSError as error:
            raise MachineError(
                f"the media root {root} cannot be opened: {error.strerror}",
                "create it, or name another: --media-root DIR",
            ) from error

    def read(self, name: str) -> bytes:
        """Returns the content of the file `name`, relative to the root, or absolute and inside it.

        Raises:
            Refusal: it is not a video that this server may read.
        """
        try:
            parts = name.removeprefix(self._name + "/").split("/")
            is_plain = name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(parts)
            if self._root is None or not is_plain or Path(name).suffix.lower() not in _SUFFIXES:
                raise ValueError
            # a copy, so that closing it on the way down leaves the root open for the next caller
            folder = os.dup(self._root)
            try:
                for part in parts[:-1]:
                    inner = os.open(part, _DIRECTORY, dir_fd=folder)
                    os.close(folder)
                    folder = inner
                descriptor = os.open(parts[-1], _FILE, dir_fd=folder)
            finally:
                os.close(folder)
            with open(descriptor, "rb") as stream:
                found = os.fstat(descriptor)
                # a regular file with only one name: a hard link could lead to a file outside
                if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != os.geteuid():
                    raise ValueError
                # one extra byte shows that the file is too long, whatever its reported size
                data = stream.read(MAX_VIDEO_BYTES + 1)
            if len(data) > MAX_VIDEO_BYTES or data[4:8] != b"ftyp":
                raise ValueError
        except (OSError, ValueError):  # one refusal for all errors: the kind would reveal what exists
            raise Refusal(
                400,
                "video_path",
                "video_path names no video that this server may read",
                "name an MP4 inside its media root, or upload frames",
            ) from None
        return data


class _CorruptMedia(ValueError):
    """An error in a file, in words for the caller."""


class _CountedFile(io.BytesIO):
    """A file in memory with a limited number of reads: Pillow reads a PNG chunk by chunk, a JPEG marker by marker."""

    _num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._num_reads += 1
        if self._num_reads > (_MAX_JPEG_READS if self.getbuffer()[:2] == b"\xff\xd8" else _MAX_READS):
            raise _CorruptMedia("it has too many parts")
        return super().read(size)


def _decoded(text: str) -> bytes:
    """Decodes a caller's base64; never fetches a URL."""
    # only the beginning is matched: the rest is megabytes of base64
    prefix = _DATA_URI.match(text)
    if prefix is None and text[:5].lower() == "data:":
        raise _CorruptMedia("a data URI of an image begins as `data:image/png;base64,`")
    if prefix is None and ":" in text[:64]:
        raise _CorruptMedia("images are sent as base64, addresses are never followed")
    encoded = "".join((text[prefix.end() :] if prefix else text).split())  # some encoders write lines of 76
    try:
        data = binascii.a2b_base64(encoded)
    except ValueError:
        data = b""
    # The decoder skips unknown characters, so the length shows them, in a third of the time of its strict mode.
    if not data or len(encoded) != 4 * math.ceil(len(data) / 3):
        raise _CorruptMedia("it is no base64")
    return data


def _open_image(text: str) -> Image.Image:
    """Opens an image, of which only the header is read."""
    data = _decoded(text)
    if data[:4] == b"RIFF":
        _check_chunks(data)
    try:
        image = Image.open(_CountedFile(data), formats=_FORMATS)
    except Image.UnidentifiedImageError:
        raise _CorruptMedia("it is no PNG, JPEG or WebP that can be read") from None
    except Image.DecompressionBombError:
        raise _CorruptMedia(f"an image has at most {MAX_PIXELS:,} pixels") from None
    _check_size(*image.size)
    # only its first frame would be judged, and others could have any number of pixels; a camera's JPEG (MPO) also
    # contains a preview or a second view, which is not decoded
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
        raise _CorruptMedia("it is animated")
    if image.format in ("JPEG", "MPO") and data.count(b"\xff\xda") > _MAX_JPEG_SCANS:
        raise _CorruptMedia(f"a JPEG has at most {_MAX_JPEG_SCANS} scans")
    if len(image.info.get("exif", b"")) > _MAX_EXIF_BYTES:
        raise _CorruptMedia(f"EXIF has at most {_MAX_EXIF_BYTES:,} bytes")
    return image


def _check_size(width_px: int, height_px: int) -> None:
    if width_px * height_px > MAX_PIXELS:
        raise _CorruptMedia(f"an image has at most {MAX_PIXELS:,} pixels, it says {width_px} x {height_px}")
    shortest = min(width_px, height_px)
    if shortest < _MIN_SIDE_PX or max(width_px, height_px) > _MAX_ASPECT * shortest:
        raise _CorruptMedia(
            f"sides have at least {_MIN_SIDE_PX} pixels, none over {_MAX_ASPECT} times the other, it says "
            f"{width_px} x {height_px}"
        )


def _check_chunks(data: bytes) -> None:
    """Limits how much of a WebP file libwebp has to parse.

    Source: WebP container specification, section "RIFF file format".
    """
    at, num_chunks = 12, 0
    while at + 8 <= len(data):
        num_chunks += 1
        if num_chunks > _MAX_WEBP_CHUNKS:
            raise _CorruptMedia(f"a WebP has at most {_MAX_WEBP_CHUNKS} chunks")
        (size,) = struct.unpack_from("<I", data, at + 4)
        at += 8 + size + size % 2  # chunks are padded to an even length


def _shrink(image: Image.Image, max_pixels: int | None) -> Image.Image:
    num_pixels = image.width * image.height
    if max_pixels is None or num_pixels <= max_pixels:
        return image
    scale = (max_pixels / num_pixels) ** 0.5
    size = max(1, int(image.width * scale)), max(1, int(image.height * scale))
    return image.resize(size, Image.Resampling.BICUBIC)


def _reason(error: Exception) -> str:
    """Returns a message for the caller in our own words, never a library's."""
    return str(error) if isinstance(error, _CorruptMedia | CorruptVideo) else "it is damaged"


def _refuse(code: str, message: str) -> Refusal:
    return Refusal(422, code, message, "send PNG, JPEG or WebP stills as base64, at the size that is to be judged")
