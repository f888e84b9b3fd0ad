"""Plays the envs with the learner's policy, in its process. RLlib builds the runner and the algorithm calls it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID

from rlvlm.algorithms.base import BaseRunner
from rlvlm.algorithms.env_slots import EnvSlot
from rlvlm.algorithms.ppo_vlm.play import Actor, PlayedTurn
from rlvlm.core.steps import FloatArray
from rlvlm.core.turns import TurnEpisode
from rlvlm.envs.registry import make_env

_FIRST_TRAINING_SEED = 2**32
"""Seeds of training episodes lie here and above: evaluations, which count from 1,000,000, never share one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """What was played between two updates by W envs."""

    turns: Sequence[Sequence[PlayedTurn | None]]
    """T rows of W turns; None where an env's only episode was over."""
    episodes: Sequence[TurnEpisode]
    """Those that ended."""
    groups: Sequence[int]
    """[W] envs with the same number started from the same seed."""
    snapshots: Mapping[bytes, FloatArray]
    """[S] from which each image can be drawn, by its key: of every turn and of every state after a cut."""

    def __len__(self) -> int:
        return sum(played is not None for row in self.turns for played in row)


class TurnRunner(BaseRunner):
    """W envs in turns, played side by side by the policy that is trained.

    Seeds of episodes and replies come from one generator of the runner's own.

    Args:
        config: a `PPOVLMConfig`.
        worker_index: 0; there are no others.
    """

    config: Any
    actor: Actor
    """Set by the algorithm: plays with the learner's policy."""
    watch: Callable[[Sequence[PlayedTurn | None]], None] | None = None
    """Set by the algorithm: told of each row of turns as soon as it was played."""

    def __init__(self, *, config: Any, worker_index: int = 0, **unused: Any) -> None:
        super().__init__(config=config, worker_index=worker_index)
        self._noise = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(3,)))
        task, world = config.task, config.env_settings
        self.slots = [EnvSlot(make_env(task, world, config.seed), task) for _ in range(config.ppo.num_envs)]
        for slot in self.slots:
            slot.begin(self._fresh_seed())

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride] - who calls it passes these
        self, *, num_turns: int
    ) -> Rollout:
        """`num_turns` turns of every env; an episode that ends is followed by the next at once."""
        rows, episodes = [], []
        snapshots: dict[bytes, FloatArray] = {}
        for _ in range(num_turns):
            row = self._turn_of(self.slots, snapshots)
            for slot, played in zip(self.slots, row, strict=True):
                if played.outcome.episode is not None:
                    episodes.append(played.outcome.episode)
                    slot.begin(self._fresh_seed())
            rows.append(row)
            if self.watch is not None:
                self.watch(row)
        last = [slot.obs for slot in self.slots]
        self.actor.show(self.slots, last)  # the critic is asked about the last states
        snapshots |= {obs.image: slot.turn.snapshot for slot, obs in zip(self.slots, last, strict=True)}
        return Rollout(turns=rows, episodes=episodes, groups=range(len(self.slots)), snapshots=snapshots)

    def sample_groups(self, *, group_size: int) -> Rollout:
        """One whole episode of every env; `group_size` neighbours start from the same seed."""
        groups = [place // group_size for place in range(len(self.slots))]
        seeds = [self._fresh_seed() for _ in range(groups[-1] + 1)]
        for slot, group in zip(self.slots, groups, strict=True):
            slot.begin(seeds[group])
        rows, episodes, still = [], [], list(range(len(self.slots)))
        snapshots: dict[bytes, FloatArray] = {}
        while still:
            row: list[PlayedTurn | None] = [None] * len(self.slots)
            going_on = []
            played_now = self._turn_of([self.slots[place] for place in still], snapshots)
            for place, played in zip(still, played_now, strict=True):
                row[place] = played
                if played.outcome.episode is None:
                    going_on.append(place)
                else:
                    episodes.append(played.outcome.episode)
            rows.append(row)
            if self.watch is not None:
                self.watch(row)
            still = going_on
        return Rollout(turns=rows, episodes=episodes, groups=groups, snapshots=snapshots)

    def _turn_of(self, slots: Sequence[EnvSlot], snapshots: dict[bytes, FloatArray]) -> list[PlayedTurn]:
        """A turn of each slot, whose images' snapshots are added to `snapshots`.

        States that a time limit cut off are shown to the policy: its critic is asked about them next.
        """
        snapshots |= {slot.obs.image: slot.turn.snapshot for slot in slots}
        outputs = self.actor.act(slots, [int(self._noise.integers(2**63)) for _ in slots])
        row = []
        for slot, output in zip(slots, outputs, strict=True):
            outcome = slot.play(output.text)
            if outcome.is_end and not outcome.is_terminated:
                self.actor.show([slot], [outcome.next_obs])
                snapshots[outcome.next_obs.image] = slot.turn.snapshot
            row.append(PlayedTurn(output=output, outcome=outcome))
        return row

    def _fresh_seed(self) -> int:
        return int(self._noise.integers(_FIRST_TRAINING_SEED, 2 * _FIRST_TRAINING_SEED))

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """Snapshots and the actions' numbers, under the name RLlib gives to the only module."""
        world = self.slots[0].env
        snapshots = gym.spaces.Box(-np.inf, np.inf, (world.snapshot_size,), np.float32)
        return {DEFAULT_MODULE_ID: (snapshots, gym.spaces.Discrete(len(world.action_names)))}

    def save_tree(self) -> dict[str, Any]:
        """Envs, running episodes and seeds to come: after `load_tree` the future is bit-identical."""
        return {"seats": [slot.save_tree() for slot in self.slots], "noise": self._noise.bit_generator.state}

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned."""
        for slot, saved in zip(self.slots, tree["seats"], strict=True):
            slot.load_tree(saved)
        self._noise.bit_generator.state = tree["noise"]

    def stop(self) -> None:
        """Closes the envs."""
        for slot in self.slots:
            slot.env.close()
