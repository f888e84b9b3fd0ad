"""A LeRobot checkpoint as a flow policy, with its own statistics and tokenizer, and its sharding over learners."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvlm.core.episodes import Answer, Observations
from rlvlm.core.errors import UsageError
from rlvlm.core.guests import section_of
from rlvlm.envs.env import ChunkEnv
from rlvlm.plugins.lerobot.checkpoint import Checkpoint
from rlvlm.plugins.lerobot.config import LeRobotConfig
from rlvlm.plugins.lerobot.loading import load_lerobot, save_lerobot
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.flow.policy import FlowPolicy
from rlvlm.policies.vla.policy import Demonstrations
from rlvlm.policies.weights import Shardable

logger = logging.getLogger(__name__)

_MAX_OFF = 10
"""Maximum median distance of demonstrations from the middle of a checkpoint's statistics, in units of their spread."""


class LeRobotPolicy(FlowPolicy):
    """The checkpoint named by `config.model`, for an env.

    Args:
        config: settings with its name, its inputs and its denoising.
        env: env that it acts in.

    Raises:
        ModelUnavailable: it cannot be loaded, or does not match the env.
    """

    comes_trained = starts_from_noise = True
    checkpoint: Checkpoint
    """Files that are written back with its weights."""

    def __init__(self, config: VLAConfig, env: ChunkEnv) -> None:
        wants = section_of(config, LeRobotConfig)
        loaded = load_lerobot(config.model, config.revision, wants, env)
        network: Any = loaded.network  # has the interface of a `VelocityNetwork`
        super().__init__(network, config.flow, chunk_steps=env.chunk_steps, action_size=len(env.action_low))
        self.image_px = wants.image_px
        self.checkpoint = loaded.checkpoint
        if config.flow.steps != (own := loaded.checkpoint.num_denoising_steps):
            logger.warning(
                "%s denoises a chunk in %d steps, and this run does so in %d: --policy.flow.steps %d; flows that come "
                "trained were published with --policy.flow.learn one --policy.flow.noise 0.5 --policy.flow.start-std 1",
                config.model, own, config.flow.steps, own,
            )  # fmt: skip
        self.own_steps = own
        self.load_statistics(loaded.checkpoint.statistics)
        self.relative = np.flatnonzero(loaded.checkpoint.relative)
        self.is_real = self.is_real.to(self.device)

    def learn_statistics(self, shown: Demonstrations, env: ChunkEnv) -> None:
        """Keeps the checkpoint's own statistics, with which it was trained; see `VLAPolicy`.

        Raises:
            UsageError: by these, the demonstrations are not actions or states of the robot it was trained on.
        """
        actions = shown.actions - self.origin(shown.obs.proprio)
        features = {"action": actions.reshape(-1, actions.shape[-1]), "proprio": shown.obs.proprio}
        for name, values in features.items():
            scale = self.scales[name]
            # the median, because single numbers may be anywhere; a constant number has no scale
            off = np.where(scale.spread == 0, 0, np.median(np.abs(scale.normalised(values)), axis=0))
            if off.max() > _MAX_OFF:
                worst = int(off.argmax())
                raise UsageError(
                    f"dimension {worst} of the demonstrations' {name} lies {off[worst]:.0f} times its spread in the "
                    f"checkpoint's statistics from their middle, and at most {_MAX_OFF} are credible: another robot, "
                    "or other units, such as positions for movements",
                    "give --sft.demonstrations data of the robot and the units that the checkpoint was trained on",
                )

    def export(self, folder: Path) -> str:
        """See `Policy`: LeRobot's layout, with an adapter merged into the weights."""
        network: Any = self.network
        save_lerobot(network, self.checkpoint, folder)
        return "LeRobot's: `lerobot-eval --policy.path=FOLDER`, or `from_pretrained` of its policy class"

    def shardable(self) -> Shardable:
        return Shardable(root=self.network, methods=("prefix", "velocity", "state_values"))

    def lengths(self, obs: Observations, answers: Sequence[Answer]) -> list[int]:
        """See `Policy`: tokens before the actions, and the chunk in every trained step."""
        network: Any = self.network
        denoised = network.horizon * self.flow.num_learned
        proprio = torch.from_numpy(self.scales["proprio"].normalised(obs.proprio))
        return [num + denoised for num in network.num_tokens(network.read(self.asked(obs)), proprio)]
