"""A query strategy of your own: asks about the pairs that the reward model finds hardest to tell apart.

python -m rlvlm.run drawer_open --reward.teacher oracle --feedback.sampling own_queries:nearest
"""

import numpy as np

from rlvlm.preferences.queries import highest, query_strategy


@query_strategy("nearest")
def nearest(candidates, num):
    """The `num` candidates with the smallest difference between the predicted returns of their sides."""
    left, right = np.moveaxis(candidates.returns.mean(axis=0), -1, 0)  # [N] each, mean over the ensemble
    return highest(-np.abs(left - right), num)
