"""Fast image processing for the Qwen-VL line: `process` and `flatten_patch_embedding`.

The image processor gives the same pixels to the bit, in a third of the time. `transformers` converts every image to
floating point, to channels first, to Pillow and back; here an image goes to Pillow directly, is cut into patches while
it is still bytes, and each byte is then looked up in a table of the processor's output. Used by `processors`;
`tests/vlms/test_image_patches.py` compares it with the original.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn


def can_replace(image_processor: Any) -> bool:
    """Returns whether `process` can replace `image_processor`: it resizes, rescales, normalises, cuts into patches."""
    return type(image_processor).__name__ == "Qwen2VLImageProcessorPil" and bool(
        image_processor.do_resize and image_processor.do_rescale and image_processor.do_normalize
    )


def process(images: Sequence[NDArray[np.uint8]], image_processor: Any) -> dict[str, torch.Tensor]:
    """Processes images as `image_processor(images=images)` does.

    Args:
        images: each [H, W, 3] uint8.
        image_processor: a `Qwen2VLImageProcessorPil`, from which settings and the value of each byte are read.

    Returns:
        `pixel_values` [N, 3 x T x P x P] float32, one row per patch (T copies of the image, P the patch's side), and
        `image_grid_thw` [images, 3], the number of patches of each image in time, height and width.
    """
    table = _table(image_processor)
    resized = [resize(image, image_processor) for image in images]
    grids = [[1, *(side // image_processor.patch_size for side in image.shape[:2])] for image in resized]
    rows = np.concatenate([_cut(image, image_processor) for image in resized])  # [N, 3, P x P] uint8
    # a still image is T equal frames; 256 look-ups per channel replace arithmetic on every pixel
    values = np.empty((len(rows), 3, image_processor.temporal_patch_size, rows.shape[-1]), np.float32)
    for channel in range(3):
        values[:, channel] = table[channel][rows[:, channel]][:, None]
    return {"pixel_values": torch.from_numpy(values.reshape(len(rows), -1)), "image_grid_thw": torch.tensor(grids)}


def _table(image_processor: Any) -> NDArray[np.float32]:
    """Returns [3, 256], the rescaled and normalised value of each byte of each channel."""
    # computed by the processor's own functions, so that the table has the same rounding
    every = np.broadcast_to(np.arange(256, dtype=np.uint8)[None, :, None], (3, 256, 1))
    scaled = image_processor.rescale(every, image_processor.rescale_factor)
    normal = image_processor.normalize(scaled, image_processor.image_mean, image_processor.image_std)
    return np.asarray(normal, np.float32)[:, :, 0]


def resize(image: NDArray[np.uint8], image_processor: Any) -> NDArray[np.uint8]:
    """Returns [H', W', 3] with sides that are multiples of a merged patch and an area within the processor's bounds.

    An image of such a size is returned unchanged, so that resizing twice equals resizing once.
    """
    size = image_processor.size
    smart_resize = sys.modules[type(image_processor).__module__].smart_resize  # from this version of transformers
    height, width = smart_resize(
        *image.shape[:2],
        factor=image_processor.patch_size * image_processor.merge_size,
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
    )
    if (height, width) == image.shape[:2]:
        return image
    return np.asarray(Image.fromarray(image).resize((width, height), image_processor.resample))


def _cut(image: NDArray[np.uint8], image_processor: Any) -> NDArray[np.uint8]:
    """Returns [patches, 3, P x P], with patches adjacent that are merged later."""
    side, merge = image_processor.patch_size, image_processor.merge_size
    tall, wide = (length // side for length in image.shape[:2])
    # order: rows and columns of merged patches, then the patches within each, as the encoder merges them
    blocks = image.reshape(tall // merge, merge, side, wide // merge, merge, side, 3)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(tall * wide, 3, side * side)


# --- the first layer of the image encoder, computed as the matrix product it amounts to
# ---------------------------------


class PatchProduct(nn.Module):
    """A `Conv3d` over single patches, computed as a matrix product. It keeps the convolution's parameters and names.

    The families use a 3-D convolution with a kernel as large as its stride, over patches that are already cut: each
    output is one dot product. Torch computes such a convolution several times slower than the product.
    """

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        self.weight = convolution.weight
        self.bias = convolution.bias

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Returns [N, D, 1, 1, 1] for patches [N, C, T, P, P]."""
        product = nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return product[:, :, None, None, None]


def flatten_patch_embedding(model: nn.Module) -> int:
    """Replaces every such convolution in `model`, in place; returns their number."""
    convolutions = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name == "proj"
        and isinstance(child, nn.Conv3d)
        and type(parent).__name__.endswith("PatchEmbed")
        and child.kernel_size == child.stride
        and child.groups == 1
    ]
    for parent, name in convolutions:
        setattr(parent, name, PatchProduct(getattr(parent, name)))
    return len(convolutions)
