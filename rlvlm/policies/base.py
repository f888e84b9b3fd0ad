"""Common base of all policies whose answers are learned from: images by key, and weights by name."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rlvlm.core.episodes import Answer, Observations
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import Frames
from rlvlm.policies.protocol import SeenImages
from rlvlm.policies.weights import Shardable, load_weights, swap_weights, trainable_state
from rlvlm.vlms.skeleton import device_of

_CACHE_BYTES = 256 << 20


class AnsweringPolicy(nn.Module):
    """What `Policy` asks for and most policies do alike; see there."""

    config: Any
    """What it was built by."""

    def __init__(self) -> None:
        super().__init__()
        self.value_head: nn.Module | None = None
        self.images: SeenImages[Any] = SeenImages(_CACHE_BYTES)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return device_of(self)

    @property
    def has_values(self) -> bool:
        """Whether it has a value head."""
        return self.value_head is not None

    def show(self, keys: Sequence[bytes], frames: Frames) -> None:
        """Keeps `frames` [N, ...], as `draw` gives them, under `keys`."""
        for key, frame in zip(keys, frames, strict=True):
            self.images.add(key, frame)

    def forget_stale_images(self) -> None:
        """Pixels stay what they are, whatever is learned."""

    def values(self, obs: Observations) -> Tensor:
        """[B] the value head before any answer."""
        raise NotImplementedError(f"{type(self).__name__} has no value head")

    def lengths(self, obs: Observations, answers: Sequence[Answer]) -> list[int]:
        return [1] * len(answers)

    def acting_parameters(self) -> list[nn.Parameter]:
        """Parameters that learn, without the value head's."""
        # by identity, for tensors compare by their values
        own = {id(parameter) for parameter in self.value_parameters()}
        return [parameter for parameter in self.parameters() if parameter.requires_grad and id(parameter) not in own]

    def value_parameters(self) -> list[nn.Parameter]:
        """Parameters of the value head that learn."""
        return [] if self.value_head is None else list(self.value_head.parameters())

    def trained_state(self) -> dict[str, Tensor]:
        """Name and value of everything that learns, detached: what a checkpoint and a sync of weights carry."""
        return trainable_state(self)

    def load_trained_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `trained_state` of an equal policy gave, as tensors or arrays.

        Raises:
            ValueError: a name or a shape is not that of this policy.
        """
        load_weights(self.trained_state(), state)

    def with_weights(self, state: Mapping[str, Any]) -> AbstractContextManager[None]:
        return swap_weights(self.trained_state(), state)

    def shardable(self) -> Shardable:
        """See `Policy`.

        Raises:
            UsageError: it is too small for that.
        """
        raise UsageError("only a large policy is worth sharding", "leave out --algo.shard, or name a --policy.model")
