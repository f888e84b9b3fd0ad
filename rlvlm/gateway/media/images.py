"""Images out of a request: base64 text in, frames out; everything is measured before anything is decoded."""

import binascii
import io
import math
import re
import warnings
from collections.abc import Sequence

import numpy as np
from PIL import Image

from rlvlm.core.steps import Frames
from rlvlm.gateway.media.headers import Header, read_header
from rlvlm.serving.refusal import Refusal
from rlvlm.vlms.stills import to_rgb

MAX_PICTURES = 16
"""Images in one request."""
MAX_PIXELS = 4 * 2**20
"""Pixels of one image, e.g. 2048 x 2048."""
MAX_REQUEST_PIXELS = 16 * 2**20
"""Pixels of all images of a request: 48 MiB once decoded."""
MIN_SIDE_PX = 2
MAX_ASPECT = 100
"""Longest over shortest side; VLM processors cannot cut thinner strips into patches."""
_DATA_URI = re.compile(r"data:image/(?:png|jpeg|webp);base64,", re.IGNORECASE)


def read_pictures(groups: Sequence[Sequence[str]], max_pixels: int | None = None) -> list[Frames]:
    """The images of a request, in groups, each group with images of one size.

    Args:
        groups: base64 texts of PNG, JPEG or WebP files, bare or as `data:image/...;base64,` URIs.
        max_pixels: images with more are made smaller, keeping their shape; None leaves them.

    Returns:
        One `[L, H, W, 3]` per group; `[0, 0, 0, 3]` for a group without images.

    Raises:
        Refusal: too many, too large, of another kind, damaged, or of several sizes in one group.
    """
    texts = [text for group in groups for text in group]
    if len(texts) > MAX_PICTURES:
        raise _refuse("pictures", f"a request has at most {MAX_PICTURES} images, got {len(texts)}")
    names = [f"image {number} of {len(texts)}" for number in range(1, len(texts) + 1)]
    headers = [_measure(text, name) for text, name in zip(texts, names, strict=True)]
    total = sum(header.num_pixels for header in headers)
    if total > MAX_REQUEST_PIXELS:
        raise _refuse("pictures", f"all images together have at most {MAX_REQUEST_PIXELS:,} pixels, got {total:,}")
    decoded = iter([_decode(header, name, max_pixels) for header, name in zip(headers, names, strict=True)])
    return [_stack([next(decoded) for _ in group]) for group in groups]


def shrink(picture: Image.Image, max_pixels: int | None) -> Image.Image:
    """The image, made smaller where it has more than `max_pixels`."""
    num_pixels = picture.width * picture.height
    if max_pixels is None or num_pixels <= max_pixels:
        return picture
    scale = (max_pixels / num_pixels) ** 0.5
    size = max(1, int(picture.width * scale)), max(1, int(picture.height * scale))
    return picture.resize(size, Image.Resampling.BICUBIC)


def check_size(width_px: int, height_px: int, name: str) -> None:
    """Raises Refusal where an image is too large, too small or too thin to be judged."""
    if width_px * height_px > MAX_PIXELS:
        raise _refuse("picture", f"{name}: at most {MAX_PIXELS:,} pixels, it says {width_px} x {height_px}")
    shortest = min(width_px, height_px)
    if shortest < MIN_SIDE_PX or max(width_px, height_px) > MAX_ASPECT * shortest:
        raise _refuse(
            "picture",
            f"{name}: sides of at least {MIN_SIDE_PX} pixels, none over {MAX_ASPECT} times the "
            f"other, it says {width_px} x {height_px}",
        )


def _measure(text: str, name: str) -> Header:
    """The header of one image; nothing is decoded, and no address is ever followed."""
    prefix = _DATA_URI.match(text)
    if prefix is None and ":" in text[:64]:
        raise _refuse("picture", f"{name}: images are sent as base64, addresses are never followed")
    try:
        data = _from_base64(text[prefix.end() :] if prefix else text)
        header = read_header(data)
    except ValueError as error:
        raise _refuse("picture", f"{name}: {error}") from None
    check_size(header.width_px, header.height_px, name)
    return header


def _from_base64(text: str) -> bytes:
    """The bytes of a base64 text.

    Raises:
        ValueError: it holds anything else. The decoder skips what it does not know, so the length tells, at a third
            of the time that its strict mode takes.
    """
    try:
        data = binascii.a2b_base64(text)
    except ValueError:
        data = b""
    if not data or len(text) != 4 * math.ceil(len(data) / 3):
        raise ValueError("it is no base64")
    return data


def _decode(header: Header, name: str, max_pixels: int | None) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(header.data), formats=[header.kind])
            if picture.size != (header.width_px, header.height_px):
                raise ValueError("its header and its image disagree")
            return shrink(to_rgb(picture), max_pixels)
    except Exception as error:  # whatever a decoder says about a damaged file, the file is to blame
        raise _refuse("picture", f"{name}: the {header.kind} is damaged") from error


def _stack(pictures: list[Image.Image]) -> Frames:
    if not pictures:
        return np.zeros((0, 0, 0, 3), np.uint8)
    sizes = {picture.size for picture in pictures}
    if len(sizes) > 1:
        raise _refuse("pictures", f"the images of a clip share one size, got {sorted(sizes)}")
    return np.stack([np.asarray(picture, np.uint8) for picture in pictures])


def _refuse(code: str, message: str) -> Refusal:
    return Refusal(422, code, message, "send PNG, JPEG or WebP stills as base64, at the size that is to be judged")
