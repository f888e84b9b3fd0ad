"""A lamp to make brighter, as a Gymnasium env whose image a judge of brightness understands."""

import gymnasium as gym
import numpy as np


class Lamp(gym.Env):
    """Two actions, darker and brighter; the reward is the lamp's level after the step, in [0, 1].

    The observation names the level and is no number: a critic would learn random rewards first where numbers are large,
    and a policy would follow it there.
    """

    observation_space = gym.spaces.Box(0, 1, (9,), np.float32)
    action_space = gym.spaces.Discrete(2)
    render_mode = "rgb_array"
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, num_steps: int = 8) -> None:
        self._num_steps = num_steps

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._level, self._t = int(self.np_random.integers(3, 6)), 0
        return self._observation(), {}

    def step(self, action):
        self._level, self._t = int(np.clip(self._level + 2 * int(action) - 1, 0, 8)), self._t + 1
        return self._observation(), self._level / 8, False, self._t == self._num_steps, {}

    def render(self):
        return np.full((8, 8, 3), round(255 * self._level / 8), np.uint8)

    def _observation(self):
        return np.eye(9, dtype=np.float32)[self._level]
