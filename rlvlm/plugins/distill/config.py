"""Settings of `rlvlm distill`; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rlvlm.core.checks import Bound, PositiveFloat, PositiveInt, check_bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """Training of a pocket judge on another judge's answers: `rlvlm distill`."""

    start: Literal["shipped", "scratch"] = "shipped"
    """Initial weights. shipped: the pocket judge's own; scratch: random ones, with its tokenizer."""
    judge: str = ""
    """Part of the teacher's name, needed if the store has several."""
    prompt: str = ""
    """Part of the name of the teacher's prompt, needed if the store has several."""
    steps: PositiveInt = 300
    """Optimisation steps."""
    num_pairs: PositiveInt = 24
    """Labels per step; each is shown in both orders."""
    lr: PositiveFloat = 5e-4
    """Peak learning rate of AdamW."""
    held_out: Annotated[float, Bound("(0, 1)")] = 0.1
    """Share of the images held out from training, in (0, 1); labels that show one of them grade the student."""
    graded: PositiveInt = 600
    """Maximum number of labels that grade the student."""
    seed: int = 0
    """Seed of the draws, and of the weights from scratch."""
    threads: PositiveInt = 1
    """CPU threads."""

    def __post_init__(self) -> None:
        check_bounds(self, "--")
