"""Whether a curve has stopped moving. Arrays in, a yes or no out."""

import numpy as np
from numpy.typing import ArrayLike

from rlvlm.sweeps.config import FlatConfig


def is_flat(steps: ArrayLike, scores: ArrayLike, total_steps: int, config: FlatConfig) -> bool:
    """Whether the newest scores have stayed together for as long as `config` asks.

    Args:
        steps: [N] env steps of the evaluations, rising.
        scores: [N] in the score's unit.
        total_steps: env steps of the whole run.
        config: how long, how closely, and from where on.

    Returns:
        True when there is an evaluation at or after `after` of the run, at least `share` of the run before the newest,
        and all scores from there on lie within `tolerance` of each other.
    """
    steps, scores = np.asarray(steps, float), np.asarray(scores, float)
    if not len(steps):
        return False
    first = steps[-1] - config.share * total_steps
    begins = np.flatnonzero((steps <= first) & (steps >= config.after * total_steps))
    return bool(len(begins)) and float(np.ptp(scores[begins[-1] :])) <= config.tolerance
