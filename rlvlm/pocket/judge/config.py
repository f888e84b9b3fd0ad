"""What the pocket judge knows, and how one is distilled; imports nothing heavy, so the command line starts at once."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


def trained_tasks() -> list[str]:
    """The tasks that the judge which ships was trained and evaluated on, sorted."""
    return sorted({row["task"] for row in json.loads((Path(__file__).parent / "evaluation.json").read_bytes())})


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """How a student is made."""

    start: Literal["shipped", "scratch"] = "shipped"
    """shipped: go on from the pocket judge's own weights; scratch: from random ones, with its tokenizer."""
    judge: str = ""
    """Part of the teacher's name, where the store has several."""
    prompt: str = ""
    """Part of the name of the teacher's prompt, likewise."""
    steps: int = 300
    """Steps of optimisation."""
    num_pairs: int = 24
    """Labels per step; each is shown in both orders."""
    lr: float = 5e-4
    """AdamW's highest step size."""
    held_out: float = 0.1
    """Share of the images that the student never sees; labels that show one are what it is graded on."""
    graded: int = 600
    """Labels that it is graded on, at most."""
    seed: int = 0
    """Of the draws, and of the weights from scratch."""
    threads: int = 1
    """CPU threads."""

    def __post_init__(self) -> None:
        for name in ("steps", "num_pairs", "graded", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be in (0, 1), got {self.held_out}")
        if self.lr <= 0:
            raise ValueError(f"lr must be > 0, got {self.lr}")
