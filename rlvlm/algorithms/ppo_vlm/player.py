"""Whole episodes of a VLM policy, for evaluations and `rlvlm eval`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from rlvlm.algorithms.env_slots import EnvSlot
from rlvlm.algorithms.evaluation import FIRST_SEED, Evaluation, PlayedEpisode
from rlvlm.algorithms.ppo_vlm.play import Actor, PolicyOutput, play_episodes
from rlvlm.core import metrics
from rlvlm.core.turns import TurnEpisode
from rlvlm.demonstrations.players import Player as Script
from rlvlm.judges.agreement import wilson_interval

_FIRST_SAMPLED_SEED = 2 * FIRST_SEED
"""Sampled evaluations start here: no seed is shared with greedy ones or with training."""


class TurnsPlayer:
    """Plays a policy in envs of its own; training does not notice.

    Args:
        actor: asks the policy.
        make_slot: makes a slot with a new env.
        num_slots: episodes under way at once.
        greedy: the likeliest token each time.
        milestones: of the env, by name, see `TurnEnv`.
    """

    def __init__(
        self,
        actor: Actor,
        make_slot: Callable[[], EnvSlot],
        num_slots: int,
        greedy: bool = True,
        milestones: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._actor = actor
        self._milestones = milestones
        self._make_slot = make_slot
        self._num_slots = num_slots
        self._greedy = greedy

    def play(self, seeds: Sequence[int]) -> list[PlayedEpisode]:
        """An episode from a reset with each seed."""
        return [played_episode(episode) for episode, _ in self.play_whole(seeds, self._greedy)]

    def play_whole(self, seeds: Sequence[int], greedy: bool) -> list[tuple[TurnEpisode, list[PolicyOutput]]]:
        """The same with everything that is known of each turn."""
        return play_episodes(self._actor, self._make_slot, seeds, self._num_slots, greedy)

    def evaluate(self, num_episodes: int) -> tuple[Evaluation, list[tuple[TurnEpisode, list[PolicyOutput]]]]:
        """As many episodes greedy as sampled, each kind from its own fixed seeds; and the greedy ones themselves.

        Args:
            num_episodes: of each kind, >= 1.
        """
        greedy = self.play_whole(range(FIRST_SEED, FIRST_SEED + num_episodes), True)
        sampled = self.play_whole(range(_FIRST_SAMPLED_SEED, _FIRST_SAMPLED_SEED + num_episodes), False)
        outputs = [output for _, outputs in greedy for output in outputs]
        invalid = [reply.action is None for episode, _ in greedy for reply in episode.replies]
        strict, sampled_strict = ([is_strict_success(episode) for episode, _ in played] for played in (greedy, sampled))
        strict_low, strict_high = wilson_interval(sum(strict), len(strict))
        sampled_low, sampled_high = wilson_interval(sum(sampled_strict), len(sampled_strict))
        measured = {
            metrics.EVAL_STRICT_SUCCESS: share(strict),
            metrics.EVAL_STRICT_LOW: strict_low,
            metrics.EVAL_STRICT_HIGH: strict_high,
            metrics.EVAL_SAMPLED_SUCCESS: share(bool(episode.success.any()) for episode, _ in sampled),
            metrics.EVAL_SAMPLED_STRICT_SUCCESS: share(sampled_strict),
            metrics.EVAL_SAMPLED_STRICT_LOW: sampled_low,
            metrics.EVAL_SAMPLED_STRICT_HIGH: sampled_high,
            metrics.EVAL_INVALID: share(invalid),
            metrics.EVAL_STANDS_STILL: share(stands_still(episode, outputs) for episode, outputs in greedy),
            metrics.EVAL_REPLY_TOKENS: float(np.mean([len(output.tokens.reply_ids) for output in outputs]))
            if outputs
            else 0.0,
        }
        both = {
            metrics.EVAL_REACHED: [played_episode(episode) for episode, _ in greedy],
            metrics.EVAL_SAMPLED_REACHED: [played_episode(episode) for episode, _ in sampled],
        }
        measured |= {
            before + name: share(episode.reaches(least) for episode in episodes)
            for before, episodes in both.items()
            for name, least in self._milestones.items()
        }
        return Evaluation(episodes=both[metrics.EVAL_REACHED], metrics=measured), greedy


class ScriptPlayer:
    """Plays a script, for comparison with policies.

    Args:
        script: e.g. the env's expert.
        slot: it plays here.
    """

    def __init__(self, script: Script, slot: EnvSlot) -> None:
        self._script = script
        self._slot = slot

    def play(self, seeds: Sequence[int]) -> list[PlayedEpisode]:
        """An episode from a reset with each seed."""
        played = []
        for seed in seeds:
            self._slot.begin(seed)
            self._script.begin(seed)
            episode = None
            while episode is None:
                episode = self._slot.play(self._script.reply(self._slot.env, self._slot.turn).text).episode
            played.append(played_episode(episode))
        return played


def played_episode(episode: TurnEpisode) -> PlayedEpisode:
    """An episode as evaluations keep it; the captions are the replies."""
    return PlayedEpisode(
        snapshots=episode.snapshots[1:],
        env_rewards=episode.env_rewards,
        learned_rewards=np.full(len(episode), np.nan, np.float32),
        success=episode.success,
        progress=episode.progress,
        captions=tuple(reply.text for reply in episode.replies),
    )


def is_strict_success(episode: TurnEpisode) -> bool:
    """Whether the episode's return is above 0: RL4VLM's test, which in some tasks one wrong turn fails."""
    return float(episode.env_rewards.sum(dtype=np.float64)) > 0


def stands_still(episode: TurnEpisode, outputs: Sequence[PolicyOutput]) -> bool:
    """Whether a greedy episode was cut while nothing moved: image and words of its last turn were those of the turn
    before. Such a policy does the same for ever, be it an action that changes nothing or a reply that cannot be read.
    """
    if episode.terminated or len(outputs) < 2:
        return False
    before, last = (output.tokens for output in outputs[-2:])
    return before.image == last.image and np.array_equal(before.prompt_ids, last.prompt_ids)


def share(truths: Iterable[bool]) -> float:
    """Share of those that are true; 0 of none."""
    listed = list(truths)
    return float(np.mean(listed)) if listed else 0.0
