"""Images of stored snapshots, each distinct one drawn once."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import StepEnv, TurnEnv

PATH_MOMENTS = 16
"""Moments along which the way of the hand is drawn for a judge."""


def draw_history(env: TurnEnv, snapshots: FloatArray) -> Frames:
    """Returns images [N, H, W, 3] of `snapshots` [N, S]; for k moments in a row, [N, k * S], they are [N, k, H, W,
    3].
    """
    moments = snapshots.reshape(-1, env.snapshot_size)
    if len(moments) == len(snapshots):
        return env.draw(snapshots)
    # consecutive rows share moments: each is drawn once
    distinct, inverse = np.unique(moments, axis=0, return_inverse=True)
    frames = env.draw(distinct)[inverse.ravel()]
    return frames.reshape(len(snapshots), -1, *frames.shape[1:])


class FrameStore:
    """Draws snapshots at one size and caches the most recently used images.

    Memory is taken once: `capacity * size_px**2 * 3` bytes (25 MB for 2,048 images of 64 pixels, 69 MB for 256 of
    300), touched only as images come.

    Args:
        env: draws the images; snapshots must come from it or from an env of the same config.
        size_px: side of the square images.
        capacity: images kept, >= 1.

    Raises:
        ValueError: size or capacity is below 1.
    """

    def __init__(self, env: StepEnv, size_px: int, capacity: int = 2_048) -> None:
        if size_px < 1 or capacity < 1:
            raise ValueError(f"size_px and capacity must be >= 1, got {size_px} and {capacity}")
        self.num_drawn = 0
        """Images drawn so far."""
        self._env = env
        self._size_px = size_px
        self._images = np.empty((capacity, size_px, size_px, 3), np.uint8)
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first

    @property
    def path_moments(self) -> int:
        """Number of moments through which the hand's path is drawn on a judge's last image; 0: no path."""
        return PATH_MOMENTS if self._env.draws_path else 0

    def paint_path(self, image: NDArray[np.uint8], path: FloatArray) -> NDArray[np.uint8]:
        """Draws on `image` [H, W, 3] the hand's path through the moments `path` [P, S]; see `Env.draw_path`."""
        return self._env.draw_path(image, path)

    @property
    def nbytes(self) -> int:
        """Memory reserved for images, bytes."""
        return self._images.nbytes

    def frames(self, snapshots: FloatArray) -> Frames:
        """Returns images [N, H, W, 3] of `snapshots` [N, S], row for row."""
        # a batch of segments repeats scenes many times: each distinct one is drawn, looked up and copied once
        first, inverse = self.distinct(snapshots)
        unique = np.empty((len(first), self._size_px, self._size_px, 3), np.uint8)
        keys = self.keys(snapshots[first])
        missing = []
        for index, key in enumerate(keys):
            if key in self._slots:
                self._slots.move_to_end(key)
                unique[index] = self._images[self._slots[key]]
            else:
                missing.append(index)
        if missing:
            unique[missing] = self._env.draw(snapshots[first[missing]], self._size_px)
            self.num_drawn += len(missing)
            for index in missing:  # in a free slot, or in that of the least recently used image
                is_full = len(self._slots) == len(self._images)
                slot = self._slots.popitem(last=False)[1] if is_full else len(self._slots)
                self._slots[keys[index]] = slot
                self._images[slot] = unique[index]
        return unique if len(first) == len(snapshots) else unique[inverse]

    def distinct(self, snapshots: FloatArray) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Finds which of `snapshots` [N, S] look different.

        Returns:
            `first` [U], ascending: the rows whose image no earlier row has; and `inverse` [N]: for each row, the index
            in `first` of its image. With `values` [U] computed for `snapshots[first]`, all rows have `values[inverse]`.
        """
        keys = self._env.image_key(snapshots)
        order = np.lexsort(keys.T)  # stable: within a group of equals the earliest row comes first
        is_first = np.ones(len(keys), bool)
        is_first[1:] = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
        first = order[is_first]
        # groups are numbered by key so far; callers want them in order of their first rows
        rank = np.empty(len(first), np.intp)
        rank[np.argsort(first)] = np.arange(len(first))
        inverse = np.empty(len(keys), np.intp)
        inverse[order] = rank[np.cumsum(is_first) - 1]
        return np.sort(first), inverse

    def keys(self, snapshots: FloatArray) -> list[bytes]:
        """Returns a key for the image of each of `snapshots` [N, S]: equal keys, equal images."""
        return [key.tobytes() for key in self._env.image_key(snapshots)]
