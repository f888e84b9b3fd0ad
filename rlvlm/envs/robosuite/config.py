"""Settings of envs on robosuite, and those shared with LIBERO."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

from rlvlm.core.checks import Bound, PositiveInt
from rlvlm.envs.config import EnvConfig, TurnEnvConfig


@dataclass(frozen=True, kw_only=True)
class PhysicsConfig(EnvConfig):
    """Settings of every env on robosuite, of any kind."""

    physics: Literal["exact", "fast"] = "exact"
    """Simulation step in training. exact: the benchmark's 2 ms; fast: 5 ms, twice the speed and slightly different
    movements. Evaluations and demonstrations always use exact."""

    def for_demonstrations(self) -> Self:
        """See `EnvConfig`; uses exact physics."""
        return replace(super().for_demonstrations(), physics="exact")


@dataclass(frozen=True, kw_only=True)
class PickPlaceConfig(TurnEnvConfig, PhysicsConfig):
    """Settings of robosuite's task in turns."""

    has_split: ClassVar[bool] = False
    shows_text: bool = False
    """Whether the prompt states the hand's position."""
    move_ticks: PositiveInt = 4
    """Control ticks, of 50 ms, per move of the hand, >= 1. The reference has 1, and episodes of hundreds of turns."""
    second_view: bool = False
    """Whether the image also shows, to the right of the wrist's view, the bin from the robot's base. At the start the
    wrist camera misses four cans in ten."""
    view_px: Annotated[int, Bound("[32, 1024]")] = 256
    """Side of each view, pixels, in [32, 1024]. The reference has 256; half of that takes two thirds of the time to
    draw."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draw_path and not self.second_view:
            raise ValueError("env.draw_path needs env.second_view: the camera at the wrist moves with the hand")
        if self.split != "all" or self.prompt:
            raise ValueError(
                f"env.split {self.split} and env.prompt {self.prompt or 'empty'}: the can lies anywhere, so no starts "
                "are held out, and the words of this prompt are fixed; leave both out"
            )
