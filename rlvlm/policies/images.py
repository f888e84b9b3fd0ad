"""What a policy has seen: features of images, kept by key as long as there is room."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.core.errors import MachineError


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenImage:
    """One image as the language model gets to see it."""

    features: Tensor
    """[layers, N, D] visual tokens; the last layer stands in for the image's tokens, the others are added within the
    language model (deep stack)."""
    grid: tuple[int, int, int]
    """Patches in time, height and width; zeros for models without such positions."""
    size_px: tuple[int, int]
    """(H, W) of the image."""
    frame: NDArray[np.uint8] | None = None
    """[H, W, 3], kept only where the vision encoder is trained, so that it can look again."""

    @property
    def nbytes(self) -> int:
        """Of features and frame."""
        features = self.features.numel() * self.features.element_size()
        return features + (0 if self.frame is None else self.frame.nbytes)


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Image = TypeVar("Image", bound=_Sized)


class SeenImages(Generic[Image]):
    """Images by key, as features or as pixels; the least recently used leave when `max_bytes` is reached.

    Args:
        max_bytes: room for them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._images: OrderedDict[bytes, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._images)

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Places in `keys` whose image is not here, the first of each key only; the others count as used just now."""
        wanted: dict[bytes, int] = {}
        # envs side by side often show the same image: it is asked for once
        for place, key in enumerate(keys):
            if key in self._images:
                self._images.move_to_end(key)
            else:
                wanted.setdefault(key, place)
        return list(wanted.values())

    def add(self, key: bytes, image: Image) -> None:
        """Keeps `image`; images unused for longest make room for it."""
        self._bytes += image.nbytes - (self._images[key].nbytes if key in self._images else 0)
        self._images[key] = image
        self._images.move_to_end(key)
        # the newest stays, however large: a batch of one must always work
        while self._bytes > self._max_bytes and len(self._images) > 1:
            self._bytes -= self._images.popitem(last=False)[1].nbytes

    def get(self, keys: Sequence[bytes]) -> list[Image]:
        """The images of `keys`.

        Raises:
            MachineError: one is not here: it was never shown, or the cache is smaller than a batch.
        """
        try:
            return [self._images[key] for key in keys]
        except KeyError as error:
            raise MachineError(
                f"image {error} was not shown to the policy, or its cache of {self._max_bytes >> 20} MiB is smaller "
                f"than a batch ({len(set(keys))} images)",
                "raise --policy.cache-mib",
            ) from error

    def clear(self) -> None:
        """Forgets everything; after the vision encoder changed, features are stale."""
        self._images.clear()
        self._bytes = 0

    def items(self) -> dict[bytes, Image]:
        """Everything that is kept."""
        return dict(self._images)
