"""A loss of your own, for replies and for chunks, that adds tensors to the batch: what came early in an episode, and
early in an answer, gets more weight.

python -m rlvlm.run number_line --algo.loss.policy own_loss:early
"""

import numpy as np

from rlvlm.algorithms.policy_gradient.losses import clipped, policy_loss


def when(episode):
    """`left`: for each turn the share of the episode that is left; `place`: the same of each element of an answer."""
    turns = len(episode)
    return {
        "left": 1 - np.arange(turns) / turns,  # [T]
        "place": [1 - np.arange(len(answer)) / len(answer) for answer in episode.log_probs],  # T times [N]
    }


@policy_loss("early", extras=when)
def early(batch, config):
    """PPO's clipped loss, each element times how early it came; `config.ratio` token, as `place` is of elements."""
    loss, _ = clipped(batch, config)  # [B, N]
    weight = batch.extras["left"].unsqueeze(-1) * batch.extras["place"]  # [B, 1] * [B, N]
    return loss * weight, {"weight": weight[batch.mask].mean()}
