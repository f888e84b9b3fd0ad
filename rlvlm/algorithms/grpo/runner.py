"""Plays groups of episodes with the learner's policy, in its process. RLlib builds it and the algorithm calls it."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env.env_runner import EnvRunner

from rlvlm.algorithms.grpo.rollouts import Eyes, Sampler, Starts, decoded_by, roll_out
from rlvlm.envs.chunks import FIRST_HELD_OUT_STATE, ChunkWorld
from rlvlm.envs.registry import make_world
from rlvlm.policies.vla.policy import VLAPolicy
from rlvlm.policies.vla.tokens import ActionScale
from rlvlm.types.chunks import ChunkEpisode


class GroupRunner(EnvRunner):
    """Worlds side by side, persistent, each group from an initial state of its own.

    Initial states and tokens come from generators of the runner's own.

    Args:
        config: a `VLAGRPOConfig`.
        worker_index: 0; there are no others.
    """

    config: Any
    scale: ActionScale
    """Set by the algorithm once there are demonstrations."""

    def __init__(self, *, config: Any, worker_index: int = 0, **unused: Any) -> None:
        super().__init__(config=config, worker_index=worker_index)
        self.world: ChunkWorld = make_world(config.task, config.world, config.seed)
        self._worlds = self.world.many()
        self._states = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(5,)))
        self._tokens = torch.Generator().manual_seed(config.seed)
        self._next_group = 0

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride] - who calls it passes these
        self, *, policy: VLAPolicy, eyes: Eyes, num_groups: int, group_size: int, temperature: float
    ) -> list[ChunkEpisode]:
        """Whole episodes, `group_size` of each of `num_groups` initial states, neighbours in the answer."""
        state_ids = self._states.integers(FIRST_HELD_OUT_STATE, size=num_groups)
        groups = np.arange(self._next_group, self._next_group + num_groups)
        self._next_group += num_groups
        starts = Starts(task=self.config.task, state_ids=state_ids.repeat(group_size), groups=groups.repeat(group_size))
        shared = self.world.chunk_steps if self.config.grpo.draws == "chunk" else 1
        sampler = Sampler(policy, eyes, temperature, self._tokens, shared)
        return roll_out(self._worlds, starts, sampler.choose, decoded_by(self.scale, self.world.chunk_steps))

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """Snapshots and chunks, for RLlib; policies see images and words instead."""
        snapshots = gym.spaces.Box(-np.inf, np.inf, (self.world.snapshot_size,), np.float32)
        low = np.tile(self.world.action_low, (self.world.chunk_steps, 1))
        high = np.tile(self.world.action_high, (self.world.chunk_steps, 1))
        return {DEFAULT_MODULE_ID: (snapshots, gym.spaces.Box(low, high, dtype=np.float32))}

    def make_env(self) -> None:
        """The worlds are made once, with the runner."""

    def make_module(self) -> None:
        """The policy comes with every call."""

    def set_state(self, state: dict[str, Any]) -> None:
        """RLlib sends weights and connectors here; ours is given the policy itself, and there are no connectors."""

    def get_metrics(self) -> None:
        """The algorithm counts episodes itself."""

    def assert_healthy(self) -> None:
        """In this process, nothing can be lost without the rest."""

    def stop(self) -> None:
        """Closes the world."""
        self.world.close()

    def save_tree(self) -> dict[str, Any]:
        """Generators and the next group's number; between rounds no episode is under way."""
        return {
            "states": self._states.bit_generator.state,
            "tokens": self._tokens.get_state().numpy(),
            "next_group": self._next_group,
        }

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned."""
        self._states.bit_generator.state = tree["states"]
        self._tokens.set_state(torch.as_tensor(tree["tokens"]))
        self._next_group = tree["next_group"]
