import numpy as np
import pytest

from rlvlm.core.errors import NumericsError
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.deformables.goals import DEFORMABLE_GOALS
from rlvlm.envs.deformables.straighten_rope import make_straighten_rope
from rlvlm.envs.registry import make_env, task_goal


def test_a_simulation_that_diverges_is_an_error_and_not_a_new_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log where it is
    env = make_straighten_rope(StepEnvConfig(), 0)
    state = env.get_state()
    velocities = slice(1 + 123, 1 + 2 * 123)
    state["physics"][velocities] = 1e11  # beyond MuJoCo's limit
    env.set_state(state)
    with pytest.raises(NumericsError, match="diverged"):
        env.step(np.zeros(8, np.float32))
    env.reset()
    env.step(np.zeros(8, np.float32))
    with pytest.raises(NumericsError, match="finite"):
        env.step(np.full(8, np.nan, np.float32))


def test_an_episode_ends_at_the_time_limit_without_being_over_and_odd_snapshots_are_refused():
    env = make_straighten_rope(StepEnvConfig(episode_steps=2), 0)
    assert [env.step(np.zeros(8, np.float32))[2:4] for _ in range(2)] == [(False, False), (False, True)]
    with pytest.raises(ValueError, match=r"\[N, 123\]"):
        env.draw(env.snapshot(), 64)


@pytest.mark.parametrize("task", DEFORMABLE_GOALS)
def test_envs_know_their_goal_and_snapshots_with_equal_keys_look_the_same_to_the_bit(task):
    env = make_env(task, StepEnvConfig(), 0)
    assert env.goal == task_goal(task) == DEFORMABLE_GOALS[task][0]
    grain = 0.25e-3
    exact = np.rint(env.snapshot() / grain) * np.float32(grain)
    nearly = exact + np.random.default_rng(0).uniform(-0.4, 0.4, exact.shape).astype(np.float32) * np.float32(grain)
    both = np.stack([exact, nearly])
    np.testing.assert_array_equal(*env.image_key(both))
    np.testing.assert_array_equal(*env.draw(both, 300))
