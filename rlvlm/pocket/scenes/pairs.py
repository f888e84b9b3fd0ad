"""What a pocket judge learns from: images of a task with the simulator's progress, and pairs of them.

A scene provider fills it; `train` and `evaluate` take one by name (`module:function`), so that tasks of one's own can
be taught too.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames

TIE_GAP = 0.02
"""Images whose progress differs by less than this are taught as no difference, however well they can be seen."""

Split = Literal["train", "held_out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenes:
    """Distinct images of one set-up of one task, and which of them the frames of its episodes show."""

    task: str
    """E.g. `drawer_open`."""
    name: str
    """Set-up, e.g. `robot hidden, fixed start`."""
    goal: str
    """Fills the slot of the prompt."""
    phrase: str
    """What an image shows, with one slot: `the drawer is {percent}% open`."""
    images: Frames
    """[N, H, W, 3], no two alike."""
    progress: FloatArray
    """[N] in [0, 1]."""
    frames: NDArray[np.int64]
    """[M] the image that each frame of the episodes shows: what a uniform draw over frames would meet."""
    share: float = 1.0
    """How often the set-up is drawn in training, relative to the others."""

    def __post_init__(self) -> None:
        if len(self.images) != len(self.progress):
            raise ValueError(f"need one progress per image, got {len(self.progress)} for {len(self.images)}")
        if len(self.frames) == 0 or not 0 <= self.frames.min() <= self.frames.max() < len(self.images):
            raise ValueError(f"frames must name images 0 to {len(self.images) - 1}")


Provider = Callable[[Split, int], Iterable[Scenes]]
"""Makes the scenes of a split from a seed, task by task; the two splits share no episode."""


def find_provider(name: str) -> Provider:
    """Returns the scene provider called `module:function`.

    Raises:
        ValueError: the name does not lead to a function.
    """
    module, _, function = name.partition(":")
    try:
        provider = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no scene provider {name!r} ({error}); name one as module:function") from error
    return provider


def label_of(left: float, right: float, tie_gap: float = TIE_GAP) -> int:
    """Returns the true label of two progresses: 0 left is nearer, 1 right is nearer, -1 no difference."""
    if abs(left - right) < tie_gap:
        return -1
    return int(right > left)


def draw_uniform_pairs(scenes: Scenes, num_pairs: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Returns [num_pairs, 2] images as the preference loop meets them: uniform over frames, never the same twice."""
    pairs = np.empty((0, 2), np.int64)
    while len(pairs) < num_pairs:
        drawn = scenes.frames[rng.integers(len(scenes.frames), size=(2 * num_pairs, 2))]
        pairs = np.concatenate([pairs, drawn[drawn[:, 0] != drawn[:, 1]]])
    return pairs[:num_pairs]


def draw_gap_pairs(scenes: Scenes, gaps: FloatArray, rng: np.random.Generator) -> NDArray[np.int64]:
    """Returns [N, 2] images whose progress differs by about `gaps` [N] in [-1, 1], right minus left.

    Images of one and the same progress are drawn equally often, e.g. mirrored ones and those of a lost ball.
    """
    order = np.argsort(scenes.progress)
    ranked = scenes.progress[order]
    low, high = ranked[0] - np.minimum(gaps, 0), ranked[-1] - np.maximum(gaps, 0)
    left_target = low + rng.random(len(gaps)) * np.maximum(high - low, 0)
    grain = 1.0 / len(ranked)
    ends = [target + grain * rng.standard_normal(len(gaps)) for target in (left_target, left_target + gaps)]
    met = [ranked[np.clip(np.searchsorted(ranked, end), 0, len(ranked) - 1)] for end in ends]
    ranks = [rng.integers(np.searchsorted(ranked, one), np.searchsorted(ranked, one, side="right")) for one in met]
    return np.stack([order[rank] for rank in ranks], axis=1)
