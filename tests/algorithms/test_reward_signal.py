import numpy as np
import pytest

from rlvlm.algorithms.reward_signal import RewardSignalMonitor


def rewards(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def test_a_reward_that_never_changes_is_reported_once(caplog: pytest.LogCaptureFixture):
    monitor = RewardSignalMonitor()
    monitor.check({"step": rewards(0.5, np.nan, 0.5)}, 39)
    assert not caplog.records, "too early to say"
    for _ in range(3):
        monitor.check({"step": rewards(0.5)}, 1)
    [record] = caplog.records
    assert record.getMessage().startswith("every step of the first 40 episodes has the same reward, 0.5:")


def test_rewards_that_differ_once_are_a_signal(caplog: pytest.LogCaptureFixture):
    monitor = RewardSignalMonitor()
    monitor.check({"step": rewards(0, 0)}, 10)
    monitor.check({"step": rewards(1)}, 1)
    monitor.check({"step": rewards(*[0] * 100)}, 100)
    assert not caplog.records


def test_episodes_that_all_earn_the_same_are_no_signal_though_their_steps_differ(caplog: pytest.LogCaptureFixture):
    monitor = RewardSignalMonitor()
    for _ in range(2):
        monitor.check({"step": rewards(0, 0.5, 0, 0, 0.5), "episode": rewards(0.5, 0.5)}, 20)
    assert "every episode of the first 40" in caplog.text


def test_rewards_that_do_not_exist_are_not_equal(caplog: pytest.LogCaptureFixture):
    monitor = RewardSignalMonitor()
    monitor.check({"step": rewards(np.nan, np.nan)}, 100)  # as while exploring by novelty, which labels at the draw
    assert not caplog.records


def test_what_was_seen_outlives_a_checkpoint(caplog: pytest.LogCaptureFixture):
    monitor, again = RewardSignalMonitor(), RewardSignalMonitor()
    monitor.check({"step": rewards(2)}, 30)
    again.set_state(monitor.get_state())
    again.check({"step": rewards(2)}, 10)
    assert "first 40 episodes" in caplog.text
