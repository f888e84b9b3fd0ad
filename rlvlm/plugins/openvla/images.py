"""Preparation of a camera's image for the image encoders. Each checkpoint needs the same as in training.

Sources: `whole` is RLinf's method for OpenVLA-OFT; `cropped` that of OpenVLA-OFT's and SimpleVLA-RL's own evaluations:
JPEG and back, Lanczos, then the middle nine tenths of the area, as in training with random crops. Departure:
Pillow's JPEG and Lanczos instead of TensorFlow's.
"""

import io
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from rlvlm.plugins.openvla.config import ImagePath

_AREA = 0.9
"""Share of an image's area that `cropped` keeps."""
_QUALITY = 95
"""JPEG quality, TensorFlow's default."""
_MEANS = ((0.485, 0.456, 0.406), (0.5, 0.5, 0.5))
_DEVIATIONS = ((0.229, 0.224, 0.225), (0.5, 0.5, 0.5))
"""Mean and standard deviation of pixels in [0, 1], for DINOv2 (ImageNet's) and for SigLIP."""


def to_pixels(images: Tensor, path: ImagePath, size_px: int) -> Tensor:
    """Prepares images for both image encoders.

    Args:
        images: [..., H, W, 3] uint8.
        path: method of preparation.
        size_px: side of the result.

    Returns:
        [..., 2, 3, size_px, size_px] float32, normalised for DINOv2 and for SigLIP.
    """
    shares = _PATHS[path](images.reshape(-1, *images.shape[-3:]), size_px) / 255
    means = torch.tensor(_MEANS, device=images.device)[:, :, None, None]
    deviations = torch.tensor(_DEVIATIONS, device=images.device)[:, :, None, None]
    normal = (shares[:, None] - means) / deviations
    return normal.view(*images.shape[:-3], *normal.shape[1:])


def _whole(images: Tensor, size_px: int) -> Tensor:
    """Returns [N, 3, size_px, size_px] float32 from 0 to 255: resized bicubically, nothing cropped."""
    pixels = images.permute(0, 3, 1, 2).float()
    resized = functional.interpolate(pixels, (size_px, size_px), mode="bicubic", antialias=True)
    return resized.clamp(0, 255).round()


def _cropped(images: Tensor, size_px: int) -> Tensor:
    """Returns such tensors of the middle of each image, after JPEG and Lanczos."""
    resized = np.stack([_through_jpeg(image, size_px) for image in images.cpu().numpy()])
    pixels = torch.from_numpy(resized).to(images.device).permute(0, 3, 1, 2).float()
    # sides of the square root of the area, from the centre of the first pixel to the centre of the last
    reach = torch.linspace(-(_AREA**0.5), _AREA**0.5, size_px, device=images.device)
    down, right = torch.meshgrid(reach, reach, indexing="ij")
    grid = torch.stack([right, down], dim=-1).expand(len(pixels), -1, -1, -1)
    middle = functional.grid_sample(pixels, grid, mode="bilinear", align_corners=True).clamp(0, 255)
    return (middle * (255.5 / 255)).floor()  # TensorFlow truncates to bytes rather than round


def _through_jpeg(image: NDArray[np.uint8], size_px: int) -> NDArray[np.uint8]:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=_QUALITY)
    return np.asarray(Image.open(file).convert("RGB").resize((size_px, size_px), Image.Resampling.LANCZOS))


_PATHS: dict[ImagePath, Callable[[Tensor, int], Tensor]] = {"cropped": _cropped, "whole": _whole}
