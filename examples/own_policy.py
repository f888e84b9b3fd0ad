"""A policy of your own for envs in chunks: a Gaussian over each number of the chunk, whose log-prob is a density.

python -m rlvlm.run push_block --policy.head own_policy:GaussianVLA --policy.settings width 256
"""

import json
import zlib

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal

from rlvlm.policies.protocol import Imitation, Prediction
from rlvlm.policies.vla.policy import SampledChunks, VLAPolicy


class GaussianVLA(VLAPolicy):
    """Small convolutions, one vector for each instruction, and a standard deviation that learns, for each dimension.

    Its answer is the chunk as it was drawn, in standard deviations of the demonstrations. `value` is asked only where a
    run's estimator has a critic of the policy's own.
    """

    image_px = 32

    def __init__(self, env, width="256"):
        super().__init__()
        self.shape = env.chunk_steps, len(env.action_low)  # L, A
        size = int(width)
        self.see = nn.Sequential(
            nn.Conv2d(3, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU(), nn.Flatten(1)
        )
        self.hear = nn.Embedding(64, 32)
        self.trunk = nn.Sequential(
            nn.Linear(len(env.cameras) * 24 * 64 + 32 + env.proprio_size, size),
            nn.ReLU(),
            nn.Linear(size, size),
            nn.ReLU(),
        )
        self.mean = nn.Linear(size, self.shape[0] * self.shape[1])
        self.log_std = nn.Parameter(torch.full((self.shape[1],), -1.0))
        self.value_head = nn.Linear(size, 1)
        self.centre, self.spread = np.zeros(self.shape[1], np.float32), np.ones(self.shape[1], np.float32)

    def read(self, instructions):
        """[B, 1]: which vector; the same text is the same number in every process."""
        return torch.tensor([[zlib.crc32(text.encode()) % 64] for text in instructions], device=self.device)

    def forward(self, images, token_ids, proprio):
        """The Gaussian [B, L, A] and the value [B] of images [B, C, H, W, 3], token ids [B, 1] and proprio [B, P]."""
        pixels = images.flatten(0, 1).permute(0, 3, 1, 2).float() / 127.5 - 1  # [B * C, 3, H, W]
        seen = self.see(pixels).view(len(images), -1)
        hidden = self.trunk(torch.cat([seen, self.hear(token_ids[:, 0]), proprio], dim=1))
        mean = self.mean(hidden).view(-1, *self.shape)
        return Normal(mean, self.log_std.exp().expand_as(mean)), self.value_head(hidden.detach())[:, 0]

    @torch.no_grad()
    def sample(self, obs, sampling):
        """Draws around the mean; at no temperature takes the mean."""
        normal, values = self(*self.inputs(obs))
        is_drawn = sampling.temperature is not None
        drawn = normal.mean
        if is_drawn:
            rows = 1 if sampling.noise_per == "chunk" else self.shape[0]
            noise = torch.randn((len(obs), rows, self.shape[1]), generator=sampling.generator).to(self.device)
            drawn = normal.mean + sampling.temperature * normal.stddev * noise
            normal = Normal(normal.mean, sampling.temperature * normal.stddev)
        log_probs = normal.log_prob(drawn).flatten(1) * is_drawn
        return SampledChunks(
            actions=drawn.cpu().numpy() * self.spread + self.centre,
            answers=[{"drawn": row} for row in drawn.cpu().numpy()],
            log_probs=log_probs.cpu().numpy(),
            mask=np.full(log_probs.shape, is_drawn),
            steps=np.arange(self.shape[0]).repeat(self.shape[1]),
            values=values.cpu().numpy(),
        )

    def log_probs(self, obs, answers, reading):
        """The density of what was drawn, under the weights as they are now."""
        normal, values = self(*self.inputs(obs))
        normal = Normal(normal.mean, reading.temperature * normal.stddev)
        drawn = torch.from_numpy(np.stack([answer["drawn"] for answer in answers])).to(self.device)
        found = normal.log_prob(drawn).flatten(1)
        every = values[:, None].expand_as(found) if reading.with_token_values else None
        return Prediction(log_probs=found, values=values, entropies=normal.entropy().flatten(1), token_values=every)

    def values(self, obs):
        """[B] before any answer."""
        return self(*self.inputs(obs))[1]

    def learn_statistics(self, shown, env):
        """Mean and standard deviation of the demonstrated actions."""
        actions = shown.actions.reshape(-1, self.shape[1])
        self.centre, self.spread = actions.mean(axis=0), actions.std(axis=0) + 1e-3

    @property
    def statistics(self):
        """As a checkpoint keeps them."""
        return json.dumps({"centre": self.centre.tolist(), "spread": self.spread.tolist()})

    def load_statistics(self, text):
        """Takes them over."""
        self.centre, self.spread = (np.array(value, np.float32) for value in json.loads(text).values())

    def imitation(self, shown, env, sft, rng, log):
        """Minus the log-density of what was shown, per number of a chunk."""
        inputs = self.shown_inputs(env, shown.obs, shown.images)
        wanted = torch.from_numpy((shown.actions - self.centre) / self.spread).to(self.device)  # [M, L, A]

        def loss(rows, weights):
            normal, _ = self(*(part[rows] for part in inputs))
            each = -normal.log_prob(wanted[rows]).flatten(1).mean(1)  # [B]
            return (each if weights is None else each * weights).mean()

        return Imitation(loss=loss, shown=np.arange(len(wanted)))
