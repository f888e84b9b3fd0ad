"""Small data of the kinds that the pocket models learn from: bars whose length is the progress, and noise as clips."""

import numpy as np

from pocket_models.scenes import Scenes
from pocket_models.video import MOMENTS, Clips

LONG = ("lengthen the bar", "the bar is {percent}% long")
SHORT = ("make the white bar as short as possible", "the bar is {percent}% gone")
SOUP, MILK = "pick up the soup and place it in the basket", "pick up the milk and place it in the basket"


def make_scenes(num_images: int = 12, topic: tuple[str, str] = LONG, share: float = 1.0) -> Scenes:
    """White bars whose length is the progress."""
    progress = np.linspace(0, 1, num_images, dtype=np.float32)
    images = np.zeros((num_images, 48, 48, 3), np.uint8)
    for image, value in zip(images, progress, strict=True):
        image[16:32, : round(48 * float(value))] = 255
    return Scenes(
        task=topic[0],
        name="bars",
        goal=topic[0],
        phrase=topic[1],
        images=images,
        progress=progress,
        frames=np.arange(num_images),
        share=share,
    )


def make_clips(num: int = 4) -> Clips:
    rng = np.random.default_rng(0)
    return Clips(
        frames=rng.integers(0, 256, (num, MOMENTS, 144, 144, 3), np.uint8),
        places=rng.normal(0, 0.2, (num, MOMENTS, 2, 3)).astype(np.float32),
        things=("milk_1", "soup_1"),
        targets=("soup_1",),
        tasks=("libero_object/7", "libero_goal/0") * (num // 2),
        instructions=(SOUP, MILK) * (num // 2),
        success=np.arange(num) < num // 2,
    )
