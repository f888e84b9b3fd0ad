"""Images that a policy elsewhere has looked at go to those who learn from its episodes, and to nobody else.

An env runner leaves the images of its episodes compressed in Ray's object store, and a rollout carries references.
Learners fetch what their update needs. Images of a runner that is gone by then are drawn again.
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
"""A reference to images in Ray's object store."""


def put_images(images: Mapping[bytes, Frames], episodes: Sequence[TokenEpisode]) -> list[StoredImages]:
    """Stores those of `images` that `episodes` were played by; nothing where there are none."""
    played_by = _keys(episodes)
    packed = [
        # rendered images become several times smaller, without loss: the learner must see what was acted on
        (key, image.shape, zlib.compress(image.tobytes(), 1))
        for key, image in images.items()
        if key in played_by
    ]
    return [ray.put(packed)] if packed else []


def show_images(policy: Policy, stored: Sequence[StoredImages], episodes: Sequence[TokenEpisode]) -> None:
    """Shows `policy` the images that `episodes` were played by, as far as they are in `stored` and still there."""
    wanted = _keys(episodes) if stored else set()
    for reference in stored:
        try:
            packed: Any = ray.get(reference)
        except RayError:  # lost with its runner: what is missing is drawn
            continue
        for key, shape, content in packed:
            if key in wanted:
                policy.show([key], np.frombuffer(zlib.decompress(content), np.uint8).reshape(1, *shape))


def _keys(episodes: Sequence[TokenEpisode]) -> set[bytes]:
    return {key for episode in episodes for key in episode.obs.images}
