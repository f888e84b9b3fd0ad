import numpy as np

from rlvlm import metrics
from rlvlm.algorithms.tally import Tally


def test_counts_and_means_by_hand():
    tally = Tally()
    tally.take_in(4, [])
    assert metrics.TRAIN_EPISODE_RETURN not in tally.report(), "no episode has ended: there is nothing to average"
    tally.take_in(4, [(1.0, False), (5.0, True)])
    report = tally.report()
    assert (report[metrics.ENV_STEPS], report[metrics.EPISODES], report[metrics.TRAIN_EPISODE_RETURN]) == (8, 2, 3)
    assert report[metrics.TRAIN_EPISODE_SUCCESS] == 0.5
    tally.take_in(2, [(9.0, True)] * 10)  # only the last ten episodes count
    assert tally.report()[metrics.TRAIN_EPISODE_RETURN] == 9 and tally.report()[metrics.EPISODES] == 12


def test_rewards_are_told_per_episode_and_what_has_none_is_counted():
    tally, lacking = Tally(), np.array([1.0, np.nan, 2.0, np.nan], np.float32)
    tally.note_rewards(np.array([1.0, 2.0, 3.0, 4.0], np.float32), episode_steps=2, leaves_out=True)
    tally.note_rewards(lacking, episode_steps=2, leaves_out=True)
    assert tally.report()[metrics.TRAIN_LEARNED_RETURN] == 5 and tally.report()[metrics.TRAIN_LEFT_OUT] == 2
    still = Tally()
    still.note_rewards(lacking, episode_steps=2, leaves_out=False)
    assert not still.report().keys() & {metrics.TRAIN_LEARNED_RETURN, metrics.TRAIN_LEFT_OUT}


def test_a_restored_tally_is_the_same():
    tally, other = Tally(), Tally()
    tally.take_in(3, [(3.0, True)])
    tally.note({"reward_model/loss": 0.5})
    other.load_tree(tally.save_tree())
    assert other.report() == tally.report() and other.env_steps == 3
