"""A checkpoint of LeRobot as a flow policy: its own statistics, its own words, and what is spread over learners."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlvlm.core.episodes import Answer, Observations
from rlvlm.core.errors import UsageError
from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.flow.policy import FlowPolicy
from rlvlm.policies.vla.lerobot.checkpoint import Checkpoint
from rlvlm.policies.vla.lerobot.loading import load_lerobot, save_lerobot
from rlvlm.policies.weights import Shardable

logger = logging.getLogger(__name__)


class LeRobotPolicy(FlowPolicy):
    """The checkpoint that `config.model` names, for an env.

    Args:
        config: names it, and says how it is shown the env and how it denoises.
        env: it acts in.

    Raises:
        ModelUnavailable: it cannot be loaded, or is not for such an env.
        UsageError: it has no head for what is asked of it.
    """

    comes_trained = True
    checkpoint: Checkpoint
    """Files that are written back beside its weights."""

    def __init__(self, config: VLAConfig, env: ChunkEnv) -> None:
        if config.flow.kernel == "learned":
            raise UsageError(
                "a checkpoint of LeRobot has no head for learned noise", "--policy.flow.kernel sde, or cps"
            )
        loaded = load_lerobot(config.model, config.revision, config.lerobot, env)
        network: Any = loaded.network  # has all that a `VelocityNetwork` has
        super().__init__(network, config.flow, chunk_steps=env.chunk_steps, action_size=len(env.action_low))
        self.image_px = config.lerobot.image_px
        self.checkpoint = loaded.checkpoint
        if config.flow.steps != (own := loaded.checkpoint.num_denoising_steps):
            logger.warning(
                "%s denoises a chunk in %d steps, and this run does so in %d: --policy.flow.steps %d; flows that come "
                "trained were published with --policy.flow.learn one --policy.flow.noise 0.5 --policy.flow.start-std 1",
                config.model, own, config.flow.steps, own,
            )  # fmt: skip
        self.load_statistics(loaded.checkpoint.statistics)
        self.is_real = self.is_real.to(self.device)

    def save_lerobot(self, folder: Path) -> None:
        """Writes a folder that LeRobot loads, an adapter merged into the weights; what was there is replaced."""
        network: Any = self.network
        save_lerobot(network, self.checkpoint, folder)

    def shardable(self) -> Shardable:
        """See `Policy`."""
        return Shardable(root=self.network, methods=("prefix", "velocity", "state_values"))

    def lengths(self, obs: Observations, answers: Sequence[Answer]) -> list[int]:
        """See `Policy`: tokens before the actions, and the chunk in every step that is learned from."""
        network: Any = self.network
        denoised = network.horizon * self.flow.num_learned
        proprio = torch.from_numpy(self.scales["proprio"].normalised(obs.proprio))
        return [num + denoised for num in network.num_tokens(network.read(obs.texts), proprio)]
