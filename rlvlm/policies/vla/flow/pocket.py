"""The pocket flow VLA: the pocket VLA's body, and a small head that denoises a chunk."""

import math

import torch
from torch import Tensor, nn

from rlvlm.policies.vla.config import PocketVLAConfig
from rlvlm.policies.vla.flow.policy import VelocityNetwork
from rlvlm.policies.vla.pocket import PocketBody

_TIME_WIDTH = 32
"""Number of sines and cosines that encode a time."""
_PERIODS = 0.004, 4.0
"""Shortest and longest period of these, as in pi0."""


class PocketFlowNetwork(PocketBody, VelocityNetwork):
    """Maps images, words, proprioception and a noisy chunk to the velocity of the whole chunk.

    Args:
        config: widths.
        num_cameras, proprio_size, num_offsets: see `PocketBody`.
        horizon: H = L, steps of a chunk.
        action_width: D = A, dimensions of an action.
        has_noise: whether it has a head for learned noise.
    """

    periods: Tensor

    def __init__(
        self, config: PocketVLAConfig, *, num_cameras: int, proprio_size: int, num_offsets: int, horizon: int,
        action_width: int, has_noise: bool,
    ) -> None:  # fmt: skip
        self.horizon, self.action_width, self._has_noise = horizon, action_width, has_noise
        super().__init__(config, num_cameras=num_cameras, proprio_size=proprio_size, num_offsets=num_offsets)

    def make_head(self, config: PocketVLAConfig) -> None:
        """Makes the head: a three-layer network of trunk output, noisy chunk and time."""
        numbers, hidden = self.horizon * self.action_width, config.hidden
        shortest, longest = map(math.log, _PERIODS)
        self.register_buffer("periods", torch.linspace(shortest, longest, _TIME_WIDTH // 2).exp(), persistent=False)
        self.from_seen = nn.Linear(hidden, hidden)
        self.from_chunk = nn.Linear(numbers + _TIME_WIDTH, hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.to_velocity = nn.Linear(hidden, numbers)
        nn.init.zeros_(self.to_velocity.weight)
        if self._has_noise:
            self.noise_head = nn.Linear(hidden + _TIME_WIDTH, numbers)

    def prefix(self, images: Tensor, token_ids: Tensor, proprio: Tensor) -> Tensor:
        """Returns [B, hidden], the trunk's output for an observation."""
        return self.see(images, token_ids, proprio)

    def velocity(self, cache: Tensor, x: Tensor, t: Tensor) -> Tensor:
        chunk = torch.cat([x.flatten(1), self._time(t)], dim=1)
        hidden = nn.functional.silu(self.from_seen(cache) + self.from_chunk(chunk))
        return self.to_velocity(nn.functional.silu(self.middle(hidden))).view_as(x)

    def noise(self, cache: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """See `VelocityNetwork`; the noise depends on observation and time, not on x."""
        return self.noise_head(torch.cat([cache, self._time(t)], dim=1)).view_as(x)

    def _time(self, t: Tensor) -> Tensor:
        angles = 2 * math.pi * t[:, None] / self.periods
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    def state_values(self, cache: Tensor, detach: bool) -> Tensor:
        assert self.value_head is not None, "asked of a policy with one"
        return self.value_head(cache.detach() if detach else cache)[:, 0]

    def predict_offsets(self, cache: Tensor) -> Tensor:
        return self.offset_head(cache)
