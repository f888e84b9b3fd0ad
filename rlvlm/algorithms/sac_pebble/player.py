"""Whole episodes of a squashed Gaussian's mode, for evaluations and `rlvlm eval`."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from rlvlm.algorithms.checkpoint import CorruptCheckpoint, load_policy_file
from rlvlm.algorithms.evaluation import PlayedEpisode
from rlvlm.algorithms.sac_pebble.episodes import VectorStep, to_trajectory, to_transitions
from rlvlm.envs.step_env import StepEnv
from rlvlm.policies.squashed_gaussian import SquashedGaussian
from rlvlm.rewards.source import RewardSource

KIND = "squashed_gaussian"
"""Of the policy's file in a checkpoint."""


class StepsPlayer:
    """Plays a policy's mode in an env that is stepped with a vector of numbers.

    Args:
        policy: on any device.
        env: not one that training uses.
        source: labels the episodes; it must not change by being asked. None: their learned rewards are NaN.
    """

    def __init__(self, policy: SquashedGaussian, env: StepEnv, source: RewardSource | None = None) -> None:
        self._policy = policy
        self._env = env
        self._source = source

    def play(self, seeds: Sequence[int]) -> list[PlayedEpisode]:
        """An episode from a reset with each seed."""
        return [self._play(seed) for seed in seeds]

    def _play(self, seed: int) -> PlayedEpisode:
        device = next(self._policy.parameters()).device
        obs, _ = self._env.reset(seed=seed)
        steps: list[VectorStep] = []
        is_over = False
        while not is_over:
            action = self._policy.act(torch.from_numpy(obs[None]).to(device))[0].cpu().numpy()
            next_obs, env_reward, terminated, truncated, info = self._env.step(action)
            columns = {
                "obs": obs,
                "actions": action,
                "next_obs": next_obs,
                "terminated": terminated,
                "env_rewards": env_reward,
                "success": info["success"],
                "snapshots": info["snapshot"],
                "progress": info["progress"],
            }
            rows = {column.name: np.asarray(columns[column.name], np.float32)[None] for column in fields(VectorStep)}
            steps.append(VectorStep(**rows))
            obs, is_over = next_obs, terminated or truncated
        learned = np.full(len(steps), np.nan, np.float32)
        if self._source is not None:
            learned = np.asarray(self._source.label(to_transitions(steps)), np.float32)
        episode = to_trajectory(steps, env=0)
        return PlayedEpisode(
            snapshots=episode.snapshots,
            env_rewards=episode.env_rewards,
            learned_rewards=learned,
            success=episode.success,
            progress=episode.progress,
        )


def load_policy(folder: Path) -> SquashedGaussian:
    """The policy of the checkpoint in `folder`.

    Raises:
        CorruptCheckpoint: a file is missing, differs from what was written, or holds another kind of policy.
    """
    file = load_policy_file(folder)
    try:
        if file.kind != KIND:
            raise ValueError(f"its policy is a {file.kind}, not a {KIND}")
        shapes = [file.weights[f"layers.{depth}.weight"].shape for depth in range(len(file.weights) // 2)]
        policy = SquashedGaussian(shapes[0][1], shapes[-1][0] // 2, [shape[0] for shape in shapes[:-1]])
        policy.load_state_dict(file.weights)
    except Exception as error:  # strange weights break a network in any way
        reason = " ".join(str(error).split())[:200]
        raise CorruptCheckpoint(
            f"{folder} holds no policy that can be played: {type(error).__name__} {reason}",
            "use a checkpoint that rlvlm wrote",
        ) from error
    return policy
