"""Transitions that can be told apart, for the tests of this folder."""

import numpy as np

from rlvlm.core.steps import Transitions


def rows(first, count):
    """Transitions whose every number tells which row it is."""
    number = np.arange(first, first + count, dtype=np.float32)
    return Transitions(
        obs=np.stack([number, number + 0.1], 1),
        actions=number[:, None] + 0.2,
        next_obs=np.stack([number + 0.3, number + 0.4], 1),
        terminated=number % 2,
        env_rewards=number + 0.5,
        success=number % 3,
        snapshots=number[:, None] + 0.6,
    )
