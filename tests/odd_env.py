"""A task whose reward is no number from some step on: what a run does when numbers break."""

import math
from typing import Any

from rlvlm.envs.registry import Task
from rlvlm.testing import TinyEnv


class OddEnv(TinyEnv):
    """A TinyEnv whose reward is lost in its eighth episode."""

    def reset(self, **options: Any) -> Any:
        self.starts = getattr(self, "starts", 0) + 1
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, (math.nan if self.starts > 7 else reward), *rest


ODD = Task(name="odd", goal=TinyEnv.goal, maker="odd_env:OddEnv")
