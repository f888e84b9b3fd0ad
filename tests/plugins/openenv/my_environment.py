"""An environment of OpenEnv with a lamp to make brighter."""

import numpy as np
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Press(Action):
    brighter: bool


class Level(Observation):
    level: int


class LampEnvironment(Environment[Press, Level, State]):
    def reset(self, seed=None, episode_id=None, **_):
        self._reset_rubric()
        self._level, self._state = 4, State(step_count=0)
        return Level(level=4)

    def step(self, action, timeout_s=None, **_):
        self._level += 1 if action.brighter else -1
        self._state.step_count += 1
        seen = Level(level=self._level, done=self._state.step_count == 4)
        seen.reward = self._apply_rubric(action, seen)
        return seen

    @property
    def state(self):
        return self._state


def image_of(observation):
    return np.full((8, 8, 3), round(255 * observation.level / 8), np.uint8)
