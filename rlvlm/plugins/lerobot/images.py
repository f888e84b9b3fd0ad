"""Preparation of a camera's image for the image encoder of a LeRobot policy.

Source: LeRobot 0.4.4 and 0.6.1, identical in training and evaluation: bilinear without antialiasing, aspect ratio kept,
the rest padded with black, by SmolVLA on the left and on top, by pi0 and pi0.5 on both sides.
"""

from torch import Tensor
from torch.nn import functional


def to_pixels(images: Tensor, size_px: int, *, is_centred: bool = False, border: float = -1.0) -> Tensor:
    """Resizes images for the image encoder.

    Args:
        images: [..., H, W, 3] uint8.
        size_px: side of the result.
        is_centred: whether the image is centred, as opposed to bottom right.
        border: brightness of the padding; -1 is black.

    Returns:
        [..., 3, size_px, size_px] float32 in [-1, 1], except for the padding.
    """
    pixels = images.reshape(-1, *images.shape[-3:]).permute(0, 3, 1, 2).float() / 255
    height, width = pixels.shape[-2:]
    ratio = max(height, width) / size_px
    inner = (int(height / ratio), int(width / ratio))
    resized = functional.interpolate(pixels, inner, mode="bilinear", align_corners=False)
    around = [size_px - inner[1], size_px - inner[0]]
    before = [rest // 2 if is_centred else rest for rest in around]
    sides = (before[0], around[0] - before[0], before[1], around[1] - before[1])
    padded = functional.pad(2 * resized - 1, sides, value=border)
    return padded.view(*images.shape[:-3], *padded.shape[1:])
