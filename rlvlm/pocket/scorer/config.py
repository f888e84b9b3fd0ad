"""How the pocket scorer is trained; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass
from pathlib import Path

from rlvlm.vlms.shipped import weights_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the pocket scorer is made."""

    out: Path = weights_folder("scorer")
    """Folder of the finished weights; replaced as a whole."""
    eyes: Path = weights_folder("policy")
    """Folder of a model of the same shapes, whose vision encoder reads the envs in turns already."""
    seed: int = 0
    """Of turns, pushes, weights and batches."""
    moves: int = 8_000
    """Turns played per task of share 1."""
    pushes: int = 2_500
    """Episodes of push_block; 0 teaches turns alone."""
    seeing_steps: int = 500
    """Steps that train the vision encoder; 0 leaves it as it is."""
    talking_steps: int = 500
    """Steps that train the language model on what the vision encoder, by then fixed, tells it."""
    batch: int = 48
    """Images per step of seeing, and turns per step of talking; half as many clips come on top."""
    lr: float = 1.5e-3
    """AdamW's highest step size, Muon's is twice that; it warms up, holds, and falls to zero."""
    threads: int = 1
    """CPU threads."""
    save_every_steps: int = 100
    """Steps between saves while talking, so that a run that is cut short leaves weights."""

    def __post_init__(self) -> None:
        for name in ("moves", "talking_steps", "batch", "threads", "save_every_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if min(self.seeing_steps, self.pushes) < 0:
            raise ValueError(f"need seeing_steps and pushes >= 0, got {self.seeing_steps} and {self.pushes}")
