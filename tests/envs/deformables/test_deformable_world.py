from pathlib import Path

import numpy as np
import pytest

from rlvlm.envs.config import EnvConfig
from rlvlm.envs.deformables.goals import DEFORMABLE_GOALS
from rlvlm.envs.deformables.straighten_rope import make_straighten_rope
from rlvlm.envs.registry import make_world, task_goal
from rlvlm.errors import NumericsError


def test_an_action_that_is_not_finite_is_refused() -> None:
    world = make_straighten_rope(EnvConfig(), 0)
    with pytest.raises(NumericsError, match="finite"):
        world.step(np.full(8, np.nan, np.float32))


def test_a_simulation_that_diverges_is_an_error_and_not_a_new_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log where it is
    world = make_straighten_rope(EnvConfig(), 0)
    state = world.get_state()
    velocities = slice(1 + 123, 1 + 2 * 123)
    state["physics"][velocities] = 1e11  # beyond MuJoCo's limit
    world.set_state(state)
    with pytest.raises(NumericsError, match="diverged"):
        world.step(np.zeros(8, np.float32))
    world.reset()
    world.step(np.zeros(8, np.float32))


def test_an_episode_ends_at_the_time_limit_without_being_over() -> None:
    world = make_straighten_rope(EnvConfig(episode_steps=2), 0)
    assert [world.step(np.zeros(8, np.float32))[2:4] for _ in range(2)] == [(False, False), (False, True)]


def test_snapshots_of_another_shape_are_refused() -> None:
    world = make_straighten_rope(EnvConfig(), 0)
    with pytest.raises(ValueError, match=r"\[N, 123\]"):
        world.draw(world.snapshot(), 64)


@pytest.mark.parametrize("task", DEFORMABLE_GOALS)
def test_worlds_know_their_goal(task: str) -> None:
    assert make_world(task, EnvConfig(), 0).goal == task_goal(task) == DEFORMABLE_GOALS[task][0]


@pytest.mark.parametrize("task", DEFORMABLE_GOALS)
def test_snapshots_with_equal_keys_look_the_same_to_the_bit(task: str) -> None:
    world = make_world(task, EnvConfig(), 0)
    grain = 0.25e-3
    exact = np.rint(world.snapshot() / grain) * np.float32(grain)
    nearly = exact + np.random.default_rng(0).uniform(-0.4, 0.4, exact.shape).astype(np.float32) * np.float32(grain)
    both = np.stack([exact, nearly])
    np.testing.assert_array_equal(*world.picture_key(both))
    np.testing.assert_array_equal(*world.draw(both, 300))
