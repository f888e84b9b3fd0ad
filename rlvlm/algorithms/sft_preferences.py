"""The supervised start by preferences: answers of better episodes are made more likely than those of worse ones.

Source: Hejna et al. 2023, arXiv:2310.13639 (contrastive preference learning), with an answer's log-probability as its
advantage. Departures: the surrogate of a log-probability is minus the policy's own imitation loss (replies: nats per
reply; tokens: nats per token, against the bell over bins; flows: the error of the velocity, at random noise and
times), averaged rather than summed over a segment; and better segments are imitated at the same time, rather than in a
phase of cloning before.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rlvlm.core.episodes import IntArray
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray

SEGMENT = 4
"""Answers in a segment; fewer if an episode is shorter."""
MIN_GAP = 0.1
"""Minimum difference in worth, which is in [0, 1], for one of two episodes to count as better."""
BIAS = 0.5
"""Lambda of the paper, < 1: weight of a worse segment when compared with a better one, so that a policy does not gain
by making both unlikely."""


class SegmentPairs:
    """Draws pairs of segments, of which one is from a better episode.

    Args:
        worths: [M] worth of each answer's episode, in [0, 1]; NaN if unknown.
        episodes: [M] episode number of each answer; an episode's answers are in order.

    Raises:
        UsageError: no two episodes are `MIN_GAP` apart.
    """

    def __init__(self, worths: FloatArray, episodes: IntArray) -> None:
        known = np.isfinite(worths)
        numbers, begins = np.unique(episodes[known], return_index=True)
        rows = np.flatnonzero(known)
        worth = worths[rows[begins]]
        order = np.argsort(worth, kind="stable")
        self._worth = worth[order]
        self._rows = [rows[episodes[rows] == number] for number in numbers[order]]
        # for episode e the first `self._num_worse[e]` are worse; equal ones are left out
        self._num_worse = np.searchsorted(self._worth, self._worth - MIN_GAP, side="right")
        self._better = np.flatnonzero(self._num_worse)
        if not len(self._better):
            raise UsageError(
                f"--sft.weighting preference needs episodes that the judge finds better than others, and of "
                f"{len(self._rows)} whose worth is known no two are {MIN_GAP} apart",
                "look at the page of `rlvlm score`, or choose another weighting",
            )
        self.length = min(SEGMENT, *map(len, self._rows))

    def draw(self, num: int, rng: np.random.Generator) -> IntArray:
        """Returns [num, 2, L] rows of segments, the better first; both begin at the same share of their episode."""
        found = np.empty((num, 2, self.length), np.int64)
        for pair in found:
            better = rng.choice(self._better)
            worse = rng.integers(self._num_worse[better])
            share = rng.random()
            for place, episode in enumerate((better, worse)):
                rows = self._rows[episode]
                begin = int(share * (len(rows) - self.length + 1))
                pair[place] = rows[begin : begin + self.length]
        return found


def preference_loss(losses: Tensor) -> Tensor:
    """Returns the mean over pairs, a scalar with gradient.

    Args:
        losses: [U, 2, L] imitation loss of each answer, better segments first.
    """
    better, worse = (-losses.mean(-1)).unbind(1)  # [U] surrogates of mean log-probabilities
    # -log sigma(S+ - lambda S-), S the segments' advantages, plus cloning of the better one
    return (functional.softplus(BIAS * worse - better) - better).mean()


def losses_of_rows(loss_of: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns [B], the loss of each of `rows` [B], and the part that does not depend on weights (offsets to things), a
    scalar; both with gradient.

    Args:
        loss_of: returns the mean of some rows' losses times their weights, see `Imitation.loss`.
        rows: rows for it.
    """
    # L(w) = mean_b(w_b l_b) + c is linear in w: its derivative by w_b is l_b / B, and the rest is c
    weights = torch.ones(len(rows), requires_grad=True)
    whole = loss_of(rows, weights)
    (found,) = torch.autograd.grad(whole, weights, create_graph=True)
    return found * len(rows), whole - found.sum().to(whole.device)
