import numpy as np

from rlvlm.core.steps import Transitions
from rlvlm.rewards.environment import EnvironmentReward, SuccessReward
from rlvlm.rewards.source import Labelling


def test_each_source_gives_its_own_column_and_never_changes() -> None:
    wide, flat = np.zeros((2, 3), np.float32), np.zeros(2, np.float32)
    batch = Transitions(
        obs=wide,
        actions=wide,
        next_obs=wide,
        terminated=flat,
        snapshots=wide,
        env_rewards=np.array([0.5, 7.0], np.float32),
        success=np.array([0.0, 1.0], np.float32),
    )
    np.testing.assert_array_equal(EnvironmentReward().label(batch), [0.5, 7.0])
    np.testing.assert_array_equal(SuccessReward().label(batch), [0.0, 1.0])
    for source in (EnvironmentReward(), SuccessReward()):
        assert (source.labelling, source.version) == (Labelling.ON_ARRIVAL, 0)
