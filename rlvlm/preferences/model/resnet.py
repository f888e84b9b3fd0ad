"""The image reward with a ResNet-18 in place of the small CNN. Chosen by `--reward.model resnet18`, made by `build`."""

import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetModel

from rlvlm.preferences.model.networks import bounded, spread

_WIDTHS = [64, 128, 256, 512]
_RESNET18 = ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=_WIDTHS)
_PIXELS_PER_HALF_SECOND = 200_000


class ResNetNetwork(nn.Module):
    """ResNet-18 with random weights and one linear layer, bounded by a tanh as the small CNN is.

    Source: He et al. 2016, arXiv:1512.03385; as the image reward of the deformable tasks in Wang et al. 2024
    (RL-VLM-F), arXiv:2402.03681. Departure from the latter: bounded, so that rewards of all models have one scale.

    Batches are normalised by their own statistics in training, and by running ones otherwise.

    Args:
        rng: of the initial weights.
    """

    def __init__(self, rng: torch.Generator) -> None:
        super().__init__()
        seed = int(torch.randint(2**62, (), generator=rng))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = ResNetModel(_RESNET18)
            self.head = spread(nn.Linear(_WIDTHS[-1], 1), 1e-3, rng)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def calibrate(self, images: Tensor) -> None:
        """Nothing to do: the range of pixels is known."""

    def features(self, images: Tensor) -> Tensor:
        """`[M, 512]` means over the last map of `pictures` `[M, H, W, 3]` uint8."""
        return self.body(images.permute(0, 3, 1, 2).float() / 255).pooler_output.flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        """Rewards `[M]` of `pictures` `[M, H, W, 3]` uint8."""
        return bounded(self.head(self.features(images)).squeeze(-1))


def affordable_pictures(picture_px: int) -> int:
    """Images that an ensemble of three reads in about half a second on one core, >= 1."""
    return max(_PIXELS_PER_HALF_SECOND // picture_px**2, 1)
