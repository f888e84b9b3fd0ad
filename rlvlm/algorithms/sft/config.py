"""How a policy is taught by demonstrations; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """Supervised fine-tuning on a scripted expert's turns, in the process of the run that goes on with PPO."""

    turns: int = 256
    """Demonstrated turns, those held out included; 0 goes without this stage."""
    p_wrong: float = 0.0
    """Probability in [0, 1) that a demonstrated action is replaced by another legal one; leaves PPO something to do."""
    updates: int = 80
    """Steps of the optimiser."""
    batch_turns: int = 32
    """Turns per step."""
    lr: float = 1e-3
    """Largest step size of Adam; it rises over the first tenth of the updates and then falls to 0."""
    held_out: float = 0.1
    """Share of the demonstrated episodes that is kept for validation, in [0, 1)."""
    max_grad_norm: float = 1.0
    """Larger gradients are scaled down to this norm."""

    def __post_init__(self) -> None:
        for name in ("p_wrong", "held_out"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"sft.{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("updates", "batch_turns", "lr", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"sft.{name} must be > 0, got {getattr(self, name)}")
        if self.turns < 0:
            raise ValueError(f"sft.turns must be >= 0, got {self.turns}; 0 goes without demonstrations")
