"""Steps the envs with the learner's policy. RLlib builds runners, here or as actors; a runner group calls them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.core import DEFAULT_MODULE_ID

from rlvlm.algorithms.base import BaseRunner
from rlvlm.algorithms.sac_pebble.dense import flatten
from rlvlm.algorithms.sac_pebble.player import EpisodeBuffer, Step, to_transitions
from rlvlm.core.finite import check_finite
from rlvlm.core.progress import count_progress
from rlvlm.core.steps import FloatArray, Trajectory, Transitions
from rlvlm.envs.env import StepEnv
from rlvlm.envs.registry import make_vector
from rlvlm.policies.squashed_gaussian import SquashedGaussian

_P_HOLD = 0.5  # probability that a random action is repeated for one more step; persistent actions reach further


@dataclass(frozen=True, slots=True)
class Sample:
    """Result of a turn of acting."""

    transitions: Transitions
    episodes: list[Trajectory]
    """Episodes that ended during the turn."""


def join(samples: Sequence[Sample]) -> Sample:
    """Joins the samples of several runners, in order."""
    if len(samples) == 1:
        return samples[0]
    columns = {
        field.name: np.concatenate([getattr(sample.transitions, field.name) for sample in samples])
        for field in fields(Transitions)
    }
    return Sample(Transitions(**columns), [episode for sample in samples for episode in sample.episodes])


class StepEnvRunner(BaseRunner):
    """N envs in this process, stepped side by side; an episode that ends is followed by the next at once.

    In the learner's process it acts with the policy in training (`policy` is set from outside). An actor has a copy of
    the policy, whose weights come with every turn. Exploration noise has a generator of its own.

    Args:
        config: a `SACPebbleConfig`.
        worker_index: see `BaseRunner`.
    """

    policy: SquashedGaussian

    def __init__(self, *, config: Any, worker_index: int = 0, **unused: object) -> None:
        super().__init__(config=config, worker_index=worker_index)
        self.begin()
        if worker_index > 0:
            torch.set_num_threads(1)  # an actor has one core
            obs_size, action_size = (space.shape[0] for space in self._spaces())
            self.policy = SquashedGaussian(obs_size, action_size, config.sac.hidden)
            self._policy_values = flatten(self.policy.parameters())

    def begin(self, restart: int = 0) -> None:
        """Begins new envs at their first episodes, with random numbers that no other runner or restart has.

        Args:
            restart: number of times a lost runner was replaced; 0 at the start, when the first actor's envs and noise
                equal those of a runner in the learner's process.
        """
        if self.env is not None:
            self.env.close()
        branch, seed = self.branch(restart), self.config.seed
        if branch:
            seed = int(np.random.SeedSequence(seed, spawn_key=(2, *branch)).generate_state(1)[0])
        self.env = make_vector(self.config.task, self.config.env_settings, seed)
        self.num_envs = self.env.num_envs
        self._noise = np.random.default_rng(np.random.SeedSequence(self.config.seed, spawn_key=(1, *branch)))
        self._buffer = EpisodeBuffer(self.num_envs)
        self._random = np.zeros((self.num_envs, *self._spaces()[1].shape), np.float32)
        self._obs = np.array(self.env.reset()[0], np.float32)
        self._check(observations=self._obs)

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride] - its callers pass these
        self, *, num_steps: int, random_actions: bool = False
    ) -> Sample:
        """Steps every env `num_steps` times.

        Args:
            num_steps: steps of each env, >= 1.
            random_actions: uniform actions instead of the policy's.
        """
        steps, episodes = [], []
        for _ in range(num_steps):
            step, ended = self._step(self._random_actions() if random_actions else self._policy_actions())
            episodes += self._buffer.record(step, ended)
            steps.append(step)
        return Sample(to_transitions(steps), episodes)

    def act(self, *, values: FloatArray, num_steps: int, random_actions: bool) -> Sample:
        """Acts like `sample` with the policy whose weights are `values` `[P]`; for actors."""
        self._policy_values.copy_(torch.tensor(values))
        return self.sample(num_steps=num_steps, random_actions=random_actions)

    def _step(self, actions: FloatArray) -> tuple[Step, NDArray[np.bool_]]:
        """Makes one step of all envs; returns it, and which of their episodes `[N]` it ended."""
        obs, env_rewards, terminated, truncated, infos = self.env.step(actions)
        count_progress()
        ended = terminated | truncated
        next_obs, snapshots = obs.copy(), infos["snapshot"]
        self._check(observations=obs, rewards=env_rewards)
        progress, success = infos["progress"], infos["success"]
        if ended.any():  # these envs were reset within the step: their last state is in the final_* entries
            final = infos["final_info"]
            next_obs[ended] = np.stack(infos["final_obs"][ended])
            self._check(observations=next_obs)
            snapshots, progress, success = (
                np.where(ended.reshape(-1, *[1] * (now.ndim - 1)), final[name], now)
                for name, now in (("snapshot", snapshots), ("progress", progress), ("success", success))
            )
        step = {
            "obs": self._obs,
            "actions": actions,
            "next_obs": next_obs,
            "terminated": terminated.astype(np.float32),
            "env_rewards": env_rewards.astype(np.float32),
            "success": success.astype(np.float32),
            "snapshots": snapshots.astype(np.float32),
            "progress": progress.astype(np.float32),
        }
        self._obs = obs
        return step, ended

    def _check(self, **came: FloatArray) -> None:
        """Raises unless all values returned by the envs are finite.

        Raises:
            NumericsError: some are not.
        """
        if not np.isfinite(sum(values.sum() for values in came.values())):  # checked one by one in that case only
            task, before = self.config.task, {"obs_before": self._obs}
            check_finite(f"the env {task}", f"mend the env; rlvlm check-task {task} looks at it", came, before)

    def _policy_actions(self) -> FloatArray:
        """Returns [N, A], sampled from the policy."""
        noise = self._noise.standard_normal((self.num_envs, self.policy.action_size), np.float32)
        device = next(self.policy.parameters()).device
        return self.policy.act(torch.from_numpy(self._obs).to(device), torch.from_numpy(noise).to(device)).cpu().numpy()

    def _random_actions(self) -> FloatArray:
        """Returns [N, A], uniform in [-1, 1); each env keeps its last actions with probability `_P_HOLD`."""
        fresh = self._noise.uniform(-1, 1, self._random.shape).astype(np.float32)
        holds = self._noise.random(self.num_envs) < _P_HOLD
        self._random = np.where(holds[:, None], self._random, fresh)
        return self._random

    def get_spaces(self) -> dict[str, tuple[gym.Space, gym.Space]]:
        """Returns the spaces of a single env, under RLlib's name for the only module."""
        return {DEFAULT_MODULE_ID: self._spaces()}

    def _spaces(self) -> tuple[gym.spaces.Box, gym.spaces.Box]:
        """Returns observation and action space of a single env."""
        return self.env.single_observation_space, self.env.single_action_space

    def save_tree(self) -> dict[str, Any]:
        """Returns envs, running episodes and noise as a state tree: after `load_tree` the future is bit-identical."""
        return {
            "envs": [env.get_state() for env in self._envs],
            "obs": self._obs,
            "random": self._random,
            "noise": self._noise.bit_generator.state,
            "buffer": self._buffer.get_state(),
        }

    def load_tree(self, tree: dict[str, Any]) -> None:
        for env, env_state in zip(self._envs, tree["envs"], strict=True):
            env.set_state(env_state)
        self._obs = np.array(tree["obs"], np.float32)
        self._random = np.array(tree["random"], np.float32)
        self._noise.bit_generator.state = tree["noise"]
        self._buffer.set_state(tree["buffer"])

    def stop(self) -> None:
        """Closes the envs."""
        self.env.close()

    @property
    def _envs(self) -> list[StepEnv]:
        return [wrapped.unwrapped for wrapped in self.env.envs]
