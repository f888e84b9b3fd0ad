"""Plays envs that are talked to with a policy: the actor asks an engine for the replies of many slots, the runner plays
the rollouts of a run, and `play_turns` whole episodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID

from rlvlm.algorithms.base import BaseRunner
from rlvlm.algorithms.policy_gradient.slots import EnvSlot
from rlvlm.core.episodes import Observations, SampledReply, TokenEpisode
from rlvlm.envs.playing import play
from rlvlm.envs.registry import make_env
from rlvlm.policies.vlm.engine import Engine

_FIRST_TRAINING_SEED = 2**32
"""Seeds of training episodes lie here and above: evaluations, which count from 1,000,000, never share one."""


class Actor:
    """Asks a policy engine for the replies of many slots at once, showing it what it has not seen.

    Args:
        engine: in process or served.
        max_reply_tokens: a reply is cut after so many.
        temperature: of sampling.
    """

    def __init__(self, engine: Engine, max_reply_tokens: int, temperature: float) -> None:
        self._engine = engine
        self._max_reply_tokens = max_reply_tokens
        self._temperature = temperature

    def act(self, slots: Sequence[EnvSlot], seeds: Sequence[int], greedy: bool = False) -> list[SampledReply]:
        """A reply to the present turn of every slot, in their order; an action head's action is one token.

        Args:
            slots: of one task.
            seeds: of each reply alone.
            greedy: the likeliest token each time.
        """
        replies = self._engine.reply(
            self.show(slots), seeds,
            max_new_tokens=self._max_reply_tokens, temperature=self._temperature, greedy=greedy,
        )  # fmt: skip
        # the action head's choice, in the words that the env reads
        return [
            reply if reply.action is None else replace(reply, text=slot.env.action_text(reply.action))
            for slot, reply in zip(slots, replies, strict=True)
        ]

    def show(self, slots: Sequence[EnvSlot]) -> Observations:
        """Observations of `slots` now; draws and encodes what the engine does not have of it."""
        obs = Observations.joined([slot.obs for slot in slots])
        if missing := self._engine.missing(obs.images):
            frames = slots[0].env.draw(obs.snapshots[missing])
            self._engine.show([obs.images[index] for index in missing], frames)
        return obs


def play_turns(
    actor: Actor, make_slot: Callable[[], EnvSlot], seeds: Sequence[int], num_slots: int, greedy: bool
) -> list[TokenEpisode]:
    """A whole episode from a reset with each seed, in their order.

    Args:
        actor: plays.
        make_slot: makes a slot with an env of its own.
        seeds: >= 0.
        num_slots: episodes under way at once.
        greedy: the likeliest token each time.
    """

    def act(slots: Sequence[EnvSlot]) -> list[SampledReply]:
        # from each episode's own generator: what else is under way makes no difference to a reply
        return actor.act(slots, [int(slot.rng.integers(2**63)) for slot in slots], greedy)

    slots = [make_slot() for _ in range(min(num_slots, len(seeds)))]
    episodes = {slot.place: slot.episode() for slot in play(slots, seeds, act)}
    return [episodes[number] for number in range(len(seeds))]


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
            EnvSlot(make_env(task, settings, config.seed), task, index) for index in range(config.algo.num_envs)
        ]
        self._next_group = 0
        for slot in self.slots:
            slot.begin(self._fresh_seed())

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride] - its callers pass these
        self, *, num_turns: int
    ) -> list[TokenEpisode]:
        """The pieces of `num_turns` turns of every env; an episode that ends is followed by the next at once."""
        for slot in self.slots:
            slot.begin_piece(self._new_group())
        episodes: list[TokenEpisode] = []
        for turn in range(num_turns):
            for slot in self._play_row(self.slots):
                episodes.append(slot.episode())
                slot.begin(self._fresh_seed(), self._new_group(), turn + 1)
        self.actor.show(self.slots)  # the critic is asked about the last states
        return episodes + [slot.episode() for slot in self.slots if slot.piece_len]

    def sample_groups(self, *, group_size: int) -> list[TokenEpisode]:
        """One whole episode of every env; `group_size` neighbours start from the same seed."""
        # one seed for a group: its episodes differ by what the policy draws, and by nothing else
        starts = [(self._fresh_seed(), self._new_group()) for _ in range(len(self.slots) // group_size)]
        for index, slot in enumerate(self.slots):
            slot.begin(*starts[index // group_size])
        running = list(self.slots)
        while running:
            self._play_row(running)
            running = [slot for slot in running if not slot.is_over]
        return [slot.episode() for slot in self.slots]

    def _new_group(self) -> int:
        self._next_group += 1
        return self._next_group - 1

    def _play_row(self, slots: Sequence[EnvSlot]) -> list[EnvSlot]:
        """A turn of each of `slots`; those whose episode ended with it.

        States that a time limit cut off are shown to the policy: its critic is asked about them next.
        """
        replies = self.actor.act(slots, [int(self._noise.integers(2**63)) for _ in slots])
        ended = [slot for slot, reply in zip(slots, replies, strict=True) if slot.play(reply)]
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
        return {"slots": [slot.get_state() for slot in self.slots], "noise": self._noise.bit_generator.state}

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned."""
        for slot, saved in zip(self.slots, tree["slots"], strict=True):
            slot.set_state(saved)
        self._noise.bit_generator.state = tree["noise"]

    def stop(self) -> None:
        """Closes the envs."""
        for slot in self.slots:
            slot.env.close()
