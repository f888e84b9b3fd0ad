import numpy as np

from rlvlm.algorithms.training_stats import RewardSignalMonitor, TrainingStats
from rlvlm.core import metrics


def test_counts_and_means_by_hand():
    stats = TrainingStats()
    stats.record(4, [])
    assert metrics.TRAIN_EPISODE_RETURN not in stats.report(), "no episode has ended: there is nothing to average"
    stats.record(4, [(1.0, False), (5.0, True)])
    report = stats.report()
    assert (report[metrics.ENV_STEPS], report[metrics.EPISODES], report[metrics.TRAIN_EPISODE_RETURN]) == (8, 2, 3)
    assert report[metrics.TRAIN_EPISODE_SUCCESS] == 0.5
    stats.record(2, [(9.0, True)] * 10)  # only the last ten episodes count
    assert stats.report()[metrics.TRAIN_EPISODE_RETURN] == 9 and stats.report()[metrics.EPISODES] == 12


def test_rewards_are_reported_per_episode_and_missing_ones_are_counted():
    stats, lacking = TrainingStats(), np.array([1.0, np.nan, 2.0, np.nan], np.float32)
    stats.note_rewards(np.array([1.0, 2.0, 3.0, 4.0], np.float32), num_ended=2, leaves_out=True)
    stats.note_rewards(lacking, num_ended=2, leaves_out=True)
    assert stats.report()[metrics.TRAIN_LEARNED_RETURN] == 5 and stats.report()[metrics.TRAIN_LEFT_OUT] == 2
    still = TrainingStats()
    still.note_rewards(lacking, num_ended=2, leaves_out=False)
    assert not still.report().keys() & {metrics.TRAIN_LEARNED_RETURN, metrics.TRAIN_LEFT_OUT}


def test_the_learned_return_is_that_of_episodes_however_short_they_are():
    stats, ones = TrainingStats(), np.ones(100, np.float32)
    stats.note_rewards(ones, num_ended=20, leaves_out=False)  # five steps each, of the 200 there could have been
    assert stats.report()[metrics.TRAIN_LEARNED_RETURN] == 5
    stats.note_rewards(ones[:30], num_ended=0, leaves_out=False)  # a long one goes on into the next round
    stats.note_rewards(ones[:20], num_ended=1, leaves_out=False)
    assert stats.report()[metrics.TRAIN_LEARNED_RETURN] == 50


def rewards(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def test_a_reward_that_never_changes_is_reported_once(caplog):
    monitor = RewardSignalMonitor()
    monitor.check({"step": rewards(0.5, np.nan, 0.5)}, 39)
    assert not caplog.records, "too early to say"
    for _ in range(3):
        monitor.check({"step": rewards(0.5)}, 1)
    [record] = caplog.records
    assert record.getMessage().startswith("every step of the first 40 episodes has the same reward, 0.5:")


def test_rewards_that_differ_once_are_a_signal(caplog):
    monitor = RewardSignalMonitor()
    monitor.check({"step": rewards(0, 0)}, 10)
    monitor.check({"step": rewards(1)}, 1)
    monitor.check({"step": rewards(*[0] * 100)}, 100)
    assert not caplog.records


def test_episodes_that_all_earn_the_same_are_no_signal_though_their_steps_differ(caplog):
    monitor = RewardSignalMonitor()
    for _ in range(2):
        monitor.check({"step": rewards(0, 0.5, 0, 0, 0.5), "episode": rewards(0.5, 0.5)}, 20)
    assert "every episode of the first 40" in caplog.text


def test_rewards_that_do_not_exist_are_not_equal(caplog):
    monitor = RewardSignalMonitor()
    monitor.check({"step": rewards(np.nan, np.nan)}, 100)  # as while exploring by novelty, which labels at the draw
    assert not caplog.records
