import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rlvlm.algorithms.sft_preferences import SegmentPairs, losses_of_rows, preference_loss
from rlvlm.core.errors import UsageError


def test_two_answers_by_hand():
    # better: a loss of 1, worse: of 3; S+ = -1, S- = -3, so -log sigma(-1 + .5 * 3) + 1
    losses = torch.tensor([[[1.0], [3.0]]], requires_grad=True)
    loss = preference_loss(losses)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-0.5)) + 1)
    loss.backward()
    doubt = 1 / (1 + math.exp(0.5))
    # the better is made likelier, the worse less likely, by half as much of the doubt
    assert losses.grad is not None
    assert losses.grad.flatten().tolist() == pytest.approx([1 + doubt, -0.5 * doubt])


def test_losses_of_single_rows_come_out_of_their_weighted_mean():
    scale, own = torch.tensor(2.0, requires_grad=True), torch.tensor([1.0, 2.0, 4.0])

    def mean_loss(rows: Tensor, weights: Tensor) -> Tensor:
        return (scale * own[rows] * weights).mean() + 7 * scale

    losses, beside = losses_of_rows(mean_loss, torch.arange(3))
    assert losses.tolist() == pytest.approx([2.0, 4.0, 8.0]) and beside.item() == pytest.approx(14.0)
    (gradient,) = torch.autograd.grad(losses[2] + beside, scale)
    assert gradient.item() == pytest.approx(11.0)


def test_the_first_segment_of_a_pair_is_the_better():
    worth = np.repeat(np.array([0.2, 0.9, np.nan, 0.25, 0.5], np.float32), [3, 5, 4, 2, 3])
    episodes = np.repeat(np.arange(5), [3, 5, 4, 2, 3])
    pairs = SegmentPairs(worth, episodes)
    assert pairs.length == 2, "as long as the shortest episode"
    drawn = pairs.draw(200, np.random.default_rng(0))
    assert drawn.shape == (200, 2, 2) and (np.diff(drawn) == 1).all()
    assert (worth[drawn[:, 0]] - worth[drawn[:, 1]] >= 0.1).all(), "and .25 against .2 says nothing"
    assert (episodes[drawn[..., 0]] == episodes[drawn[..., 1]]).all()
    assert {int(number) for number in np.unique(episodes[drawn])} == {0, 1, 3, 4}
    with pytest.raises(UsageError, match=r"no two are 0\.1 apart"):
        SegmentPairs(np.full(6, 0.5, np.float32), np.repeat([0, 1], 3))
