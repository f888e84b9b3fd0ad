"""Settings of gym-cards."""

from dataclasses import dataclass
from typing import Literal

from rlvlm.envs.config import TurnEnvConfig


@dataclass(frozen=True, kw_only=True)
class CardsConfig(TurnEnvConfig):
    """Settings of gym-cards."""

    deals: Literal["any", "solvable"] = "any"
    """Deals of games that may be impossible to win: any, as the reference deals, or solvable ones only."""
