"""Encoded images of recorded data."""

from io import BytesIO

import numpy as np
from numpy.typing import NDArray

from rlvlm.labels.images import MAX_PIXELS
from rlvlm.vlms.stills import read_rgb


def decoded(data: bytes) -> NDArray[np.uint8]:
    """Decodes a PNG or JPEG to [H, W, 3].

    Raises:
        OSError: it is neither, or too large.
        ValueError: it is a depth map.
    """
    if is_depth(data):  # millimetres, nearly black as an image
        raise ValueError("its images are grey of 16 bits, as depth maps are: name a camera in colour")
    return read_rgb(BytesIO(data), ("PNG", "JPEG"), MAX_PIXELS)


def is_depth(data: bytes) -> bool:
    """Returns whether an image is a PNG with 16 bits of grey. Source: PNG specification, 11.2.1 (IHDR)."""
    return data[:4] == b"\x89PNG" and data[24:26] == b"\x10\x00"
