"""How a policy is taught by demonstrations; imports nothing heavy so that the command line starts at once."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """Supervised fine-tuning on a scripted expert's turns, in the process of the run that goes on with PPO."""

    turns: int = 256
    """Demonstrated turns, those held out included; 0 goes without this stage."""
    demonstrations: str = ""
    """Folder that `rlvlm collect` made, to learn from all of it; empty: the task's scripted expert plays `turns`."""
    start_from: str = ""
    """Folder that `rlvlm sft` made: the run takes its weights and teaches nothing itself."""
    p_wrong: float = 0.0
    """Probability in [0, 1) that a demonstrated action is replaced by another legal one; leaves PPO something to do."""
    p_perturb: float = 0.0
    """Probability in [0, 1) that another legal action is carried out than the one that is demonstrated. So states are
    shown that the demonstrator itself never gets into, and how it goes on from there."""
    updates: int = 80
    """Steps of the optimiser."""
    batch_turns: int = 32
    """Turns per step."""
    lr: float = 1e-3
    """Largest step size of Adam; it rises over the first tenth of the updates and then falls to 0."""
    reply_weight: float = 0.0
    """With an action head: weight of a demonstrated reply's likelihood beside its action's, >= 0. What the thought says
    of the image then teaches the policy to see, which an action alone hardly does."""
    held_out: float = 0.1
    """Share of the demonstrated episodes that is kept for validation, in [0, 1)."""
    max_grad_norm: float = 1.0
    """Larger gradients are scaled down to this norm."""

    def __post_init__(self) -> None:
        for name in ("p_wrong", "p_perturb", "held_out"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"sft.{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("updates", "batch_turns", "lr", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"sft.{name} must be > 0, got {getattr(self, name)}")
        if self.reply_weight < 0:
            raise ValueError(f"sft.reply_weight must be >= 0, got {self.reply_weight}")
        if self.demonstrations and self.start_from:
            raise ValueError(
                "sft.demonstrations would have no effect beside sft.start_from, which teaches nothing itself"
            )
        if self.turns < 0:
            raise ValueError(f"sft.turns must be >= 0, got {self.turns}; 0 goes without")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Where and how the job runs; what is learned is `SFTConfig`'s."""

    num_workers: int = 1
    """Processes that train, each on its part of every batch."""
    gpus_per_worker: float = 0.0
    """GPUs of each; 0 trains on the CPU."""
    cpus_per_worker: float = 1.0
    """CPUs of each."""
    save_every: int = 50
    """Updates between checkpoints."""
    max_reply_tokens: int = 256
    """A reply is cut after so many tokens when it is validated."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Passed on to Hugging Face's `TrainingArguments`, e.g. bf16, gradient_checkpointing, fsdp, deepspeed."""

    def __post_init__(self) -> None:
        for name in ("num_workers", "save_every", "max_reply_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"job.{name} must be >= 1, got {getattr(self, name)}")
        for name in ("gpus_per_worker", "cpus_per_worker"):
            if getattr(self, name) < 0:
                raise ValueError(f"job.{name} must be >= 0, got {getattr(self, name)}")
