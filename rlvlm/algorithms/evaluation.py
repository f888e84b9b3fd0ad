"""Judges a policy on the true task, in a world and with a generator of its own: training does not notice."""

from dataclasses import dataclass, fields

import numpy as np
import torch

from rlvlm.algorithms.episodes import VectorStep, to_trajectory, to_transitions
from rlvlm.envs.world import World
from rlvlm.policies.squashed_gaussian import SquashedGaussian
from rlvlm.rewards.source import RewardSource
from rlvlm.types.steps import FloatArray, Trajectory

FIRST_SEED = 1_000_000
"""Evaluation episode i starts from seed FIRST_SEED + i, every time: two evaluations see the same starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationEpisode:
    """One episode of the deterministic policy."""

    trajectory: Trajectory
    learned_rewards: FloatArray
    """[T] by the reward source, for plots only; NaN where there is none to ask."""

    @property
    def is_success(self) -> bool:
        """Whether the env's own test held at any step."""
        return bool(self.trajectory.success.any())

    @property
    def env_return(self) -> float:
        """Sum of the true rewards."""
        return float(self.trajectory.env_rewards.sum(dtype=np.float64))

    @property
    def learned_return(self) -> float:
        """Sum of the source's rewards; NaN where there is none to ask."""
        return float(self.learned_rewards.sum(dtype=np.float64))


def evaluate(
    policy: SquashedGaussian, world: World, episodes: int, source: RewardSource | None = None
) -> list[EvaluationEpisode]:
    """Plays whole episodes with the policy's mode.

    Args:
        policy: on any device.
        world: not one that training uses.
        episodes: >= 0.
        source: labels the episodes; it must not change by being asked.
    """
    results = []
    for episode in range(episodes):
        steps = _play(policy, world, FIRST_SEED + episode)
        rewards = (
            np.full(len(steps), np.nan, np.float32)
            if source is None
            else np.asarray(source.label(to_transitions(steps)), np.float32)
        )
        results.append(EvaluationEpisode(trajectory=to_trajectory(steps, world=0), learned_rewards=rewards))
    return results


def _play(policy: SquashedGaussian, world: World, seed: int) -> list[VectorStep]:
    """One episode, from a reset with `seed` to its end."""
    device = next(policy.parameters()).device
    obs, _ = world.reset(seed=seed)
    steps, is_over = [], False
    while not is_over:
        action = policy.act(torch.from_numpy(obs[None]).to(device))[0].cpu().numpy()
        next_obs, env_reward, terminated, truncated, info = world.step(action)
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
        steps.append(
            VectorStep(
                **{field.name: np.asarray(columns[field.name], np.float32)[None] for field in fields(VectorStep)}
            )
        )
        obs, is_over = next_obs, terminated or truncated
    return steps
