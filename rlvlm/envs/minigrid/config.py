"""Settings of MiniGrid's envs."""

from dataclasses import dataclass

from rlvlm.envs.config import TurnEnvConfig


@dataclass(frozen=True, kw_only=True)
class MiniGridConfig(TurnEnvConfig):
    """Settings of MiniGrid."""

    shows_text: bool = False
    """Whether the prompt states the mission, the direction and the carried object, which images do not show."""
    prompt_last_action: bool = False
    """Whether the prompt states the last action, and whether it changed anything. Without it a greedy policy repeats
    forever an action without effect."""
