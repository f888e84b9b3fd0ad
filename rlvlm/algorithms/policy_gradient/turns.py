"""Rollouts in envs in turns: the actor asks an engine for the replies of many slots, the runner plays the rollouts of a
run, and `play_turns` whole episodes.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID

from rlvlm.algorithms.base import BaseRunner
from rlvlm.core.episodes import Observations, SampledReply, TokenEpisode
from rlvlm.envs.images import draw_history
from rlvlm.envs.playing import play
from rlvlm.envs.registry import make_env
from rlvlm.envs.slots import EnvSlot
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.engine import Engine

logger = logging.getLogger(__name__)

_FIRST_TRAINING_SEED = 2**32
"""First seed of training episodes: evaluations, which count from 1,000,000, never share one."""


class Actor:
    """Asks a policy engine for the replies of many slots at once, and shows it new images.

    Args:
        engine: engine in process or served.
        sampling: settings with which replies are sampled.
    """

    def __init__(self, engine: Engine, sampling: ReplySampling) -> None:
        self._engine = engine
        self._sampling = sampling

    @property
    def version(self) -> int:
        """Version of the weights for the next replies."""
        return self._engine.version

    def act(self, slots: Sequence[EnvSlot], seeds: Sequence[int], greedy: bool = False) -> list[SampledReply]:
        """Returns a reply to the present turn of every slot, in order: a text, or the number of an action.

        Args:
            slots: slots of one task.
            seeds: seed of each reply.
            greedy: whether to take the most likely token each time.
        """
        return self._engine.reply(self.show(slots), seeds, replace(self._sampling, greedy=greedy))

    def begin(self, slot: EnvSlot, seed: int) -> Future[SampledReply]:
        """Requests a reply to the present turn of `slot` and returns at once; `end` returns it once it is there."""
        [asked] = self._engine.begin(  # pyright: ignore[reportAttributeAccessIssue] - the config has checked the engine
            self.show([slot]), [seed], self._sampling
        )
        return asked

    def end(self, asked: Future[SampledReply]) -> SampledReply:
        """Returns the reply requested by `begin`."""
        [reply] = self._engine.end([asked])  # pyright: ignore[reportAttributeAccessIssue]
        return reply

    def show(self, slots: Sequence[EnvSlot]) -> Observations:
        """Returns the present observations of `slots`; draws and shows images that the engine lacks."""
        obs = Observations.joined([slot.obs for slot in slots])
        if missing := self._engine.missing(obs.images):
            frames = draw_history(slots[0].env, obs.snapshots[missing])
            self._engine.show([obs.images[index] for index in missing], frames)
        return obs


def play_turns(
    actor: Actor, make_slot: Callable[[], EnvSlot], seeds: Sequence[int], num_slots: int, greedy: bool
) -> list[TokenEpisode]:
    """Plays a whole episode from each seed and returns them in order.

    Args:
        actor: actor that answers.
        make_slot: makes a slot with an env of its own.
        seeds: seeds >= 0.
        num_slots: number of concurrent episodes.
        greedy: whether to take the most likely token each time.
    """

    def act(slots: Sequence[EnvSlot]) -> list[SampledReply]:
        # from each episode's own generator: a reply does not depend on other episodes
        return actor.act(slots, [int(slot.rng.integers(2**63)) for slot in slots], greedy)

    slots = [make_slot() for _ in range(min(num_slots, len(seeds)))]
    episodes = {slot.index: slot.episode() for slot in play(slots, seeds, act)}
    return [episodes[number] for number in range(len(seeds))]


@dataclass
class _Group:
    """Episodes with the same seed that an asynchronous rollout plays, in any free envs."""

    seed: int
    number: int
    version: int
    """Version of the weights for its first turn."""
    num_waiting: int
    """Number of episodes that no env has begun."""
    episodes: list[TokenEpisode] = field(default_factory=list)
    """Finished episodes."""


class TurnRunner(BaseRunner):
    """Envs in turns, played side by side by the policy in training, in its process.

    Seeds of episodes and replies come from one generator of the runner's own.

    Args:
        config: config of the algorithm.
        worker_index: 0; there are no others.
    """

    actor: Actor
    """Actor that plays with the learner's policy; set by the algorithm."""
    show: Callable[[Sequence[TokenEpisode]], None] | None = None
    """Function called with each row of turns as soon as it was played; set by the algorithm."""
    use_newest: Callable[[], None] = staticmethod(lambda: None)
    """Function that makes the actor use the newest weights from now on; set by the algorithm."""

    def __init__(self, *, config: Any, worker_index: int = 0, **unused: object) -> None:
        super().__init__(config=config, worker_index=worker_index)
        self._noise = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(3,)))
        task, settings = config.task, config.env_settings
        self.slots = [
            EnvSlot(make_env(task, settings, config.seed), task, index, config.history)
            for index in range(config.algo.num_envs)
        ]
        self._next_group = 0
        self._forget_asked()
        for slot in self.slots:
            slot.begin(self._fresh_seed())

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride] - its callers pass these
        self, *, num_turns: int
    ) -> list[TokenEpisode]:
        """Plays pieces of `num_turns` turns of every env or, if asynchronous, as many of all together; an episode that
        ends is followed by the next at once.
        """
        for slot in self.slots:
            slot.begin_piece(self._new_group())
        is_asynchronous = self.config.algo.rollout == "asynchronous"
        total = num_turns * len(self.slots)
        episodes: list[TokenEpisode] = []
        for slot in self._as_answered(total) if is_asynchronous else self._row_by_row(num_turns):
            if slot.is_over:
                episodes.append(slot.episode())
                slot.begin(self._fresh_seed(), self._new_group(), int(episodes[-1].played_at[-1]) + 1)
        self.actor.show(self.slots)  # the critic predicts the values of the last states
        return episodes + [slot.episode() for slot in self.slots if slot.piece_len]

    def sample_groups(self, *, group_size: int) -> list[TokenEpisode]:
        """Plays as many whole episodes as there are envs; `group_size` neighbours start from the same seed."""
        if self.config.algo.rollout == "asynchronous":
            return self._groups_as_answered(group_size)
        # one seed for a group: its episodes only differ by the policy's samples
        starts = [(self._fresh_seed(), self._new_group()) for _ in range(len(self.slots) // group_size)]
        for index, slot in enumerate(self.slots):
            slot.begin(*starts[index // group_size])
        for _ in self._row_by_row(None):
            continue
        return [slot.episode() for slot in self.slots]

    def _new_group(self) -> int:
        self._next_group += 1
        return self._next_group - 1

    def _row_by_row(self, num_turns: int | None) -> Iterator[EnvSlot]:
        """Yields each slot after each of its turns, `num_turns` of them; None: until all episodes are over."""
        for _ in itertools.count() if num_turns is None else range(num_turns):
            if not (running := [slot for slot in self.slots if not slot.is_over]):
                return
            self._play(running, self.actor.act(running, [self._reply_seed() for _ in running]))
            yield from running

    def _as_answered(self, num_turns: int) -> Iterator[EnvSlot]:
        """Yields a slot after each of `num_turns` turns, each played as soon as its reply is there.

        Replies under way by newer weights than those that the rollout began with are carried over into the next one,
        where they are no older than any other; all others belong to this rollout, which waits for them.
        """
        first, num_played = self.actor.version, 0
        while True:
            self.use_newest()
            is_newer = self.actor.version > first
            asked = {slot.index for slot, _ in self._asked.values()}
            num_old = sum(version <= first for _, version in self._asked.values())
            for slot in self.slots:
                if slot.index not in asked and (is_newer or num_played + num_old < num_turns):
                    self._ask(slot)
                    num_old += not is_newer
            if num_played == num_turns:
                return
            is_full = num_played + num_old == num_turns
            awaited = [reply for reply, (_, version) in self._asked.items() if version <= first or not is_full]
            for reply in wait(awaited, return_when=FIRST_COMPLETED).done:
                is_old = self._asked[reply][1] <= first
                if is_old or num_played + num_old < num_turns:
                    num_played, num_old = num_played + 1, num_old - is_old
                    yield self._take(reply)

    def _groups_as_answered(self, group_size: int) -> list[TokenEpisode]:
        """Plays the next groups to completion, as many episodes as there are envs; an env without work for them begins
        later groups, as soon as there are newer weights than at the rollout's start.

        A group is as old as its first turn: groups begun with newer weights are carried over, all others are waited
        for.
        """
        first, num_wanted = self.actor.version, len(self.slots) // group_size
        whole: list[_Group] = []
        while True:
            self.use_newest()
            self._begin_groups(first, len(whole), group_size)
            asked = {slot.index for slot, _ in self._asked.values()}
            for slot in self.slots:
                if slot.index not in asked | self._free:
                    self._ask(slot)
            if len(whole) == num_wanted:
                return [episode for group in whole for episode in group.episodes]
            for reply in wait(self._asked, return_when=FIRST_COMPLETED).done:
                slot = self._take(reply)
                if slot.is_over:
                    self._free.add(slot.index)
                    self._groups[slot.group].episodes.append(slot.episode())
            ended = [group for group in self._groups.values() if len(group.episodes) == group_size]
            for group in sorted(ended, key=lambda group: group.version > first):  # groups that are due come first
                if group.version <= first or len(whole) + self._num_due(first) < num_wanted:
                    whole.append(self._groups.pop(group.number))

    def _begin_groups(self, first: int, num_whole: int, group_size: int) -> None:
        """Lets free envs begin the rest of the groups, and new groups, in a rollout that began with weights `first` and
        has `num_whole` of its groups.
        """
        num_wanted, is_newer = len(self.slots) // group_size, self.actor.version > first
        for index in sorted(self._free):
            group = next((group for group in self._groups.values() if group.num_waiting), None)
            if group is None:
                num_due = self._num_due(first)
                # carried-over groups are due in the next rollout, which takes no more than this one
                if (len(self._groups) - num_due if is_newer else num_whole + num_due) == num_wanted:
                    return
                group = _Group(self._fresh_seed(), self._new_group(), self.actor.version, group_size)
                self._groups[group.number] = group
            group.num_waiting -= 1
            self._free.remove(index)
            self.slots[index].begin(group.seed, group.number)

    def _num_due(self, first: int) -> int:
        """Returns the number of unfinished groups that a rollout with weights `first` cannot carry over."""
        return sum(group.version <= first for group in self._groups.values())

    def _ask(self, slot: EnvSlot) -> None:
        self._asked[self.actor.begin(slot, self._reply_seed())] = slot, self.actor.version

    def _take(self, reply: Future[SampledReply]) -> EnvSlot:
        """Plays the turn answered by `reply`; returns its slot."""
        slot, _ = self._asked.pop(reply)
        self._play([slot], [self.actor.end(reply)])
        return slot

    def _play(self, slots: Sequence[EnvSlot], replies: Sequence[SampledReply]) -> None:
        """Plays a turn of each of `slots`.

        States cut off by a time limit are shown to the policy: its critic predicts their values next.
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

    def get_spaces(self) -> dict[str, tuple[gym.Space, gym.Space]]:
        """Returns the spaces of snapshots and action numbers, under RLlib's name for the only module."""
        env = self.slots[0].env
        snapshots = gym.spaces.Box(-np.inf, np.inf, (env.snapshot_size,), np.float32)
        return {DEFAULT_MODULE_ID: (snapshots, gym.spaces.Discrete(len(env.action_names)))}

    def save_tree(self) -> dict[str, Any]:
        """Returns envs, running episodes and future seeds: after `load_tree` the future is bit-identical, except that
        data carried over by an asynchronous rollout are left out.
        """
        return {
            "slots": [slot.get_state() for slot in self.slots],
            "noise": self._noise.bit_generator.state,
            "carried_over": [len(self._asked), len(self._groups)],
        }

    def load_tree(self, tree: dict[str, Any]) -> None:
        for slot, saved in zip(self.slots, tree["slots"], strict=True):
            slot.set_state(saved)
        self._noise.bit_generator.state = tree["noise"]
        self._forget_asked()
        replies, groups = tree.get("carried_over", (0, 0))
        if replies or groups:
            logger.warning(
                "the checkpoint leaves out what was carried over to the next rollout (replies under way: %d, groups: "
                "%d): it is sampled anew, so this run does not repeat the one that wrote it", replies, groups
            )  # fmt: skip

    def _forget_asked(self) -> None:
        """Drops all data carried over into the next rollout."""
        self._asked: dict[Future[SampledReply], tuple[EnvSlot, int]] = {}
        self._groups: dict[int, _Group] = {}
        self._free = set(range(len(self.slots)))

    def stop(self) -> None:
        """Closes the envs."""
        for slot in self.slots:
            slot.env.close()
