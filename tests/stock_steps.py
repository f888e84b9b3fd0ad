"""Random actions, and an env held to the stock env step by step."""

import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS

from rlvlm.core.steps import FloatArray
from rlvlm.envs.metaworld.env import MetaWorldEnv


def actions(num_steps: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).uniform(-1, 1, (num_steps, 4)).astype(np.float32)


def assert_steps_are_the_stock_ones(
    world: MetaWorldEnv, env_name: str, num_steps: int, hand_start: tuple[float, ...] | None = None
) -> None:
    """Observations, rewards and success of an episode agree to the bit with those of a stock env of the same start."""
    world.reset()
    stock = ALL_V3_ENVIRONMENTS[env_name]()
    stock._set_task_called, stock._last_rand_vec = True, world.get_state()["stock._last_rand_vec"]
    if hand_start is not None:
        stock.hand_init_pos = np.array(hand_start)
    stock.reset()
    for index, action in enumerate(actions(num_steps)):
        obs, reward, _, _, info = world.step(action)
        stock_obs, stock_reward, _, _, stock_info = stock.step(action)
        # the stock env's first observation is of the previous placement, and it is stacked once more
        known = slice(None) if index else slice(18)
        np.testing.assert_array_equal(obs[known], stock_obs.astype(np.float32)[known])
        assert reward == stock_reward
        assert info["success"] == bool(stock_info["success"])
