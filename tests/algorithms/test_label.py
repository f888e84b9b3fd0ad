import numpy as np
import pytest
import torch
from numbered import rows

from rlvlm.algorithms.label import label_on_arrival, label_on_draw, relabel
from rlvlm.algorithms.replay import Replay
from rlvlm.errors import NumericsError
from rlvlm.rewards.source import Labelling


class Scaled:
    """A source whose reward is its scale times the row's number."""

    def __init__(self, scale, labelling=Labelling.ON_CHANGE):
        self.scale, self.labelling, self.version = scale, labelling, 0

    def label(self, transitions):
        return transitions.obs[:, 0] * self.scale


def test_three_rows_labelled_by_hand():
    assert label_on_arrival(rows(1, 3), Scaled(2.0)).tolist() == [2, 4, 6]


def test_a_moving_source_labels_at_the_draw_and_never_on_arrival():
    source, replay = Scaled(3.0, Labelling.ON_DRAW), Replay(10)
    arrived = label_on_arrival(rows(0, 10), source)
    assert np.isnan(arrived).all()
    replay.add(rows(0, 10), arrived)
    assert label_on_draw(replay, torch.tensor([4, 7]), source).tolist() == [12, 21]
    assert label_on_draw(replay, torch.tensor([4, 7]), Scaled(3.0)) is None


def test_relabelling_reaches_every_row_after_wrap_around_and_leaves_the_true_rewards():
    replay = Replay(5000)
    for first in range(0, 8000, 1000):
        replay.add(rows(first, 1000), np.zeros(1000, np.float32))
    truth = replay.transitions(slice(0, 5000)).env_rewards.copy()
    relabel(replay, Scaled(-1.0))
    np.testing.assert_array_equal(replay.rewards.numpy(), -replay.transitions(slice(0, 5000)).obs[:, 0])
    np.testing.assert_array_equal(replay.transitions(slice(0, 5000)).env_rewards, truth)
    assert replay.rewards.min() == -7999


def test_a_reward_that_is_not_finite_stops_the_run():
    with pytest.raises(NumericsError, match="Scaled gave 3 rewards"):
        label_on_arrival(rows(1, 3), Scaled(np.inf))
