"""What rollouts and learners need of a VLA, whatever its size."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rlvlm.policies.vla.tokens import ActionScale


class VLAPolicy(Protocol):
    """A network from images, an instruction and proprioception to the action tokens of a chunk, all at once."""

    image_px: int
    """Side of the square images it looks at."""

    predicts_offsets: bool
    """Whether it learns to tell the ways from the hand to the things of the task, as a pocket VLA may."""

    @property
    def scale(self) -> ActionScale | None:
        """Of its actions, where it comes trained; None where the run's demonstrations give it one."""
        ...

    def read(self, instructions: Sequence[str]) -> Tensor:
        """`[B, W]` int64: the instructions as the network takes them, on its device."""
        ...

    def __call__(self, images: Tensor, words: Tensor, proprio: Tensor) -> Tensor:
        """Logits [B, L * A, 256] in one forward pass: a distribution over bins for each dimension of each action.

        They stand action after action, each with its A dimensions.

        Args:
            images: [B, cameras, H, W, 3] uint8, H = W = `image_px`.
            words: [B, W] as `read` gives them.
            proprio: [B, P] float32, in the env's units.
        """
        ...

    def parameters(self) -> Iterator[Parameter]:
        """All weights, frozen ones too."""
        ...


def trained_weights(policy: nn.Module) -> dict[str, Tensor]:
    """The weights that learn, by name: all of a pocket VLA, the adapter of a large one."""
    return {name: value.detach() for name, value in policy.named_parameters() if value.requires_grad}


def take_weights(policy: nn.Module, weights: Mapping[str, Any]) -> None:
    """Gives `policy` what `trained_weights` told of an equal one, as tensors or arrays.

    Raises:
        ValueError: they belong to another policy.
    """
    own = trained_weights(policy)
    if set(own) != set(weights):
        odd = sorted(set(own) ^ set(weights))
        raise ValueError(f"the weights are another policy's: {len(odd)} names differ, such as {odd[0]}")
    with torch.no_grad():
        for name, value in own.items():
            given = weights[name]
            value.copy_(
                given if isinstance(given, Tensor) else torch.from_numpy(np.array(given))
            )  # theirs is read only
