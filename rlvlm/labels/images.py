"""Image files by content: one PNG per distinct image, named by the digest of its pixels. Part of a label store."""

import hashlib
import json
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlvlm.core.disk import write_whole
from rlvlm.core.foreign import read_bytes
from rlvlm.core.png import to_png

MAX_PIXELS = 4096 * 4096
"""Number of pixels above which an image is refused before it is decoded."""
MAX_FILE_BYTES = 3 * MAX_PIXELS + 2**20
_HEX = frozenset("0123456789abcdef")


class MissingImage(ValueError):  # noqa: N818 - named for what is found
    """An image is missing from the store, or its file is damaged."""


def image_digest(image: np.ndarray) -> str:
    """Returns the SHA-256 of an array's shape, type and pixels."""
    # with shape and type: the same bytes may be another image
    digest = hashlib.sha256(json.dumps([image.shape, str(image.dtype)]).encode())
    digest.update(np.ascontiguousarray(image).data if image.size else b"")
    return digest.hexdigest()


class ImageStore:
    """The folder `pictures/` of a store, created with the first image."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, images: Iterable[tuple[str, np.ndarray]]) -> int:
        """Writes the images that are not stored yet, by digest, and returns the number of new files. Arrays other than
        `[H, W, 3]` uint8 are left out.

        Raises:
            OSError: the disk cannot be written.
        """
        num_written = 0
        for digest, image in images:
            is_image = image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3 and image.size
            if is_image and not (file := self.file(digest)).exists():
                # not synced, for speed: a file lost or damaged in a power cut no longer matches its name, the digest
                write_whole(file, to_png(image), is_synced=False)
                num_written += 1
        return num_written

    def load(self, digest: str) -> NDArray[np.uint8]:
        """Returns the image `[H, W, 3]` with this digest.

        Raises:
            MissingImage: it is missing, or the file holds something else.
        """
        if not is_digest(digest):
            raise MissingImage(f"an image is named by 64 hexadecimal digits, got {digest[:80]!r}")
        file = self.file(digest)
        try:
            data = read_bytes(file, MAX_FILE_BYTES, self._folder.parent)
            image = Image.open(BytesIO(data), formats=["PNG"])
            # only the header has been read so far: a small file can claim any number of pixels
            if image.width * image.height > MAX_PIXELS or image.mode != "RGB":
                raise ValueError(f"at most {MAX_PIXELS} pixels in RGB are wanted, got {image.mode} {image.size}")
            pixels = np.asarray(image)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow raises all of these
            raise MissingImage(f"{file} cannot be read: {error}") from error
        if image_digest(pixels) != digest:
            raise MissingImage(f"{file} is not the image that it is named after")
        return pixels

    def has(self, digest: str) -> bool:
        """Returns whether a file of that name exists; `load` checks its content."""
        return is_digest(digest) and self.file(digest).exists()

    def file(self, digest: str) -> Path:
        """Returns the path of the image with this digest, whether it exists or not."""
        # 256 folders: file systems get slow with a million entries in one
        return self._folder / digest[:2] / f"{digest}.png"


def is_digest(text: object) -> bool:
    """Returns whether `text` is a SHA-256 in lower-case hex, the only text that may become part of a path."""
    return isinstance(text, str) and len(text) == 64 and _HEX.issuperset(text)
