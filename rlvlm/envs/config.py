"""Configuration of an env; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig:
    """How a task's world is set up."""

    start: Literal["fixed", "random"] = "fixed"
    """fixed: the paper's start, near the object; random: the stock start positions, drawn anew each episode."""
    robot: Literal["hidden", "visible"] = "hidden"
    """Whether pictures show the robot; the paper hides it because the arm covers the object."""
    episode_steps: int = 250
    """Env steps per episode, >= 1; the limit is a truncation, not an end."""
    num_envs: int = 1
    """Worlds stepped side by side, >= 1."""

    def __post_init__(self) -> None:
        if self.episode_steps < 1:
            raise ValueError(f"episode_steps must be >= 1, got {self.episode_steps}")
        if self.num_envs < 1:
            raise ValueError(f"num_envs must be >= 1, got {self.num_envs}")
