"""Preparation of a camera's image for SmolVLA's image encoder.

Source: LeRobot 0.4.4, whose training and evaluation do the same: bilinear without smoothing, aspect kept, what is left
over filled with black on the left and on top.
"""

from torch import Tensor
from torch.nn import functional


def to_pixels(images: Tensor, size_px: int) -> Tensor:
    """Images as the image encoder takes them.

    Args:
        images: [..., H, W, 3] uint8.
        size_px: side of the result.

    Returns:
        [..., 3, size_px, size_px] float32 in [-1, 1].
    """
    pixels = images.reshape(-1, *images.shape[-3:]).permute(0, 3, 1, 2).float() / 255
    height, width = pixels.shape[-2:]
    ratio = max(height, width) / size_px
    inner = (int(height / ratio), int(width / ratio))
    resized = functional.interpolate(pixels, inner, mode="bilinear", align_corners=False)
    # black is 0 before the range becomes [-1, 1]
    padded = functional.pad(resized, (size_px - inner[1], 0, size_px - inner[0], 0))
    return (2 * padded - 1).view(*images.shape[:-3], *padded.shape[1:])
