"""Advantages of a group's episodes from their scores, as pure functions. The algorithm calls them once per step.

Sources: Shao et al. 2024, arXiv:2402.03300 (GRPO); Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO: no division by the
standard deviation); Ahmadian et al. 2024, arXiv:2402.14740 (RLOO); Chen et al. 2025, arXiv:2505.17016 (RIPT-VLA).
"""

import numpy as np
from numpy.typing import NDArray

from rlvlm.algorithms.grpo.config import AdvantageConfig, GroupBaseline
from rlvlm.core.steps import FloatArray

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, in units of score."""


def group_scores(scores: FloatArray, groups: NDArray[np.int64]) -> tuple[FloatArray, NDArray[np.intp]]:
    """Scores arranged by group, whatever order the episodes are in.

    Args:
        scores: [B] of episodes, any units.
        groups: [B] the group each belongs to; every group has the same number of members.

    Returns:
        `table` [B / G, G] of scores and `places` [B / G, G]: the episode that each entry belongs to.

    Raises:
        ValueError: the groups differ in size.
    """
    _, sizes = np.unique(groups, return_counts=True)
    if len(set(sizes.tolist())) != 1:
        raise ValueError(f"all groups need the same number of episodes, got sizes {sorted(set(sizes.tolist()))}")
    places = np.argsort(groups, kind="stable").reshape(len(sizes), -1)
    return scores[places], places


def group_advantages(scores: FloatArray, *, baseline: GroupBaseline, divide_by_std: bool) -> FloatArray:
    """How much better each episode did than its group.

    Args:
        scores: [N, G] of N groups, G >= 2.
        baseline: the group's mean, or that of the others.
        divide_by_std: by the unbiased standard deviation of the group.

    Returns:
        [N, G] float32: (R - mean) / (std + 1e-6), (R - mean), or R - mean of the others = (R - mean) G / (G - 1).

    Raises:
        ValueError: a group has one member, or scores are not finite.
    """
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise ValueError(f"scores must be [N, G] with G >= 2, got {scores.shape}: one episode has nobody to beat")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite; drop the groups of episodes that could not be scored first")
    wide = scores.astype(np.float64)
    size = wide.shape[1]
    differences = wide - wide.mean(axis=1, keepdims=True)
    if baseline == "leave_one_out":
        differences *= size / (size - 1)
    if divide_by_std:
        differences /= wide.std(axis=1, ddof=1, keepdims=True) + STD_EPSILON
    return differences.astype(np.float32)


def informative_groups(scores: FloatArray, config: AdvantageConfig, scorer_noise: float) -> NDArray[np.bool_]:
    """`[N]` which groups teach something: a spread above `min_spread`, and above what the scorer's noise explains.

    Args:
        scores: [N, G] of N groups.
        config: least spread, and how many times the noise.
        scorer_noise: standard deviation of the scorer, as it was set or measured.

    Departure: fixed bounds on the group's mean (RLinf, SimpleVLA-RL: success in [0.1, 0.9]) keep a group of failures
    that a continuous scorer calls 8, 10, 10 and 12 percent; division by its standard deviation would then train on
    noise at full strength.
    """
    spread = scores.max(axis=1) - scores.min(axis=1)
    std = scores.astype(np.float64).std(axis=1, ddof=1)
    return (spread >= config.min_spread) & (std > config.noise_factor * scorer_noise)


def chunk_advantages(values: FloatArray, score: float, trace: float) -> FloatArray:
    """`[C]` what came of each chunk of an episode, against what was expected before it.

    A_c = sum_k trace^k d_(c+k) with d_c = V_(c+1) - V_c, and V_C = score at the end. There is no discount.

    Args:
        values: [C] score that was expected before each chunk.
        score: of the episode.
        trace: lambda, in [0, 1].

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16, with gamma = 1 and the score as the only reward.
    """
    found = np.append(values[1:], score) - values
    for chunk in range(len(values) - 2, -1, -1):
        found[chunk] += trace * found[chunk + 1]
    return found.astype(np.float32)
