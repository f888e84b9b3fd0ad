import numpy as np
import psutil
import pytest
import torch
from numbered import rows

from rlvlm.algorithms.sac_pebble.replay import Replay


def fill(replay, first, count):
    replay.add(rows(first, count), np.arange(first, first + count, dtype=np.float32) * 10)


def test_the_sixth_row_of_a_replay_of_four_takes_the_second_place():
    replay = Replay(4)
    for first, count in ((0, 3), (3, 3)):
        fill(replay, first, count)
    assert len(replay) == 4
    assert replay.rewards.tolist() == [40, 50, 20, 30]
    assert replay.transitions(slice(0, 4)).obs[:, 0].tolist() == [4, 5, 2, 3]
    assert replay.transitions(slice(0, 4)).env_rewards.tolist() == [4.5, 5.5, 2.5, 3.5]


@pytest.mark.parametrize("capacity", [1, 7, 1024, 1500, 5000])
def test_it_holds_the_newest_rows_in_ring_order_for_any_chunks(capacity):
    rng, replay, total = np.random.default_rng(capacity), Replay(capacity), 0
    while total < 3 * capacity:
        count = int(rng.integers(1, max(2, min(capacity, 600))))
        fill(replay, total, count)
        total += count
        expected = np.full(capacity, np.nan)
        for row in range(max(0, total - capacity), total):
            expected[row % capacity] = row
        expected = expected[~np.isnan(expected)].astype(np.float32)
        assert len(replay) == min(total, capacity)
        stored = replay.transitions(slice(0, len(replay)))
        np.testing.assert_array_equal(stored.obs[:, 0], expected)
        np.testing.assert_array_equal(stored.snapshots[:, 0], expected + np.float32(0.6))
        np.testing.assert_array_equal(replay.rewards.numpy(), expected * 10)


def test_a_drawn_batch_keeps_its_rows_together_and_takes_other_rewards_when_given():
    replay = Replay(100)
    fill(replay, 0, 50)
    chosen = torch.tensor([3, 3, 41])
    batch = replay.draw(chosen)
    assert batch.obs[:, 0].tolist() == [3, 3, 41]
    assert batch.rewards.tolist() == [30, 30, 410]
    assert torch.equal(batch.obs_and_actions, torch.cat((batch.obs, batch.actions), 1))
    torch.testing.assert_close(batch.next_obs[:, 0], chosen + 0.3)
    assert replay.draw(chosen, torch.ones(3)).rewards.tolist() == [1, 1, 1]
    assert replay.rewards[3] == 30


def test_rows_take_memory_when_they_are_written_and_are_never_moved(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # as the algorithm sets it
    replay, own = Replay(20_000_000), psutil.Process()
    before = own.memory_info().rss
    fill(replay, 0, 10)
    assert replay.get_state()["columns"]["obs"].shape == (10, 2)
    table = replay._table.data_ptr()
    fill(replay, 10, 100_000)
    assert replay._table.data_ptr() == table
    assert replay._table.nbytes > 500e6 > 100e6 > own.memory_info().rss - before
