"""Plays envs that are talked to with a policy: the actor asks an engine for the replies of many slots, the runner plays
the rollouts of a run, and `play_turns` whole episodes.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID

from rlvlm.algorithms.base import BaseRunner
from rlvlm.algorithms.policy_gradient.slots import EnvSlot
from rlvlm.core.episodes import Observations, SampledReply, TokenEpisode
from rlvlm.envs.images import draw_history
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
        return [_readable(slot, reply) for slot, reply in zip(slots, replies, strict=True)]

    def begin(self, slot: EnvSlot, seed: int) -> Future[Any]:
        """Asks for a reply to the present turn of `slot` and returns at once; `end` has it when the result is there."""
        [asked] = self._engine.begin(  # pyright: ignore[reportAttributeAccessIssue] - the config has checked the engine
            self.show([slot]), [seed], max_new_tokens=self._max_reply_tokens, temperature=self._temperature
        )
        return asked

    def end(self, slot: EnvSlot, asked: Future[Any]) -> SampledReply:
        """The reply that `begin` has asked for."""
        [reply] = self._engine.end([asked])  # pyright: ignore[reportAttributeAccessIssue]
        return _readable(slot, reply)

    def show(self, slots: Sequence[EnvSlot]) -> Observations:
        """Observations of `slots` now; draws and encodes what the engine does not have of it."""
        obs = Observations.joined([slot.obs for slot in slots])
        if missing := self._engine.missing(obs.images):
            frames = draw_history(slots[0].env, obs.snapshots[missing])
            self._engine.show([obs.images[index] for index in missing], frames)
        return obs


def _readable(slot: EnvSlot, reply: SampledReply) -> SampledReply:
    """The reply with the action head's choice in the words that the env reads; one in words as it is."""
    return reply if reply.action is None else replace(reply, text=slot.env.action_text(reply.action))


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
    episodes = {slot.index: slot.episode() for slot in play(slots, seeds, act)}
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
            EnvSlot(make_env(task, settings, config.seed), task, index, config.history)
            for index in range(config.algo.num_envs)
        ]
        self._next_group = 0
        for slot in self.slots:
            slot.begin(self._fresh_seed())

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride] - its callers pass these
        self, *, num_turns: int
    ) -> list[TokenEpisode]:
        """The pieces of `num_turns` turns of every env, or, asynchronous, of as many of all together; an episode that
        ends is followed by the next at once.
        """
        for slot in self.slots:
            slot.begin_piece(self._new_group())
        episodes: list[TokenEpisode] = []
        for slot in self._played(self.slots, num_turns):
            if slot.is_over:
                episodes.append(slot.episode())
                slot.begin(self._fresh_seed(), self._new_group(), int(episodes[-1].played_at[-1]) + 1)
        self.actor.show(self.slots)  # the critic is asked about the last states
        return episodes + [slot.episode() for slot in self.slots if slot.piece_len]

    def sample_groups(self, *, group_size: int) -> list[TokenEpisode]:
        """One whole episode of every env; `group_size` neighbours start from the same seed."""
        # one seed for a group: its episodes differ by what the policy draws, and by nothing else
        starts = [(self._fresh_seed(), self._new_group()) for _ in range(len(self.slots) // group_size)]
        for index, slot in enumerate(self.slots):
            slot.begin(*starts[index // group_size])
        for _ in self._played(self.slots, None):
            continue
        return [slot.episode() for slot in self.slots]

    def _new_group(self) -> int:
        self._next_group += 1
        return self._next_group - 1

    def _played(self, slots: Sequence[EnvSlot], num_turns: int | None) -> Iterator[EnvSlot]:
        """Yields each of `slots` after each of its turns; in one that is over an episode may be begun, else it stays.

        Row by row or, where the rollout is asynchronous, each as its reply comes.

        Args:
            slots: with an episode under way.
            num_turns: of each slot, or as many of all together; None: until all episodes are over.
        """
        if self.config.algo.rollout == "synchronous":
            for _ in itertools.count() if num_turns is None else range(num_turns):
                if not (running := [slot for slot in slots if not slot.is_over]):
                    return
                self._play(running, self.actor.act(running, [self._reply_seed() for _ in running]))
                yield from running
            return
        left = math.inf if num_turns is None else num_turns * len(slots)
        waiting, under_way = deque(slots), dict[Future[Any], EnvSlot]()
        while under_way or (waiting and left):
            while waiting and left:
                slot = waiting.popleft()
                under_way[self.actor.begin(slot, self._reply_seed())] = slot
                left -= 1
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                slot = under_way.pop(future)
                self._play([slot], [self.actor.end(slot, future)])
                yield slot
                if not slot.is_over:
                    waiting.append(slot)

    def _play(self, slots: Sequence[EnvSlot], replies: Sequence[SampledReply]) -> None:
        """Plays a turn of each of `slots`.

        States that a time limit cut off are shown to the policy: its critic is asked about them next.
        """
        for slot, reply in zip(slots, replies, strict=True):
            slot.play(reply)
        for slot in slots:
            if slot.is_over and not slot.is_terminated:
                self.actor.show([slot])
        if self.show is not None:
            self.show([slot.episode(only_newest=True) for slot in slots])

    def _reply_seed(self) -> int:
        return int(self._noise.integers(2**63))

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
        for slot, saved in zip(self.slots, tree["slots"], strict=True):
            slot.set_state(saved)
        self._noise.bit_generator.state = tree["noise"]

    def stop(self) -> None:
        """Closes the envs."""
        for slot in self.slots:
            slot.env.close()
