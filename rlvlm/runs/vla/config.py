"""A whole run of the third pipeline: a policy that looks, reads an instruction, and acts in chunks.

Imports only the rooms' config files, never torch or ray: `rlvlm --help` starts at once.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from rlvlm.algorithms.grpo.config import GRPOConfig, SFTConfig
from rlvlm.policies.vla.config import PocketVLAConfig
from rlvlm.runs.config import RunConfig, at_most


@dataclass(frozen=True, kw_only=True, slots=True)
class VLARunConfig(RunConfig):
    """A whole run."""

    pipeline: ClassVar[str] = "vla"
    policy: PocketVLAConfig = field(default_factory=PocketVLAConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    algo: GRPOConfig = field(default_factory=GRPOConfig)

    @property
    def asks_judge(self) -> bool:
        """The reward is the env's own success."""
        return False

    @property
    def max_queries(self) -> int:
        """Nobody is asked."""
        return 0

    @property
    def num_workers(self) -> int:
        """Worlds and learner share one process."""
        return 0

    @property
    def reward_name(self) -> str:
        """Where the reward comes from."""
        return "env success"

    def smoke(self) -> Self:
        """This run cut to minutes: every part of it happens, nothing is learnt to the end."""
        return replace(
            at_most(self, steps=30_000),
            sft=at_most(self.sft, demonstrations=100, steps=300),
            algo=at_most(self.algo, groups=16, rounds=1),
            eval=at_most(self.eval, every_steps=10_000, episodes=20),
            track=at_most(self.track, checkpoint_every_steps=10_000, log_every_steps=5_000),
        )
