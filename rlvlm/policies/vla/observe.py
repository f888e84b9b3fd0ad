"""Turns observations of envs in chunks into what a VLA takes, for its supervised start."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlvlm.core.chunks import ChunkObs
from rlvlm.core.steps import Frames
from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.vla.policy import VLAPolicy


class ObsProcessor:
    """Draws what a policy looks at.

    Args:
        policy: says how large images are and how words are written.
        env: draws.
    """

    def __init__(self, policy: VLAPolicy, env: ChunkEnv) -> None:
        self._policy = policy
        self._env = env

    def look(self, obs: ChunkObs, images: Frames | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Images [N, cameras, H, W, 3] uint8, words [N, W] and proprioception [N, P], on the policy's device.

        Args:
            obs: of N moments.
            images: of these moments, where they were kept; else they are drawn.
        """
        device = self._policy.device
        drawn = self._policy.draw(self._env, obs.snapshots) if images is None else images
        words = self._policy.read(obs.instructions)
        return torch.from_numpy(drawn).to(device), words, torch.from_numpy(obs.proprio).to(device)

    def augment_scenes(self, obs: ChunkObs, starts: ChunkObs, rng: np.random.Generator) -> ChunkObs:
        """Scenes as `ChunkEnv.augment_scenes` at N moments and N starts; words and proprioception are the moments'."""
        scenes = self._env.augment_scenes(obs.snapshots, starts.snapshots, rng)
        return replace(obs, snapshots=scenes)

    def true_offsets(self, obs: ChunkObs) -> Tensor:
        """[N, W] as `ChunkEnv.offsets` at N moments, on the policy's device."""
        return torch.from_numpy(self._env.offsets(obs.snapshots)).to(self._policy.device)
