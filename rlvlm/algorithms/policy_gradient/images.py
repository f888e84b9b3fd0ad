"""Images seen by policies elsewhere, sent to those who learn from their episodes, and to no others.

An env runner leaves the images of its episodes compressed in Ray's object store, and a rollout carries references to
them. Learners fetch those that their update needs. Images of a runner that is gone by then are drawn again.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.steps import Frames
from rlvlm.policies.protocol import Policy

StoredImages = Any
"""Reference to images in Ray's object store."""


def put_images(images: Mapping[bytes, Frames], episodes: Sequence[TokenEpisode]) -> list[StoredImages]:
    """Stores those of `images` that belong to `episodes`; returns no reference if there are none."""
    played_by = _keys(episodes)
    packed = [
        # rendered images shrink several times, without loss: the learner must see what was acted on
        (key, image.shape, zlib.compress(image.tobytes(), 1))
        for key, image in images.items()
        if key in played_by
    ]
    return [ray.put(packed)] if packed else []


def show_images(policy: Policy, stored: Sequence[StoredImages], episodes: Sequence[TokenEpisode]) -> None:
    """Shows `policy` the images of `episodes` that are in `stored` and still exist."""
    wanted = _keys(episodes) if stored else set()
    for reference in stored:
        try:
            packed: Sequence[tuple[bytes, tuple[int, ...], bytes]] = ray.get(reference)
        except RayError:  # lost with its runner: missing ones are drawn
            continue
        for key, shape, content in packed:
            if key in wanted:
                policy.show([key], np.frombuffer(zlib.decompress(content), np.uint8).reshape(1, *shape))


def _keys(episodes: Sequence[TokenEpisode]) -> set[bytes]:
    return {key for episode in episodes for key in episode.obs.images}
