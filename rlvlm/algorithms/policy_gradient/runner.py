"""Plays rollouts. RLlib builds runners, in the learner's process or as actors; a runner group calls them."""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rlvlm.algorithms.base import BaseRunner
from rlvlm.algorithms.env_slots import EnvSlot
from rlvlm.algorithms.policy_gradient.env_workers import WorkerEnvs, start_workers
from rlvlm.algorithms.policy_gradient.rollouts import Actor, ChunkSampler, play_chunks
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import FIRST_HELD_OUT_STATE, ChunkEnv, ChunkEnvs
from rlvlm.envs.registry import make_env
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.policy import VLAPolicy
from rlvlm.policies.vla.tokens import ActionScale

_FIRST_TRAINING_SEED = 2**32
"""Seeds of training episodes lie here and above: evaluations, which count from 1,000,000, never share one."""
Rollout = tuple[list[TokenEpisode], dict[bytes, Frames]]
"""Episodes, those of a group being neighbours, and the images that their policy looked at, where the learner is in
another process and would have to draw them again."""


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """One rollout of those of several runners, in their order."""
    images = {key: image for _, kept in rollouts for key, image in kept.items()}
    return [episode for episodes, _ in rollouts for episode in episodes], images


class TurnRunner(BaseRunner):
    """Envs that are talked to, played side by side by the policy that is trained, in its process.

    Seeds of episodes and replies come from one generator of the runner's own.

    Args:
        config: of the algorithm.
        worker_index: 0; there are no others.
    """

    actor: Actor
    """Set by the algorithm: plays with the learner's policy."""
    show: Callable[[Sequence[TokenEpisode]], None] | None = None
    """Set by the algorithm: is handed each row of turns as soon as it was played."""

    def __init__(self, *, config: Any, worker_index: int = 0, **unused: Any) -> None:
        super().__init__(config=config, worker_index=worker_index)
        self._noise = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(3,)))
        task, settings = config.task, config.env_settings
        self.slots = [
            EnvSlot(make_env(task, settings, config.seed), task, place) for place in range(config.algo.num_envs)
        ]
        self._next_group = 0
        for slot in self.slots:
            slot.begin(self._fresh_seed())

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride] - who calls it passes these
        self, *, num_turns: int
    ) -> list[TokenEpisode]:
        """The pieces of `num_turns` turns of every env; an episode that ends is followed by the next at once."""
        for slot in self.slots:
            slot.begin_piece(self._new_group())
        episodes: list[TokenEpisode] = []
        for at in range(num_turns):
            for slot in self._play_row(at, self.slots):
                episodes.append(slot.episode())
                slot.begin(self._fresh_seed(), self._new_group())
        self.actor.show(self.slots)  # the critic is asked about the last states
        return episodes + [slot.episode() for slot in self.slots if slot.piece_len]

    def sample_groups(self, *, group_size: int) -> list[TokenEpisode]:
        """One whole episode of every env; `group_size` neighbours start from the same seed."""
        # one seed for a group: its episodes differ by what the policy draws, and by nothing else
        starts = [(self._fresh_seed(), self._new_group()) for _ in range(len(self.slots) // group_size)]
        for place, slot in enumerate(self.slots):
            slot.begin(*starts[place // group_size])
        running, at = list(self.slots), 0
        while running:
            ended = self._play_row(at, running)
            running, at = [slot for slot in running if slot not in ended], at + 1
        return [slot.episode() for slot in self.slots]

    def _new_group(self) -> int:
        self._next_group += 1
        return self._next_group - 1

    def _play_row(self, at: int, slots: Sequence[EnvSlot]) -> list[EnvSlot]:
        """A turn of each of `slots`; those whose episode ended with it.

        States that a time limit cut off are shown to the policy: its critic is asked about them next.
        """
        replies = self.actor.act(slots, [int(self._noise.integers(2**63)) for _ in slots])
        ended = [slot for slot, reply in zip(slots, replies, strict=True) if slot.play(reply, at)]
        for slot in ended:
            if not slot.is_terminated:
                self.actor.show([slot])
        if self.show is not None:
            self.show([slot.episode(only_newest=True) for slot in slots])
        return ended

    def _fresh_seed(self) -> int:
        return int(self._noise.integers(_FIRST_TRAINING_SEED, 2 * _FIRST_TRAINING_SEED))

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """Snapshots and the actions' numbers, under the name RLlib gives to the only module."""
        env = self.slots[0].env
        snapshots = gym.spaces.Box(-np.inf, np.inf, (env.snapshot_size,), np.float32)
        return {DEFAULT_MODULE_ID: (snapshots, gym.spaces.Discrete(len(env.action_names)))}

    def save_tree(self) -> dict[str, Any]:
        """Envs, running episodes and seeds to come: after `load_tree` the future is bit-identical."""
        return {"seats": [slot.get_state() for slot in self.slots], "noise": self._noise.bit_generator.state}

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned."""
        for slot, saved in zip(self.slots, tree["seats"], strict=True):
            slot.set_state(saved)
        self._noise.bit_generator.state = tree["noise"]

    def stop(self) -> None:
        """Closes the envs."""
        for slot in self.slots:
            slot.env.close()


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
        self._many = self.chunk_env.many()
        self._workers: list[Any] = []
        self._of_workers: dict[tuple[EnvConfig, int], WorkerEnvs] = {}
        self.begin()
        if worker_index > 0:
            torch.set_num_threads(1)  # an actor has one core
            self.policy = build_policy(config.policy, self.chunk_env)

    def worker_envs(self, settings: EnvConfig, local: ChunkEnv, group_size: int) -> ChunkEnvs:
        """Envs of `settings`, as `local` is one, that workers of this runner's own step."""
        key = settings, group_size
        if key in self._of_workers:  # it counts how often all are lost in a row
            return self._of_workers[key]
        if not self._workers:
            count, px = self.config.algo.env_workers, self.policy.image_px
            self._workers = start_workers(count, self.config.task, self.config.seed, px)
        envs = self._of_workers[key] = WorkerEnvs(self._workers, settings, local, group_size, self.policy.show)
        return envs

    def begin(self, restart: int = 0) -> None:
        """Random numbers and groups that no other runner or restart has.

        Args:
            restart: counts the times a lost runner was replaced; 0 at the start. Then the first actor's numbers are
                those that a runner in the learner's process would have.
        """
        # which runner this is, the learner's process and the first actor being one, and how often it was replaced
        own = (max(self.worker_index - 1, 0), restart)
        branch = own if any(own) else ()  # so a run with one actor plays what a run without any would play
        seed = self.config.seed
        self._states = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(5, *branch)))
        token_seed = int(np.random.SeedSequence(seed, spawn_key=(8, *branch)).generate_state(1)[0]) if branch else seed
        self._tokens = torch.Generator().manual_seed(token_seed)
        # groups are compared by their number, so no two runners may ever give the same one
        self._next_group = (own[0] * 1_000_000 + restart) * 1_000_000_000

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride] - who calls it passes these
        self, *, num_groups: int, scale: ActionScale, version: int = 0, players: Sequence[int] = ()
    ) -> Rollout:
        """Whole episodes, a group of each of some initial states.

        Args:
            num_groups: of all players together.
            scale: of the policy's actions.
            version: of the policy's weights.
            players: numbers of the runners that share the groups out; empty: this one plays all.
        """
        algo, own = self.config.algo, num_groups
        if players:
            # dealt out in turns, as every runner can tell by itself: none has to be asked how many it plays
            is_one = self.worker_index in players
            own = len(range(players.index(self.worker_index), num_groups, len(players))) if is_one else 0
        if not own:
            return [], {}
        state_ids = self._states.integers(FIRST_HELD_OUT_STATE, size=own)
        groups = np.arange(self._next_group, self._next_group + own)
        self._next_group += own
        sampler = ChunkSampler(
            policy=self.policy, env=self.chunk_env, scale=scale, temperature=algo.temperature, generator=self._tokens,
            shared=self.chunk_env.chunk_steps if algo.draws == "chunk" else 1, least_range=algo.least_range,
            version=version,
        )  # fmt: skip
        size = algo.group_size
        envs = self.worker_envs(self.config.env_settings, self.chunk_env, size) if algo.env_workers else self._many
        episodes = play_chunks(envs, self.config.task, state_ids.repeat(size), groups.repeat(size), sampler)
        if not self.worker_index:
            return episodes, {}  # the learner's own policy has looked at them
        images = self.policy.images.items()
        self.policy.images.clear()
        return episodes, images

    def act(self, *, values: FloatArray, **turn: Any) -> Rollout:
        """`sample` with the policy whose weights that learn are `values` `[P]`; for actors."""
        weights = list(self.policy.trained_state().values())
        for own, came in zip(weights, torch.tensor(values).split([own.numel() for own in weights]), strict=True):
            own.copy_(came.view_as(own))
        return self.sample(**turn)

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
        """Restores what `save_tree` returned."""
        self._states.bit_generator.state = tree["states"]
        self._tokens.set_state(torch.as_tensor(tree["tokens"]))
        self._next_group = tree["next_group"]
