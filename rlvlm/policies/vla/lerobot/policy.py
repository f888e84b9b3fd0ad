"""A checkpoint of LeRobot as a flow policy: its own statistics, its own tokenizer, and what is spread over learners."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvlm.core.episodes import Answer, Observations
from rlvlm.core.errors import UsageError
from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.flow.policy import FlowPolicy
from rlvlm.policies.vla.lerobot.checkpoint import Checkpoint
from rlvlm.policies.vla.lerobot.loading import load_lerobot, save_lerobot
from rlvlm.policies.vla.policy import Demonstrations
from rlvlm.policies.weights import Shardable

logger = logging.getLogger(__name__)

_MAX_OFF = 10
"""Median distance of demonstrations from the middle of a checkpoint's statistics, in units of their spread."""


class LeRobotPolicy(FlowPolicy):
    """The checkpoint that `config.model` names, for an env.

    Args:
        config: names it, and says how it is shown the env and how it denoises.
        env: it acts in.

    Raises:
        ModelUnavailable: it cannot be loaded, or is not for such an env.
    """

    comes_trained = True
    checkpoint: Checkpoint
    """Files that are written back beside its weights."""

    def __init__(self, config: VLAConfig, env: ChunkEnv) -> None:
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
        self.relative = np.flatnonzero(loaded.checkpoint.relative)
        self.is_real = self.is_real.to(self.device)

    def learn_statistics(self, shown: Demonstrations, env: ChunkEnv) -> None:
        """Keeps the checkpoint's own, by which it was trained; see `VLAPolicy`.

        Raises:
            UsageError: by these, the demonstrations are no actions or states of the robot that it was trained on.
        """
        actions = shown.actions - self.origin(shown.obs.proprio)
        features = {"action": actions.reshape(-1, actions.shape[-1]), "proprio": shown.obs.proprio}
        for name, values in features.items():
            scale = self.scales[name]
            # the median, since single numbers may lie anywhere; a number that never changed has no scale
            off = np.where(scale.spread == 0, 0, np.median(np.abs(scale.normalised(values)), axis=0))
            if off.max() > _MAX_OFF:
                worst = int(off.argmax())
                raise UsageError(
                    f"dimension {worst} of the demonstrations' {name} lies {off[worst]:.0f} times its spread in the "
                    f"checkpoint's statistics from their middle, and at most {_MAX_OFF} are credible: another robot, "
                    "or other units, such as positions for movements",
                    "give --sft.demonstrations data of the robot and the units that the checkpoint was trained on",
                )

    def save_lerobot(self, folder: Path) -> None:
        """Writes a folder that LeRobot loads, an adapter merged into the weights; what was there is replaced."""
        network: Any = self.network
        save_lerobot(network, self.checkpoint, folder)

    def shardable(self) -> Shardable:
        return Shardable(root=self.network, methods=("prefix", "velocity", "state_values"))

    def lengths(self, obs: Observations, answers: Sequence[Answer]) -> list[int]:
        """See `Policy`: tokens before the actions, and the chunk in every step that is learned from."""
        network: Any = self.network
        denoised = network.horizon * self.flow.num_learned
        proprio = torch.from_numpy(self.scales["proprio"].normalised(obs.proprio))
        return [num + denoised for num in network.num_tokens(network.read(self.asked(obs)), proprio)]
