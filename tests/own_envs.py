"""Small Gymnasium envs as users write them: a dense reward, no `info["progress"]`, no script, no goal phrase."""

from typing import Any

import gymnasium as gym
import numpy as np


class Reach(gym.Env[Any, Any]):
    """A point is moved to the middle of a square; the image is the brighter, the nearer it is."""

    metadata = {"render_modes": ["rgb_array"]}
    num_dims = 2

    def __init__(self, render_mode: str = "rgb_array") -> None:
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (self.num_dims,), np.float32)
        self.action_space = gym.spaces.Box(-2.0, 2.0, (self.num_dims,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, self.num_dims)
        return self.place.astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place = np.clip(self.place + 0.1 * action, -1, 1)
        return self.place.astype(np.float32), self.reward(), False, False, {}

    def reward(self) -> float:
        return -float(np.linalg.norm(self.place))

    def render(self) -> Any:
        # the corner is sqrt(2) away
        return np.full((48, 48, 3), round(250 + 170 * self.reward()), np.uint8)


class Balance(Reach):
    """A cart on a line, whose script knows what to do; reaching the middle is a success."""

    num_dims = 1

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *ends, _ = super().step(action)
        return obs, reward, *ends, {"success": reward > -0.05}

    def scripted_action(self, obs: Any) -> Any:
        return np.clip(-3 * obs, -2, 2)


class Grey(Reach):
    """Gives the same reward for everything."""

    def reward(self) -> float:
        return 0.0


def brightness(images: Any, goal: str) -> Any:
    """A judge of one's own."""
    return images.mean(axis=(1, 2, 3)) / 255


for _name, _class in {"OwnReach-v0": Reach, "OwnBalance-v0": Balance, "OwnGrey-v0": Grey}.items():
    gym.register(_name, entry_point=_class, max_episode_steps=30)
