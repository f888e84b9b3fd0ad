"""Image changes: retests that keep the truth, and noise instead of images."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from rlvlm.core.steps import Frames
from rlvlm.judge_bench.items import Item

FADED = 0.8
"""Contrast of a faded image relative to the original: the goal stays as visible as before."""
_LIGHT = 15
"""Grey levels added to a brighter image."""
_SHIFT = 0.02
"""Share of an image's sides by which it is shifted to the right and down."""


def faded(frames: Frames) -> Frames:
    """Returns the images with less contrast and the same mean brightness."""
    middle = frames.mean((1, 2, 3), keepdims=True)
    return (middle + FADED * (frames - middle)).round().astype(np.uint8)


def brighter(frames: Frames) -> Frames:
    """Returns the images a little brighter; white stays white."""
    return np.minimum(frames.astype(np.int16) + _LIGHT, 255).astype(np.uint8)


def shifted(frames: Frames) -> Frames:
    """Returns the images shifted right and down by a fiftieth of their sides, with their edges repeated."""
    down, right = (max(1, round(_SHIFT * side)) for side in frames.shape[1:3])
    padded = np.pad(frames, ((0, 0), (down, 0), (right, 0), (0, 0)), mode="edge")
    return padded[:, : frames.shape[1], : frames.shape[2]]


def mirrored(frames: Frames) -> Frames:
    """Returns the images mirrored left to right."""
    return np.ascontiguousarray(frames[:, :, ::-1])


CHANGES: dict[str, Callable[[Frames], Frames]] = {
    "faded": faded,
    "brighter": brighter,
    "shifted": shifted,
    "mirrored": mirrored,
}
"""Changes by name; `noise` is handled separately."""
_ONE_SIDED = {"faded": True, "brighter": False}
"""Changes to one side of a pair: True changes the nearer side, False the farther. A judge that follows them errs."""


def changed(item: Item, sides: Sequence[Frames]) -> list[Frames]:
    """Returns the images shown for the `sides` [L, H, W, 3] of an item, in the item's own order."""
    if not item.change:
        return list(sides)
    if item.change == "noise":
        # seeded by the item's content: a repeated question shows the same noise
        seed = int.from_bytes(hashlib.sha256(item.sides[0].tobytes()).digest()[:8], "big")
        return [np.random.default_rng(seed).integers(0, 256, frames.shape, np.uint8) for frames in sides]
    change = CHANGES[item.change]
    if len(sides) == 2 and item.change in _ONE_SIDED:
        right_changes = (item.gap > 0) == _ONE_SIDED[item.change]
        return [change(frames) if place == right_changes else frames for place, frames in enumerate(sides)]
    return [change(frames) for frames in sides]
