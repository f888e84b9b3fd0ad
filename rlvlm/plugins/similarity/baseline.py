"""The regularised goal-baseline reward of embeddings.

Source: Rocamonde et al. 2023 (VLM-RM), arXiv:2310.12921, sec. 3. Departure: `clip` maps the rewards from [-1, 1] to
[0, 1] by (1 + r) / 2, which keeps their order.
"""

import numpy as np
from numpy.typing import NDArray

Units = NDArray[np.float64]
"""Rows of length 1, [N, E]."""


def baseline_reward(states: Units, goals: Units, baseline: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Returns the similarity to the goal after partly projecting out everything unrelated to the goal.

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
    """Returns the rows [N, E], each divided by its length."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
