"""Whole episodes of a VLA for evaluations and `rlvlm eval`, and how a checkpoint holds it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvlm.algorithms.checkpoint import CorruptCheckpoint, PolicyFile, load_policy_file
from rlvlm.algorithms.evaluation import PlayedEpisode
from rlvlm.algorithms.grpo.rollouts import (
    InitialStates,
    ObsProcessor,
    Sampler,
    decoded_by,
    explored_dimensions,
    roll_out,
)
from rlvlm.core.chunks import ChunkEpisode
from rlvlm.core.errors import ModelUnavailable, UsageError
from rlvlm.envs.chunk_env import ChunkEnv
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.config import OpenVLAConfig, PocketVLAConfig, VLAConfig
from rlvlm.policies.vla.policy import VLAPolicy, take_weights, trained_weights
from rlvlm.policies.vla.tokens import ActionScale

KIND = "vla"
"""Of the policy's file in a checkpoint."""
_SCALE_KEY = "task"


class ChunkPlayer:
    """Plays a VLA in envs side by side; a seed is the number of an initial state.

    Args:
        policy: on any device.
        env: draws, and makes the envs; not one that training uses.
        scale: of its actions.
        temperature: of sampling; None takes the likeliest token of each distribution.
        least_range: see `GRPOConfig`; what rollouts do not explore is not sampled here either.
    """

    def __init__(
        self,
        policy: VLAPolicy,
        env: ChunkEnv,
        scale: ActionScale,
        temperature: float | None = None,
        least_range: float = 0.0,
    ) -> None:
        self._policy = policy
        self._env = env
        self._scale = scale
        self._temperature = temperature
        self._explored = explored_dimensions(scale, env, least_range)

    def play(self, seeds: Sequence[int]) -> list[PlayedEpisode]:
        """An episode from the initial state of each seed.

        Greedy episodes from one state are all the same: where seeds, which follow one another, come back to the first
        state, there are no more.
        """
        return [as_played(episode) for episode in self.roll(seeds)]

    def roll(self, seeds: Sequence[int]) -> list[ChunkEpisode]:
        """The same episodes, chunk by chunk."""
        if self._temperature is None:
            seeds = seeds[: self._env.num_held_out]
        if not seeds:
            return []
        ids = np.array(seeds, np.int64)
        obs_processor = ObsProcessor(self._policy, self._env)
        sampler = Sampler(self._policy, obs_processor, self._temperature, explored=self._explored)
        starts = InitialStates(task="", state_ids=ids, groups=np.arange(len(ids)))
        return roll_out(self._env.many(), starts, sampler.choose, decoded_by(self._scale, self._env.chunk_steps))


def as_played(episode: ChunkEpisode) -> PlayedEpisode:
    """The episode in env steps, as every pipeline's pages take it; progress is known of the end alone."""
    steps = len(episode)
    success, progress = np.zeros(steps, bool), np.full(steps, np.nan, np.float32)
    success[-1], progress[-1] = episode.success, episode.progress
    return PlayedEpisode(
        snapshots=episode.snapshots[1:],
        env_rewards=episode.env_rewards,
        learned_rewards=np.full(steps, np.nan, np.float32),
        success=success,
        progress=progress,
        captions=(episode.instruction,) * steps,
    )


def policy_file(policy: torch.nn.Module, config: VLAConfig, scale: ActionScale) -> PolicyFile:
    """What a checkpoint holds of a VLA: the weights that learn, what they belong to, and the scale of its actions."""
    card: dict[str, Any] = {"config": asdict(config), "statistics": scale.write(_SCALE_KEY)}
    return PolicyFile(kind=KIND, weights=trained_weights(policy), card=card)


def load_policy(folder: Path, env: ChunkEnv) -> tuple[VLAPolicy, ActionScale]:
    """The policy of the checkpoint in `folder`, and the scale of its actions.

    Raises:
        CorruptCheckpoint: a file is missing, differs from what was written, or holds another kind of policy.
        ModelUnavailable: the checkpoint is of an adapter, and the model that it belongs to cannot be loaded.
    """
    file = load_policy_file(folder)
    with _playable(folder):
        policy = build_policy(_config_of(file), env)
        take_weights(policy, file.weights)
        return policy, ActionScale.read(file.card["statistics"], _SCALE_KEY)


def take_policy(folder: Path, policy: torch.nn.Module, config: VLAConfig) -> ActionScale:
    """Gives `policy`, built by `config`, the weights of the checkpoint in `folder`; the scale of its actions.

    Raises:
        CorruptCheckpoint: a file is missing, differs from what was written, or holds another kind of policy.
        UsageError: its policy was built by other settings, or for an env of another shape.
    """
    file = load_policy_file(folder)
    with _playable(folder):
        before = asdict(_config_of(file).pocket)
        scale = ActionScale.read(file.card["statistics"], _SCALE_KEY)
    odd = {name: value for name, value in before.items() if value != getattr(config.pocket, name)}
    if odd:
        told = ", ".join(f"policy.pocket.{name} {value}" for name, value in odd.items())
        raise UsageError(f"the policy of {folder.parent} was built with {told}", "give this run the same")
    wanted = {name: tuple(value.shape) for name, value in trained_weights(policy).items()}
    found = {name: tuple(value.shape) for name, value in file.weights.items()}
    if other := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        name = other[0]
        raise UsageError(
            f"the policy of {folder.parent} was made for another env: {name} is {found.get(name, 'missing')} there "
            f"and {wanted.get(name, 'missing')} here",
            "start from a run of the same task, or of one with the same cameras, actions and proprioception",
        )
    with _playable(folder):
        take_weights(policy, file.weights)
    return scale


def _config_of(file: PolicyFile) -> VLAConfig:
    if file.kind != KIND:
        raise ValueError(f"its policy is a {file.kind}, not a {KIND}")
    told = dict(file.card["config"])
    pocket = PocketVLAConfig(**{**told["pocket"], "channels": tuple(told["pocket"]["channels"])})
    return VLAConfig(**{**told, "pocket": pocket, "openvla": OpenVLAConfig(**told["openvla"])})


@contextmanager
def _playable(folder: Path) -> Iterator[None]:
    """Names a checkpoint that makes no policy.

    Raises:
        CorruptCheckpoint: whatever went wrong inside.
    """
    try:
        yield
    except ModelUnavailable:  # the large model beside whose weights these belong
        raise
    except Exception as error:  # strange weights break a network in any way
        reason = " ".join(str(error).split())[:200]
        raise CorruptCheckpoint(
            f"{folder} holds no policy that can be played: {type(error).__name__} {reason}",
            "use a checkpoint that rlvlm wrote",
        ) from error
