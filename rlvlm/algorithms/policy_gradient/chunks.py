"""Plays envs that are driven by chunks of actions with a policy: the sampler draws them, `play_chunks` plays whole
episodes side by side, the runner those of a run, in the learner's process or as an actor.
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
from ray.rllib.core import DEFAULT_MODULE_ID

from rlvlm.algorithms.base import BaseRunner
from rlvlm.algorithms.learners import use_assigned_gpu
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.env_workers import WorkerEnvs, start_workers
from rlvlm.algorithms.policy_gradient.images import put_images
from rlvlm.algorithms.policy_gradient.slots import ChunkSlot
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
from rlvlm.policies.protocol import look
from rlvlm.policies.vla.policy import SampledChunks, Sampling, VLAPolicy

_FIX = "mend the env; rlvlm check-task looks at it"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSampler:
    """How chunks are drawn, or taken, of a policy."""

    policy: VLAPolicy
    env: ChunkEnv
    """Draws what the policy looks at."""
    algo: PolicyGradientConfig = field(default_factory=PolicyGradientConfig)
    """Temperature, and what is explored."""
    greedy: bool = True
    """Whether the likeliest chunks are taken."""
    is_rollout: bool = False
    """Whether random numbers are shared as `algo.draws` says, which evaluations never do."""
    generator: torch.Generator | None = None
    """Generator that samples chunks, on the CPU."""
    version: int = 0
    """Version of the weights."""
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """Held while the policy is used, where several threads play with it."""

    def act(self, obs: Observations) -> list[SampledChunk]:
        """A chunk for each observation."""
        with self.lock:
            return self._act(obs)

    def _act(self, obs: Observations) -> list[SampledChunk]:
        look(self.policy, self.env, obs)
        algo = self.algo
        sampling = Sampling(
            temperature=None if self.greedy else algo.temperature,
            generator=self.generator,
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
    """Raises unless `num` chunks for `env` are what `SampledChunks` says they are; `who` gave them.

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
    """Whole episodes, in the order of `state_ids`; those that end early are neither driven nor looked at any more, and
    those whose env was lost are left out.

    Args:
        envs: driven side by side, as many at once as they say.
        task: their name.
        state_ids: [N] initial states.
        groups: [N] the group that each belongs to: equal groups, equal initial states.
        sampler: answers what is observed.

    Raises:
        NumericsError: what an env shows or gives is not finite.
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
    # an env may play its episodes in batches of like ones; the caller gets them in the order it asked for
    return [played[index] for index in sorted(played)]


def play_held_out(
    sampler: ChunkSampler, envs: ChunkEnvs, state_ids: NDArray[np.int64], greedy: bool
) -> list[TokenEpisode]:
    """Whole episodes of an evaluation, as `play_chunks` gives them; `slot` is the place of each in `state_ids`."""
    # the same draws each time: evaluations differ by the policy alone
    own = replace(sampler, greedy=greedy, generator=torch.Generator().manual_seed(0))
    return play_chunks(envs, "", state_ids, np.arange(len(state_ids)), own)


class ChunkRunner(BaseRunner):
    """Envs in chunks side by side, persistent, each group from an initial state of its own.

    In the learner's process it plays with the very policy that is trained (`policy` is set from outside). An actor has
    a policy of its own, whose weights come with every round. Initial states and tokens come from generators of the
    runner's own.

    Args:
        config: of the algorithm.
        worker_index: 0 in the learner's process, from 1 on elsewhere.
    """

    policy: VLAPolicy

    def __init__(self, *, config: Any, worker_index: int = 0, **unused: Any) -> None:
        super().__init__(config=config, worker_index=worker_index)
        self.chunk_env: ChunkEnv = make_env(config.task, config.env_settings, config.seed)
        self._envs = self.chunk_env.many()
        self._workers: list[Any] = []
        self._of_workers: dict[tuple[EnvConfig, int, int], WorkerEnvs] = {}
        self._lock = threading.Lock()
        self.begin()
        if worker_index > 0:
            torch.set_num_threads(1)  # an actor has one core
            use_assigned_gpu()
            self.policy = config.policy_for(self.chunk_env)

    @cached_property
    def held_out_env(self) -> ChunkEnv:
        """An env of held-out starts; in the learner's process it is set from outside."""
        return make_env(self.config.task, self.config.env_settings.for_evaluation(), self.config.seed)

    def _envs_of(self, settings: EnvConfig, local: ChunkEnv, group_size: int, number: int = 0) -> ChunkEnvs:
        """Envs of `settings`, as `local` is one: stepped here, or by workers of this runner's own; `number` as of
        `WorkerEnvs`.
        """
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
        """Random numbers and groups that no other runner or restart has.

        Args:
            restart: counts the times a lost runner was replaced; 0 at the start. Then the first actor's numbers are
                those that a runner in the learner's process would have.
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
        """Whole episodes, a group of each of some initial states.

        Args:
            num_groups: of all players together.
            statistics: of the policy, where it is not the very one that is trained.
            version: of the policy's weights.
            players: numbers of the runners that share the groups out; empty: this one plays all.
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
            return episodes, []  # the learner's own policy has looked at them
        images = put_images(self.policy.images.items(), episodes)
        self.policy.images.clear()
        return episodes, images

    def _played(
        self, state_ids: NDArray[np.int64], groups: NDArray[np.int64], sampler: ChunkSampler
    ) -> list[TokenEpisode]:
        """The episodes of a rollout, group by group; asynchronous, in two halves of whole groups.

        While workers step the envs of one half, the policy samples for the other.
        """
        size, task, settings = self.config.algo.group_size, self.config.task, self.config.env_settings
        if self.config.algo.rollout == "synchronous":
            return play_chunks(self._envs_of(settings, self.chunk_env, size), task, state_ids, groups, sampler)
        middle = (len(groups) // size + 1) // 2 * size
        halves = [half for half in (range(middle), range(middle, len(groups))) if half]
        # made here and not in a thread: envs, and random numbers of each half's own, whichever half is faster
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
        """A whole episode from each of some held-out states, as `play_held_out` gives them, without images.

        Args:
            state_ids: [N] of all players together.
            greedy: whether the likeliest chunks are taken.
            statistics: as `sample` takes them.
            players: likewise.
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
        """Which of `count` groups or episodes fall to this runner; all, where there are no other `players`."""
        if not players:
            return range(count)
        # dealt out in turns, as every runner can tell by itself: none has to be asked how many it plays
        is_player = self.worker_index in players
        return range(players.index(self.worker_index), count, len(players)) if is_player else range(0)

    def act(self, *, values: FloatArray, **turn: Any) -> Rollout:
        """What `sample`, or `evaluate` where states are named, gives with the policy whose weights that learn are
        `values` `[P]`; for actors.
        """
        weights = list(self.policy.trained_state().values())
        for own, came in zip(weights, torch.tensor(values).split([own.numel() for own in weights]), strict=True):
            own.copy_(came.view_as(own))
        return self.evaluate(**turn) if "state_ids" in turn else self.sample(**turn)

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """Snapshots and chunks, for RLlib; policies see images and words instead."""
        snapshots = gym.spaces.Box(-np.inf, np.inf, (self.chunk_env.snapshot_size,), np.float32)
        # an action of RLlib's is a whole chunk: L actions of the env
        low = np.tile(self.chunk_env.action_low, (self.chunk_env.chunk_steps, 1))
        high = np.tile(self.chunk_env.action_high, (self.chunk_env.chunk_steps, 1))
        return {DEFAULT_MODULE_ID: (snapshots, gym.spaces.Box(low, high, dtype=np.float32))}

    def stop(self) -> None:
        """Closes the env, and ends the workers."""
        self.chunk_env.close()
        for worker in self._workers:
            ray.kill(worker)

    def save_tree(self) -> dict[str, Any]:
        """Generators and the next group's number; between rounds no episode is under way."""
        return {
            "states": self._states.bit_generator.state,
            "tokens": self._tokens.get_state().numpy(),
            "next_group": self._next_group,
        }

    def load_tree(self, tree: dict[str, Any]) -> None:
        self._states.bit_generator.state = tree["states"]
        self._tokens.set_state(torch.as_tensor(tree["tokens"]))
        self._next_group = tree["next_group"]
