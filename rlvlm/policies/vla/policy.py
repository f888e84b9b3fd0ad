"""What rollouts and learners need of a VLA, whatever its size."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn import Parameter


class VLAOutput(NamedTuple):
    """What one forward pass over B observations gives."""

    logits: Tensor
    """[B, L * A, 256] one distribution over bins for each dimension of each action of the chunk, A before L."""
    values: Tensor | None
    """[B] expected score of the episode; None without a value head."""


class VLAPolicy(Protocol):
    """A network from images, an instruction and proprioception to the action tokens of a chunk, all at once."""

    image_px: int
    """Side of the square images it looks at."""

    def read(self, instructions: Sequence[str]) -> Tensor:
        """`[B, W]` int64: the instructions as the network takes them, on its device."""
        ...

    def __call__(self, images: Tensor, words: Tensor, proprio: Tensor) -> VLAOutput:
        """One forward pass.

        Args:
            images: [B, cameras, H, W, 3] uint8, H = W = `image_px`.
            words: [B, W] as `read` gives them.
            proprio: [B, P] float32, in the env's units.
        """
        ...

    def parameters(self) -> Iterator[Parameter]:
        """Everything that is trained."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The weights by name."""
        ...
