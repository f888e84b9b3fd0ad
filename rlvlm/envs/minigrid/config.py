"""Settings of MiniGrid's envs."""

from dataclasses import dataclass

from rlvlm.envs.config import TurnEnvConfig


@dataclass(frozen=True, kw_only=True)
class MiniGridConfig(TurnEnvConfig):
    """MiniGrid."""

    shows_text: bool = False
    """Whether the prompt states the mission, the direction and what is carried, which no image shows."""
    prompt_last_action: bool = False
    """Whether the prompt states the last action, and whether it changed anything. A greedy policy that is not given it
    repeats forever what changes nothing."""
