import numpy as np
import pytest
import torch
from numbered import rows

from rlvlm.algorithms.sac_pebble.label import Relabelling, add_labelled, label_on_arrival, label_on_draw
from rlvlm.algorithms.sac_pebble.replay import Replay
from rlvlm.core.errors import NumericsError
from rlvlm.rewards.source import Labelling


class Scaled:
    """A source whose reward is its scale times the row's number."""

    def __init__(self, scale, labelling=Labelling.ON_CHANGE):
        self.scale, self.labelling, self.version = scale, labelling, 0

    def label(self, transitions):
        return transitions.obs[:, 0] * self.scale

    def label_leading(self, transitions):
        return self.label(transitions)[:700]


def test_three_rows_labelled_by_hand():
    assert label_on_arrival(rows(1, 3), Scaled(2.0)).tolist() == [2, 4, 6]


def test_a_moving_source_labels_at_the_draw_and_never_on_arrival():
    source, replay = Scaled(3.0, Labelling.ON_DRAW), Replay(10)
    arrived = label_on_arrival(rows(0, 10), source)
    assert np.isnan(arrived).all()
    replay.add(rows(0, 10), arrived)
    assert label_on_draw(replay, torch.tensor([4, 7]), source).tolist() == [12, 21]
    assert label_on_draw(replay, torch.tensor([4, 7]), Scaled(3.0)) is None


def test_a_bonus_is_filed_without_its_weight_and_counts_at_the_draw():
    replay = Replay(10)
    add_labelled(replay, rows(1, 4), Scaled(2.0), bonus=Scaled(10.0))
    drawn = torch.tensor([0, 3])
    assert replay.rewards[drawn].tolist() == [2, 8] and replay.bonuses[drawn].tolist() == [10, 40]
    assert label_on_draw(replay, drawn, Scaled(2.0), bonus_weight=0.5).tolist() == [7, 28]
    assert label_on_draw(replay, drawn, Scaled(2.0), bonus_weight=0.25).tolist() == [4.5, 18]
    relabelling = Relabelling(replay)
    relabelling.start()
    relabelling.advance(Scaled(3.0), 1, Scaled(-1.0))
    assert label_on_draw(replay, drawn, Scaled(3.0), bonus_weight=0.5).tolist() == [2.5, 10]
    with pytest.raises(NumericsError):
        add_labelled(replay, rows(5, 1), Scaled(1.0), Scaled(np.inf))


def test_relabelling_reaches_every_row_after_wrap_around_and_leaves_the_true_rewards():
    replay = Replay(5000)
    for first in range(0, 8000, 1000):
        replay.add(rows(first, 1000), np.zeros(1000, np.float32))
    truth = replay.transitions(slice(0, 5000)).env_rewards.copy()
    relabelling = Relabelling(replay)
    relabelling.start()
    relabelling.advance(Scaled(-1.0), num_turns=1)
    np.testing.assert_array_equal(replay.rewards.numpy(), -replay.transitions(slice(0, 5000)).obs[:, 0])
    np.testing.assert_array_equal(replay.transitions(slice(0, 5000)).env_rewards, truth)
    assert replay.rewards.min() == -7999


def test_relabelling_goes_on_in_pieces_while_rows_arrive():
    replay = Replay(5000)
    replay.add(rows(1, 1500), np.zeros(1500, np.float32))
    relabelling, source = Relabelling(replay), Scaled(2.0)
    relabelling.advance(source)
    assert not replay.rewards.any(), "nothing was to be done"
    relabelling.start()
    relabelling.advance(source)
    assert np.count_nonzero(replay.rewards) == 700 and relabelling.num_waiting == 800
    replay.add(rows(1501, 100), label_on_arrival(rows(1501, 100), source))
    relabelling.advance(source)
    relabelling.advance(source)
    assert relabelling.num_waiting == 0
    np.testing.assert_array_equal(replay.rewards.numpy(), 2 * replay.transitions(slice(0, 1600)).obs[:, 0])


def test_the_rows_that_waited_longest_come_first_when_the_source_changes_again():
    replay = Replay(5000)
    replay.add(rows(1, 1500), np.zeros(1500, np.float32))
    relabelling = Relabelling(replay)
    relabelling.start()
    relabelling.advance(Scaled(2.0))
    relabelling.start()
    relabelling.advance(Scaled(3.0))
    relabelling.advance(Scaled(3.0))
    numbers = replay.transitions(slice(0, 1500)).obs[:, 0]
    np.testing.assert_array_equal(replay.rewards.numpy()[700:], 3 * numbers[700:])
    np.testing.assert_array_equal(replay.rewards.numpy()[:600], 2 * numbers[:600])
    assert relabelling.num_waiting == 700, "the tail is shorter than a piece"


def test_a_row_that_no_judge_could_label_never_enters_the_replay():
    class Unsure(Scaled):
        def label(self, transitions):
            rewards = super().label(transitions)
            return np.where(rewards == 4, np.nan, rewards)

    replay = Replay(10)
    rewards = add_labelled(replay, rows(1, 3), Unsure(2.0, Labelling.WHERE_ANSWERED))
    assert rewards.tolist()[::2] == [2, 6] and np.isnan(rewards[1])
    assert replay.rewards.tolist() == [2, 6] and replay.transitions(slice(0, 2)).obs[:, 0].tolist() == [1, 3]
    with pytest.raises(NumericsError):
        add_labelled(replay, rows(1, 3), Unsure(2.0))
    with pytest.raises(NumericsError):
        add_labelled(replay, rows(1, 3), Scaled(np.inf, Labelling.WHERE_ANSWERED))
    add_labelled(replay, rows(7, 2), Scaled(1.0, Labelling.ON_DRAW))
    assert len(replay) == 4 and np.isnan(replay.rewards[2:]).all(), "labelled at the draw"
