"""Judging by similarity of an image to the goal's text, or to an image of the goal: for networks, and users' functions.

They do not read a question. A clip is scored by its last image, and of two clips the one with the higher last
score is nearer to the goal. The `ImageRater` is the network or the function.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.judging import Clip, Query
from rlvlm.judges import prompts
from rlvlm.judges.config import Abilities, JudgeConfig

Pixels = NDArray[np.uint8]
"""Image [H, W, 3]."""


class ImageRater(Protocol):
    """Network or function that scores how well images match goals."""

    revision: str
    """Commit or digest of the weights."""
    traits: str
    """Everything else that changes its numbers at fixed weights, e.g. `dtype=float32`."""
    sees_goal_images: bool
    """Whether the goal may be an image."""

    def rate(self, images: Sequence[Pixels], goals: Sequence[str | Pixels]) -> NDArray[np.float64]:
        """Returns [N] scores in [0, 1], how well each image matches its goal.

        Raises:
            JudgeUnavailable: the network fails on them.
        """
        ...


class SimilarityModel:
    """Adapts an `ImageRater` to `numeric.NumericModel`: the last image of a clip counts."""

    prompt = "likeness/1"  # name in the stamps of stored answers
    max_frames = 1

    def __init__(self, config: JudgeConfig, rater: ImageRater) -> None:
        self._settings = config.similarity
        self._rater = rater
        self.revision = rater.revision
        self.abilities = Abilities(
            compare=frozenset({"direct"}), score=frozenset({"progress"}), goal_pictures=rater.sees_goal_images
        )
        template, tie_band = config.similarity.template, config.similarity.tie_band
        self.decoding = f"template={template!r} tie_band={tie_band:g} {rater.traits}"

    def rate(self, clips: Sequence[Clip]) -> tuple[NDArray[np.float64], list[str]]:
        values = self._rater.rate([clip.frames[-1] for clip in clips], list(map(self._goal, clips)))
        return values, [f"{value:.4f}" for value in values.tolist()]

    def prefer(self, queries: Sequence[Query]) -> tuple[NDArray[np.float64], list[str]]:
        """Returns [N] margins by which the left side matches better, 0 within the tie band, and a text for each."""
        sides = [side[-1] for query in queries for side in (query.left, query.right)]
        goals = [goal for query in queries for goal in [self._goal(query)] * 2]
        rated = self._rater.rate(sides, goals).reshape(-1, 2)
        margins = rated[:, 0] - rated[:, 1]
        # similarities of two views of one state differ by noise, which the tie band ignores
        margins[np.abs(margins) <= self._settings.tie_band] = 0.0
        return margins, [f"left {left:.4f}, right {right:.4f}" for left, right in rated.tolist()]

    def share(self, margins: NDArray[np.float64]) -> None:
        """Returns None: a difference of similarities is no probability."""

    def _goal(self, item: Query | Clip) -> str | Pixels:
        if item.goal_picture is not None:
            return item.goal_picture[0]
        return self._settings.template.replace("{goal}", prompts.check_goal(item.goal))
