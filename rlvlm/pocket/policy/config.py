"""How the pocket policy is trained; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass
from pathlib import Path

from rlvlm.vlms.shipped import weights_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the pocket policy is made."""

    out: Path = weights_folder("policy")
    """Folder of the finished weights; replaced as a whole."""
    start: Path | None = None
    """Folder of weights to go on from, with their tokenizer; none begins with random ones."""
    tasks: tuple[str, ...] = ()
    """Tasks to teach; none means all."""
    seed: int = 0
    """Of moments, weights and batches."""
    moments: int = 3_000
    """Moments of play per task of share 1."""
    held_out: int = 300
    """Moments per task of share 1, of other episodes, that reading is checked on."""
    seeing_steps: int = 2_000
    """Steps that train the vision encoder alone, at most; 0 leaves it as it is."""
    seen_enough: float = 0.997
    """Share of held-out values read rightly in every task that ends the vision encoder's training early."""
    talking_steps: int = 600
    """Steps that train the language model on what the vision encoder, by then fixed, tells it."""
    batch: int = 32
    """Moments per step."""
    lr: float = 1.5e-3
    """AdamW's highest step size, Muon's is twice that; it warms up, holds, and falls to zero."""
    threads: int = 1
    """CPU threads."""
    save_every_steps: int = 200
    """Steps between saves while talking, so that a run that is cut short leaves weights."""

    def __post_init__(self) -> None:
        for name in ("moments", "held_out", "talking_steps", "batch", "threads", "save_every_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.seeing_steps < 0 or (self.seeing_steps == 0 and self.start is None):
            raise ValueError("seeing_steps must be >= 1, or 0 to go on from a trained vision encoder with --start DIR")
