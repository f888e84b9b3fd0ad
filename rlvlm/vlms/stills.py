"""Image files, decoded as viewers show them (upright, on white, in 8-bit RGB); and writing of PNGs."""

import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlvlm.core import png

_ORIENTATION = 0x0112
"""EXIF tag of the camera's orientation (Exif 2.32, section 4.6.4)."""
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_rgb(file: Path | BinaryIO, formats: Sequence[str], max_pixels: int) -> NDArray[np.uint8]:
    """Decodes an image file to [H, W, 3].

    Args:
        file: untrusted.
        formats: allowed formats, in Pillow's names.
        max_pixels: larger images are not decoded.

    Raises:
        OSError: it is missing, of another format or too large; any other error of the decoder if it is damaged.
    """
    with Image.open(file, formats=list(formats)) as image:
        if image.width * image.height > max_pixels:
            raise OSError(f"an image has more than {max_pixels} pixels")
        return np.asarray(to_rgb(image))


def to_png(image: NDArray[np.uint8], *, is_small: bool = False) -> bytes:
    """Encodes the image [H, W, 3] as a PNG; with `is_small` in fewer bytes but more time."""
    if not is_small:
        return png.to_png(image)
    stream = BytesIO()
    Image.fromarray(image).save(stream, "PNG", optimize=True)
    return stream.getvalue()


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image to RGB: rotated by its EXIF, 16 bits scaled to 8, transparency laid on white.

    Raises:
        Exception: any error of the decoder about a damaged file.
    """
    image.load()  # damaged files raise here, rather than as broken EXIF below
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # the EXIF parser raises a dozen kinds, and broken EXIF is no reason to refuse an intact image
        turn = None
    if image.mode.startswith("I"):  # grey of 16 bits: Pillow would clip at 255
        values = np.asarray(image).astype(np.int64).clip(0, 65_535)
        # 65,535 is 255 times 257, so this rounds to the nearest of 256 levels
        grey = ((values + 128) // 257).astype(np.uint8)
        clear = image.info.get("transparency")
        if isinstance(clear, int):  # the single transparent value becomes white
            grey[values == clear] = 255
        image = Image.fromarray(grey)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        # as browsers show it; Pillow alone would show the hidden colours of transparent pixels
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    image = image.convert("RGB")
    return image if turn is None else image.transpose(turn)
