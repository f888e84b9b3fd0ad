"""The envs of the comparison. Everybody steps the same ones: rlvlm's own, which are ordinary Gymnasium envs."""

import gymnasium as gym
import numpy as np

from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.env import StepEnv
from rlvlm.envs.registry import Task, make_env

EPISODE_STEPS = {"pendulum": 200, "drawer_open": 250}


class Pendulum(StepEnv):
    """Gymnasium's Pendulum-v1 with actions in [-1, 1]; nobody draws it here."""

    goal = "hold the pendulum up"
    snapshot_size = 2

    def __init__(self, config: StepEnvConfig, seed: int) -> None:
        self._env = gym.make("Pendulum-v1", max_episode_steps=config.episode_steps)
        self.observation_space = self._env.observation_space
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._env.reset(seed=seed)

    def reset(self, *, seed=None, options=None):
        obs, _ = self._env.reset(seed=seed, options=options)
        return obs, self._info()

    def step(self, action):
        obs, reward, terminated, truncated, _ = self._env.step(2 * action)
        return obs, float(reward), terminated, truncated, self._info()

    def snapshot(self):
        return np.asarray(self._env.unwrapped.state, np.float32)

    def _info(self):
        return {"snapshot": self.snapshot(), "progress": 0.0, "success": False}

    def draw(self, snapshots, size_px):
        raise NotImplementedError

    def image_key(self, snapshots):
        raise NotImplementedError

    def get_state(self):
        raise NotImplementedError

    def set_state(self, state):
        raise NotImplementedError


PENDULUM = Task(name="pendulum", goal=Pendulum.goal, maker="envs:Pendulum")
TASKS = {"pendulum": "envs:PENDULUM", "drawer_open": "drawer_open"}


def make(name: str) -> StepEnv:
    """The env `name` with its time limit."""
    return make_env(TASKS[name], StepEnvConfig(episode_steps=EPISODE_STEPS[name]), seed=0)
