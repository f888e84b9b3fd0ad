"""Image files: read as people see them (upright, on white, in 8-bit RGB), whatever made them; and PNGs of our own."""

import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_ORIENTATION = 0x0112
"""EXIF's tag for how the camera was held (Exif 2.32, section 4.6.4)."""
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_rgb(file: Path | BytesIO, formats: Sequence[str], max_pixels: int) -> NDArray[np.uint8]:
    """[H, W, 3] of an image file.

    Args:
        file: untrusted.
        formats: that it may have, as Pillow calls them.
        max_pixels: more are not decoded.

    Raises:
        OSError: it is missing, of another format or too large; and whatever else the decoder says about a damaged one.
    """
    with Image.open(file, formats=list(formats)) as image:
        if image.width * image.height > max_pixels:
            raise OSError(f"an image has more than {max_pixels} pixels")
        return np.asarray(to_rgb(image))


def to_png(image: NDArray[np.uint8], *, is_small: bool = False) -> bytes:
    """The image [H, W, 3] as a PNG file; where it `is_small`, in fewer bytes and more time."""
    stream = BytesIO()
    Image.fromarray(image).save(stream, "PNG", optimize=is_small)
    return stream.getvalue()


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB: turned as its EXIF says, 16 bits scaled to 8, what is transparent laid on white.

    Raises:
        Exception: whatever the decoder says about a damaged file.
    """
    image.load()  # what is damaged says so here, and is not taken for broken EXIF below
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # the parser of EXIF raises a dozen kinds, and broken EXIF is no reason to refuse a sound image
        turn = None
    if image.mode.startswith("I"):  # grey of 16 bits: Pillow would cut at 255
        values = np.asarray(image).astype(np.int64).clip(0, 65_535)
        # 65,535 is 255 times 257, so this rounds to the nearest of 256 levels
        grey = ((values + 128) // 257).astype(np.uint8)
        clear = image.info.get("transparency")
        if isinstance(clear, int):  # the one transparent value becomes white
            grey[values == clear] = 255
        image = Image.fromarray(grey)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        # as people see it in a browser; Pillow alone would show whatever colour hides under the transparency
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    image = image.convert("RGB")
    return image if turn is None else image.transpose(turn)
