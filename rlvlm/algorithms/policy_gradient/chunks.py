"""Rollouts of policies in envs in chunks: the sampler draws chunks, `play_chunks` plays whole episodes side by side,
the runner those of a run, in the learner's process or as an actor.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.actor import ActorHandle
from ray.rllib.core import DEFAULT_MODULE_ID

from rlvlm.algorithms.base import BaseRunner
from rlvlm.algorithms.learners import use_assigned_gpu
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.env_workers import WorkerEnvs, start_workers
from rlvlm.algorithms.policy_gradient.images import put_images
from rlvlm.algorithms.policy_gradient.source import Rollout
from rlvlm.core.episodes import Observations, SampledChunk, TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.core.finite import check_finite
from rlvlm.core.progress import count_progress
from rlvlm.core.steps import FloatArray
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import FIRST_HELD_OUT_STATE, ChunkEnv, ChunkEnvs
from rlvlm.envs.playing import play
from rlvlm.envs.registry import make_env
from rlvlm.envs.slots import ChunkSlot
from rlvlm.policies.protocol import look
from rlvlm.policies.vla.policy import SampledChunks, Sampling, VLAPolicy

_FIX = "mend the env; rlvlm check-task looks at it"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSampler:
    """Settings and state of sampling chunks from a policy."""

    policy: VLAPolicy
    env: ChunkEnv
    """Env that draws the policy's images."""
    algo: PolicyGradientConfig = field(default_factory=PolicyGradientConfig)
    """Temperature, and explored dimensions."""
    greedy: bool = True
    """Whether to take the most likely chunks."""
    from_noise: bool = False
    """Whether greedy chunks are denoised from noise, see `Sampling`."""
    is_rollout: bool = False
    """Whether random numbers are shared as `algo.draws` says, never in evaluations."""
    generator: torch.Generator | None = None
    """Generator that samples chunks, on the CPU."""
    version: int = 0
    """Version of the weights."""
    lock: AbstractContextManager[object] = field(default_factory=nullcontext)
    """Lock held while the policy is used, if several threads play with it."""

    def act(self, obs: Observations) -> list[SampledChunk]:
        """Returns a chunk for each observation."""
        with self.lock:
            return self._act(obs)

    def _act(self, obs: Observations) -> list[SampledChunk]:
        look(self.policy, self.env, obs)
        algo = self.algo
        sampling = Sampling(
            temperature=None if self.greedy else algo.temperature,
            generator=self.generator,
            from_noise=self.from_noise,
            noise_per=algo.draws if self.is_rollout else "token",
            explored=self.policy.explored(self.env, algo.min_range),
        )
        drawn = self.policy.sample(obs, sampling)
        check_chunks(drawn, len(obs), self.env, type(self.policy).__name__)
        columns = zip(drawn.actions, drawn.answers, drawn.log_probs, drawn.mask, drawn.values.tolist(), strict=True)
        return [
            SampledChunk(
                actions=actions, answer=answer, log_probs=log_probs, mask=mask, steps=drawn.steps, value=value,
                version=self.version,
            )
            for actions, answer, log_probs, mask, value in columns
        ]  # fmt: skip


def check_chunks(drawn: SampledChunks, num: int, env: ChunkEnv, who: str) -> None:
    """Raises unless `num` chunks for `env` have the form of `SampledChunks`; `who` returned them.

    Raises:
        UsageError: they have another form.
    """
    _, size = drawn.log_probs.shape if drawn.log_probs.ndim == 2 else (0, -1)
    wanted = {
        "actions": (num, env.chunk_steps, len(env.action_low)), "log_probs": (num, max(size, 0)),
        "mask": (num, max(size, 0)), "steps": (max(size, 0),), "values": (num,),
    }  # fmt: skip
    odd = [
        f"{name} {list(np.shape(getattr(drawn, name)))}, not {list(shape)}"
        for name, shape in wanted.items()
        if np.shape(getattr(drawn, name)) != shape
    ]
    if len(drawn.answers) != num:
        odd.append(f"{len(drawn.answers)} answers, not {num}")
    if not odd and size and not 0 <= drawn.steps.min() <= drawn.steps.max() < env.chunk_steps:
        odd.append(f"steps from {drawn.steps.min()} to {drawn.steps.max()}, not 0 to {env.chunk_steps - 1}")
    if odd:
        raise UsageError(
            f"the policy {who} sampled {'; '.join(odd)}", "give arrays of the shapes that SampledChunks names"
        )


def play_chunks(
    envs: ChunkEnvs, task: str, state_ids: NDArray[np.int64], groups: NDArray[np.int64], sampler: ChunkSampler
) -> list[TokenEpisode]:
    """Plays whole episodes and returns them in the order of `state_ids`; those that end early are no longer stepped or
    observed, and those with a lost env are left out.

    Args:
        envs: envs stepped side by side, in batches that they choose.
        task: name of the task.
        state_ids: [N] initial states.
        groups: [N] group of each: equal groups, equal initial states.
        sampler: answers the observations.

    Raises:
        NumericsError: an env returned a non-finite observation or reward.
    """

    def act(slots: Sequence[ChunkSlot]) -> list[SampledChunk]:
        count_progress()
        obs = Observations.joined([slot.obs for slot in slots])
        # before the policy sees them: its answer to NaN would be blamed on the policy
        seen = {"numbers of observations": obs.snapshots, "numbers of proprioception": obs.proprio}
        check_finite(f"the env {task}", _FIX, seen, {"state_ids": np.array([slot.start for slot in slots])})
        answers = sampler.act(obs)
        count_progress()
        return answers

    played: dict[int, TokenEpisode] = {}
    for indices in envs.batches(state_ids):
        slots = [ChunkSlot(sampler.env, task) for _ in indices]
        ended = {slot.index: slot for slot in play(slots, state_ids[indices].tolist(), act, envs)}
        own = {indices[row]: slot for row, slot in ended.items() if row not in envs.lost}
        for index, slot in own.items():
            slot.index, slot.group = int(index), int(groups[index])
            played[slot.index] = slot.episode()
        if own:
            rewards = np.concatenate([played[index].env_rewards for index in own])
            check_finite(f"the env {task}", _FIX, {"rewards": rewards}, {"state_ids": state_ids[indices]})
    # an env may play its episodes in batches of similar ones; the caller gets them in the requested order
    return [played[index] for index in sorted(played)]


def play_held_out(
    sampler: ChunkSampler, envs: ChunkEnvs, state_ids: NDArray[np.int64], greedy: bool
) -> list[TokenEpisode]:
    """Plays whole episodes of an evaluation, as `play_chunks` does; `slot` is each one's index in `state_ids`."""
    # the same random numbers each time: evaluations differ only by the policy
    own = replace(sampler, greedy=greedy, generator=torch.Generator().manual_seed(0))
    return play_chunks(envs, "", state_ids, np.arange(len(state_ids)), own)


class ChunkRunner(BaseRunner):
    """Persistent parallel envs in chunks; each group has an initial state of its own.

    In the learner's process it plays with the policy in training (`policy` is set from outside). An actor has a
    copy of it, whose weights come with every round. Initial states and tokens come from generators of its own.

    Args:
        config: config of the algorithm.
        worker_index: 0 in the learner's process, from 1 on elsewhere.
    """

    policy: VLAPolicy

    def __init__(self, *, config: Any, worker_index: int = 0, **unused: object) -> None:
        super().__init__(config=config, worker_index=worker_index)
        self.chunk_env: ChunkEnv = make_env(config.task, config.env_settings, config.seed)
        self._envs = self.chunk_env.many()
        self._workers: list[ActorHandle] = []
        self._of_workers: dict[tuple[EnvConfig, int, int], WorkerEnvs] = {}
        self._lock = threading.Lock()
        self.begin()
        if worker_index > 0:
            torch.set_num_threads(1)  # an actor has one core
            use_assigned_gpu()
            self.policy = config.policy_for(self.chunk_env)

    @cached_property
    def held_out_env(self) -> ChunkEnv:
        """Returns an env with held-out starts; in the learner's process it is set from outside."""
        return make_env(self.config.task, self.config.env_settings.for_evaluation(), self.config.seed)

    def _envs_of(self, settings: EnvConfig, local: ChunkEnv, group_size: int, number: int = 0) -> ChunkEnvs:
        """Returns envs of `settings`, like `local`, stepped here or by workers; `number` as in `WorkerEnvs`."""
        if not self.config.algo.env_workers:
            return self._envs if local is self.chunk_env else local.many()
        key = settings, group_size, number
        if key in self._of_workers:  # it counts how often all are lost in a row
            return self._of_workers[key]
        if not self._workers:
            count, px = self.config.algo.env_workers, self.policy.image_px
            self._workers = start_workers(count, self.config.task, self.config.seed, px)
        envs = self._of_workers[key] = WorkerEnvs(
            self._workers, settings, local, group_size, self.policy.show, self.config.sample_timeout_s, number,
            self._lock,
        )  # fmt: skip
        return envs

    def begin(self, restart: int = 0) -> None:
        """Starts random numbers and group numbers that no other runner or restart has.

        Args:
            restart: number of times a lost runner was replaced; 0 at the start, when the first actor's numbers equal
                those of a runner in the learner's process.
        """
        branch, seed = self.branch(restart), self.config.seed
        self._states = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(5, *branch)))
        token_seed = int(np.random.SeedSequence(seed, spawn_key=(8, *branch)).generate_state(1)[0]) if branch else seed
        self._tokens = torch.Generator().manual_seed(token_seed)
        # groups are compared by their number, so no two runners may ever give the same one
        number, _ = branch or (0, 0)
        self._next_group = (number * 1_000_000 + restart) * 1_000_000_000

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride] - its callers pass these
        self, *, num_groups: int, statistics: str = "", version: int = 0, players: Sequence[int] = ()
    ) -> Rollout:
        """Plays whole episodes, a group from each of some initial states.

        Args:
            num_groups: number of groups of all players together.
            statistics: statistics of the policy, if it is not the one in training.
            version: version of the policy's weights.
            players: numbers of the runners that share the groups; empty: this one plays all.
        """
        algo, own = self.config.algo, len(self._dealt(num_groups, players))
        if not own:
            return [], []
        state_ids = self._states.integers(FIRST_HELD_OUT_STATE, size=own)
        groups = np.arange(self._next_group, self._next_group + own)
        self._next_group += own
        if statistics:
            self.policy.load_statistics(statistics)
        sampler = ChunkSampler(
            policy=self.policy, env=self.chunk_env, algo=algo, greedy=False, is_rollout=True, generator=self._tokens,
            version=version,
        )  # fmt: skip
        episodes = self._played(state_ids.repeat(algo.group_size), groups.repeat(algo.group_size), sampler)
        if not self.worker_index:
            return episodes, []  # the learner's own policy has seen their images
        images = put_images(self.policy.images.items(), episodes)
        self.policy.images.clear()
        return episodes, images

    def _played(
        self, state_ids: NDArray[np.int64], groups: NDArray[np.int64], sampler: ChunkSampler
    ) -> list[TokenEpisode]:
        """Plays the episodes of a rollout, group by group; if asynchronous, in two halves of whole groups.

        While workers step the envs of one half, the policy samples for the other.
        """
        size, task, settings = self.config.algo.group_size, self.config.task, self.config.env_settings
        if self.config.algo.rollout == "synchronous":
            return play_chunks(self._envs_of(settings, self.chunk_env, size), task, state_ids, groups, sampler)
        middle = (len(groups) // size + 1) // 2 * size
        halves = [half for half in (range(middle), range(middle, len(groups))) if half]
        # made here rather than in a thread, so that envs and random numbers of each half do not depend on timing
        seeds = torch.randint(2**62, (2,), generator=self._tokens).tolist()
        parts = [
            (
                self._envs_of(settings, self.chunk_env, size, number), task, state_ids[half], groups[half],
                replace(sampler, generator=torch.Generator().manual_seed(seeds[number]), lock=self._lock),
            )
            for number, half in enumerate(halves)
        ]  # fmt: skip
        with ThreadPoolExecutor(2, "half-rollouts") as pool:
            episodes = [*pool.map(play_chunks, *zip(*parts, strict=True))]
        return [
            replace(episode, slot=episode.slot + half.start)
            for half, played in zip(halves, episodes, strict=True)
            for episode in played
        ]

    def evaluate(
        self, *, state_ids: NDArray[np.int64], greedy: bool, statistics: str = "", players: Sequence[int] = ()
    ) -> Rollout:
        """Plays a whole episode from each of some held-out states, as `play_held_out` does, without returning images.

        Args:
            state_ids: [N] initial states of all players together.
            greedy: whether to take the most likely chunks.
            statistics: see `sample`.
            players: see `sample`.
        """
        own = self._dealt(len(state_ids), players)
        if not own:
            return [], []
        if statistics:
            self.policy.load_statistics(statistics)
        settings, env = self.config.env_settings.for_evaluation(), self.held_out_env
        sampler = ChunkSampler(policy=self.policy, env=env, algo=self.config.algo)
        episodes = play_held_out(sampler, self._envs_of(settings, env, 1), state_ids[own], greedy)
        if self.worker_index:
            self.policy.images.clear()
        return [replace(episode, slot=own[episode.slot]) for episode in episodes], []

    def _dealt(self, count: int, players: Sequence[int]) -> range:
        """Returns this runner's part of `count` groups or episodes; all if there are no other `players`."""
        if not players:
            return range(count)
        # dealt out in turn, which every runner can compute by itself
        is_player = self.worker_index in players
        return range(players.index(self.worker_index), count, len(players)) if is_player else range(0)

    def act(self, *, values: FloatArray, **turn: Any) -> Rollout:
        """Calls `sample`, or `evaluate` if states are given, with the trained weights `values` `[P]`; for actors."""
        weights = list(self.policy.trained_state().values())
        for own, came in zip(weights, torch.tensor(values).split([own.numel() for own in weights]), strict=True):
            own.copy_(came.view_as(own))
        return self.evaluate(**turn) if "state_ids" in turn else self.sample(**turn)

    def get_spaces(self) -> dict[str, tuple[gym.Space, gym.Space]]:
        """Returns the spaces of snapshots and chunks, for RLlib; policies see images and text instead."""
        snapshots = gym.spaces.Box(-np.inf, np.inf, (self.chunk_env.snapshot_size,), np.float32)
        # an action in RLlib's sense is a whole chunk: L actions of the env
        low = np.tile(self.chunk_env.action_low, (self.chunk_env.chunk_steps, 1))
        high = np.tile(self.chunk_env.action_high, (self.chunk_env.chunk_steps, 1))
        return {DEFAULT_MODULE_ID: (snapshots, gym.spaces.Box(low, high, dtype=np.float32))}

    def stop(self) -> None:
        """Closes the env, and ends the workers."""
        self.chunk_env.close()
        for worker in self._workers:
            ray.kill(worker)

    def save_tree(self) -> dict[str, Any]:
        """Returns generators and the next group's number; between rounds no episode is running."""
        return {
            "states": self._states.bit_generator.state,
            "tokens": self._tokens.get_state().numpy(),
            "next_group": self._next_group,
        }

    def load_tree(self, tree: dict[str, Any]) -> None:
        self._states.bit_generator.state = tree["states"]
        self._tokens.set_state(torch.as_tensor(tree["tokens"]))
        self._next_group = tree["next_group"]
