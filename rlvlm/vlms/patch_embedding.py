"""The first layer of a Qwen-VL image encoder as the matrix product that it is. Used by `loading`.

The families write it as a 3-D convolution whose kernel is as large as its stride, over patches that are already cut:
each output is one dot product. Torch runs such a convolution several times slower than the product.
"""

import torch
from torch import nn


class PatchProduct(nn.Module):
    """A `Conv3d` over single patches, computed as a product. It has the convolution's own parameters and names."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        self.weight = convolution.weight
        self.bias = convolution.bias

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[N, D, 1, 1, 1] of patches [N, C, T, P, P]."""
        product = nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return product[:, :, None, None, None]


def flatten_patch_embedding(model: nn.Module) -> int:
    """Replaces every such convolution in `model`, in place; the number of those replaced."""
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name == "proj"
        and isinstance(child, nn.Conv3d)
        and type(parent).__name__.endswith("PatchEmbed")
        and child.kernel_size == child.stride
        and child.groups == 1
    ]
    for parent, name in places:
        setattr(parent, name, PatchProduct(getattr(parent, name)))
    return len(places)
