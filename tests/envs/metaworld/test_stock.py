from typing import Any

import numpy as np
import pytest
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from stock_steps import actions, assert_steps_are_the_stock_ones

from rlvlm.envs.config import EnvConfig
from rlvlm.envs.metaworld.env import MetaWorldEnv
from rlvlm.envs.metaworld.goals import STOCK_GOALS
from rlvlm.envs.registry import find_task, make_env, task_goal
from rlvlm.testing import check_step_env


def make(name: str, seed: int = 0, **fields: Any) -> MetaWorldEnv:
    world = make_env(f"metaworld/{name}", EnvConfig(**{"episode_steps": 25, "robot": "visible", **fields}), seed)
    assert isinstance(world, MetaWorldEnv)
    return world


def test_every_stock_task_has_a_goal_in_words() -> None:
    assert STOCK_GOALS.keys() == ALL_V3_ENVIRONMENTS.keys()
    assert task_goal("metaworld/door-open-v3") == "open the door"
    assert find_task("metaworld/door-open-v3").goal_state == "the door is open"


@pytest.mark.slow
# one with two objects that measures no distance, one that notes its first step
@pytest.mark.parametrize(("name", "start"), [("hammer-v3", "fixed"), ("bin-picking-v3", "random")])
def test_they_are_envs(name: str, start: str) -> None:
    world = make(name, start=start)
    scenes = np.repeat(world.snapshot()[None], 3, axis=0)
    scenes[1, 1] += 0.3
    scenes[2, -1] += 0.1
    check_step_env(world, make(name, start=start), scenes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["door-open-v3", "stick-push-v3", "bin-picking-v3"])
def test_physics_and_reward_are_the_stock_ones(name: str) -> None:
    assert_steps_are_the_stock_ones(make(name, start="random", seed=3), name, 20)


@pytest.mark.slow
def test_the_fixed_start_is_one_of_the_stock_ones_and_the_same_in_every_run() -> None:
    starts = [make("box-close-v3", seed=seed).snapshot() for seed in (0, 1)]
    np.testing.assert_array_equal(*starts)
    random = [make("box-close-v3", seed=seed, start="random").snapshot() for seed in (0, 1)]
    assert not np.array_equal(*random)


def test_a_state_at_the_start_is_restored_in_the_middle_of_an_episode() -> None:
    # bin-picking notes the first step's distance in what is None at a start
    world, other = make("bin-picking-v3", start="random"), make("bin-picking-v3", start="random", seed=1)
    world.reset()
    state = world.get_state()
    future = [world.step(action)[:2] for action in actions(20)]
    for action in actions(5, seed=1):
        other.step(action)
    other.set_state(state)
    for (obs, reward), action in zip(future, actions(20), strict=True):
        again, other_reward, *_ = other.step(action)
        np.testing.assert_array_equal(again, obs)
        assert other_reward == reward


def test_progress_without_a_measured_distance_follows_the_door() -> None:
    world = make("door-open-v3")
    assert world.reset()[1]["progress"] == 0.0
    progress = []
    for angle in (0.0, -0.5, -1.0, -1.5):
        world._stock.data.joint("doorjoint").qpos = angle
        progress.append(world.step(np.zeros(4, np.float32))[4]["progress"])
    assert progress == sorted(progress) and progress[-1] > 0.8
