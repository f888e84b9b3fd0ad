"""Settings of MetaWorld's envs."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from rlvlm.envs.config import StepEnvConfig


@dataclass(frozen=True, kw_only=True)
class MetaWorldConfig(StepEnvConfig):
    """Settings of MetaWorld."""

    robot: Literal["hidden", "visible"] = "hidden"
    """Whether images show the robot; the paper hides it because the arm covers the object."""

    def for_people(self) -> Self:
        """See `EnvConfig`; also shows the robot."""
        return replace(self, robot="visible")

    @property
    def start_words(self) -> str:
        return f"{super().start_words}robot {self.robot}, "
