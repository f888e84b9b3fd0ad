"""Judging by similarity: how well an image fits the goal's words, or an image of the goal. `clip` and `blip2` use it.

These models do not read a question. A clip is scored by its last image, and of two clips the one with the better
last image is nearer to the goal. Which network sees is the `ImageRater`'s.

Source: Rocamonde et al. 2023 (VLM-RM), arXiv:2310.12921, sec. 3, for the regularised goal-baseline reward. Departure:
scores are carried from [-1, 1] to [0, 1] by (1 + r) / 2, which keeps their order.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rlvlm.core.judging import Clip, Query
from rlvlm.judges import prompts
from rlvlm.judges.config import Abilities, JudgeConfig

Pixels = NDArray[np.uint8]
"""[H, W, 3]."""
Units = NDArray[np.float64]
"""[N, E] rows of length 1."""


class ImageRater(Protocol):
    """A network that says how well images fit."""

    revision: str
    """Commit or digest of the weights."""
    traits: str
    """Whatever else changes its numbers at fixed weights, e.g. `dtype=float32`."""
    sees_goal_images: bool
    """Whether the goal may be an image."""

    def rate(self, images: Sequence[Pixels], goals: Sequence[str | Pixels]) -> NDArray[np.float64]:
        """[N] in [0, 1], how well each image fits its goal.

        Raises:
            JudgeUnavailable: the network breaks on them.
        """
        ...


class SimilarityModel:
    """An `ImageRater` as a `numeric.NumericModel`: the last image of a clip counts."""

    prompt = "likeness/1"  # the name that stored answers have
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

    def rate(self, clips: Sequence[Clip]) -> tuple[torch.Tensor, list[str]]:
        """[N] in [0, 1], and each in digits."""
        values = self._rater.rate([clip.frames[-1] for clip in clips], list(map(self._goal, clips)))
        return torch.from_numpy(values), [f"{value:.4f}" for value in values.tolist()]

    def prefer(self, queries: Sequence[Query]) -> tuple[torch.Tensor, list[str]]:
        """[N] by how much the left side fits better, 0 within the tie band, and both in digits."""
        sides = [side[-1] for query in queries for side in (query.left, query.right)]
        goals = [goal for query in queries for goal in [self._goal(query)] * 2]
        rated = self._rater.rate(sides, goals).reshape(-1, 2)
        margins = rated[:, 0] - rated[:, 1]
        # similarities of two views of one state differ by noise; the band calls that no preference
        margins[np.abs(margins) <= self._settings.tie_band] = 0.0
        return torch.from_numpy(margins), [f"left {left:.4f}, right {right:.4f}" for left, right in rated.tolist()]

    def share(self, margins: NDArray[np.float64]) -> None:
        """A difference of similarities is no probability."""

    def _goal(self, item: Query | Clip) -> str | Pixels:
        if item.goal_picture is not None:
            return item.goal_picture[0]
        return self._settings.template.replace("{goal}", prompts.check_goal(item.goal))


def baseline_reward(states: Units, goals: Units, baseline: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Similarity to the goal with what has nothing to do with the goal partly projected out.

    Args:
        states: [N, E] unit vectors of images.
        goals: [N, E] unit vectors of their goals.
        baseline: [E] unit vector of the scene without its goal.
        alpha: weight of the projection onto the line through baseline and goal, in [0, 1].

    Returns:
        [N] 1 - |alpha * proj(s) + (1 - alpha) * s - g|^2 / 2, in [-1, 1]; the cosine where alpha is 0.
    """
    line = goals - baseline
    # proj(s) = b + ((s - b) . l / l . l) l, with the line l = g - b
    length = (line**2).sum(-1, keepdims=True)
    along = ((states - baseline) * line).sum(-1, keepdims=True) / np.where(length == 0, 1.0, length)
    projected = baseline + along * line  # the baseline itself where it equals the goal
    return 1 - ((alpha * projected + (1 - alpha) * states - goals) ** 2).sum(-1) / 2


def unit(vectors: NDArray[np.float64]) -> Units:
    """The rows [N, E], each divided by its length."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
