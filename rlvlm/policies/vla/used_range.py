"""The range of demonstrated numbers that a policy's scale covers, for action tokens and flows alike."""

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray

_CONSTANT = 1e-6
"""Distance of the percentiles below which a number seldom changes."""


def used_range(values: FloatArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the 1st and the 99th percentile [A] of each dimension of `values` [N, A].

    A dimension that changes in less than one step in a hundred, such as a wrist that turns once, has equal percentiles:
    its extremes replace them, or a policy that is bound to the range could never act it.
    """
    exact = values.astype(np.float64)
    low, high = np.quantile(exact, [0.01, 0.99], axis=0)
    is_rare = high - low < _CONSTANT
    return np.where(is_rare, exact.min(axis=0), low), np.where(is_rare, exact.max(axis=0), high)
