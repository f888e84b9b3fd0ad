"""Plays groups of episodes. RLlib builds runners, in the learner's process or as actors; a runner group calls them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rlvlm.algorithms.base import BaseRunner
from rlvlm.algorithms.grpo.rollouts import (
    Drawn,
    InitialStates,
    ObsProcessor,
    Sampler,
    decoded_by,
    explored_dimensions,
    roll_out,
)
from rlvlm.core.chunks import ChunkEpisode
from rlvlm.core.steps import FloatArray
from rlvlm.envs.chunk_env import FIRST_HELD_OUT_STATE, ChunkEnv
from rlvlm.envs.registry import make_env
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.policy import trained_weights
from rlvlm.policies.vla.tokens import ActionScale

IMAGE_BYTES = 256 * 2**20
"""Of the images that a rollout looked at, kept for its update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """What a runner played."""

    episodes: list[ChunkEpisode]
    """Those of a group are neighbours."""
    images: Drawn
    """What its policy looked at, where the learner is in another process and would have to draw it again."""


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """One rollout of those of several runners, in their order."""
    episodes = [episode for rollout in rollouts for episode in rollout.episodes]
    return Rollout(episodes=episodes, images={key: image for one in rollouts for key, image in one.images.items()})


class GroupRunner(BaseRunner):
    """Envs side by side, persistent, each group from an initial state of its own.

    In the learner's process it plays with the very policy that is trained (`policy` and `obs_processor` are set from
    outside). An actor has a policy of its own, whose weights come with every turn. Initial states and tokens come from
    generators of the runner's own.

    Args:
        config: a `VLAGRPOConfig`.
        worker_index: 0 in the learner's process, from 1 on elsewhere.
    """

    config: Any
    policy: Any
    obs_processor: ObsProcessor

    def __init__(self, *, config: Any, worker_index: int = 0, **unused: Any) -> None:
        super().__init__(config=config, worker_index=worker_index)
        self.chunk_env: ChunkEnv = make_env(config.task, config.env_settings, config.seed)
        self._envs = self.chunk_env.many()
        self.begin()
        if worker_index > 0:
            torch.set_num_threads(1)  # an actor has one core
            self.policy = build_policy(config.policy, self.chunk_env)
            self.obs_processor = ObsProcessor(self.policy, self.chunk_env, IMAGE_BYTES)

    def begin(self, restart: int = 0) -> None:
        """Random numbers and groups that no other runner or restart has.

        Args:
            restart: counts the times a lost runner was replaced; 0 at the start. Then the first actor's numbers are
                those that a runner in the learner's process would have.
        """
        own = (max(self.worker_index - 1, 0), restart)
        kin = own if any(own) else ()
        seed = self.config.seed
        self._states = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(5, *kin)))
        token_seed = int(np.random.SeedSequence(seed, spawn_key=(8, *kin)).generate_state(1)[0]) if kin else seed
        self._tokens = torch.Generator().manual_seed(token_seed)
        self._next_group = (own[0] * 1_000_000 + restart) * 1_000_000_000

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride] - who calls it passes these
        self, *, num_groups: int, scale: ActionScale, players: Sequence[int] = ()
    ) -> Rollout:
        """Whole episodes, a group of each of some initial states.

        Args:
            num_groups: of all players together.
            scale: of the policy's actions.
            players: numbers of the runners that share the groups out; empty: this one plays all.
        """
        grpo, own = self.config.grpo, num_groups
        if players:
            own = (
                len(range(players.index(self.worker_index), num_groups, len(players)))
                if self.worker_index in players
                else 0
            )
        if not own:
            return Rollout(episodes=[], images={})
        state_ids = self._states.integers(FIRST_HELD_OUT_STATE, size=own)
        groups = np.arange(self._next_group, self._next_group + own)
        self._next_group += own
        size = grpo.group_size
        starts = InitialStates(task=self.config.task, state_ids=state_ids.repeat(size), groups=groups.repeat(size))
        shared = self.chunk_env.chunk_steps if grpo.draws == "chunk" else 1
        explored = explored_dimensions(scale, self.chunk_env, grpo.least_range)
        sampler = Sampler(self.policy, self.obs_processor, grpo.temperature, self._tokens, shared, explored)
        episodes = roll_out(self._envs, starts, sampler.choose, decoded_by(scale, self.chunk_env.chunk_steps))
        return Rollout(episodes=episodes, images=self.obs_processor.give() if self.worker_index else {})

    def act(self, *, values: FloatArray, num_groups: int, scale: ActionScale, players: Sequence[int] = ()) -> Rollout:
        """`sample` with the policy whose weights that learn are `values` `[P]`; for actors."""
        weights = list(trained_weights(self.policy).values())
        for own, came in zip(weights, torch.tensor(values).split([own.numel() for own in weights]), strict=True):
            own.copy_(came.view_as(own))
        return self.sample(num_groups=num_groups, scale=scale, players=players)

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """Snapshots and chunks, for RLlib; policies see images and words instead."""
        snapshots = gym.spaces.Box(-np.inf, np.inf, (self.chunk_env.snapshot_size,), np.float32)
        low = np.tile(self.chunk_env.action_low, (self.chunk_env.chunk_steps, 1))
        high = np.tile(self.chunk_env.action_high, (self.chunk_env.chunk_steps, 1))
        return {DEFAULT_MODULE_ID: (snapshots, gym.spaces.Box(low, high, dtype=np.float32))}

    def make_env(self) -> None:
        """The envs are made once, with the runner."""

    def make_module(self) -> None:
        """The policy is set from outside, or made with the runner."""

    def get_metrics(self) -> None:
        """The algorithm counts episodes itself."""

    def stop(self) -> None:
        """Closes the env."""
        self.chunk_env.close()

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
