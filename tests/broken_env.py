"""A task whose env breaks after some steps: what a sweep does with a run that fails."""

from typing import Any

from rlvlm.envs.registry import Task
from rlvlm.testing import TinyEnv


class BrokenEnv(TinyEnv):
    """A TinyEnv whose fourth episode cannot be started."""

    def reset(self, **options: Any) -> Any:
        """As ever, three times."""
        self.starts = getattr(self, "starts", 0) + 1
        if self.starts > 3:
            raise RuntimeError("the table has collapsed")
        return super().reset(**options)


BROKEN = Task(name="broken", goal=TinyEnv.goal, maker="broken_env:BrokenEnv")
