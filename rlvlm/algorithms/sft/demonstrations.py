"""Turns played by a world's own scripted expert, as whole episodes."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlvlm.algorithms.sft.config import SFTConfig
from rlvlm.algorithms.world_slots import WorldSlot
from rlvlm.demonstrations.players import ScriptedExpert
from rlvlm.errors import UsageError
from rlvlm.types.turns import TurnEpisode

_FIRST_DEMONSTRATION_SEED = 2**33
"""Demonstrations start from seeds that neither training nor evaluation uses."""


def demonstrate(slot: WorldSlot, config: SFTConfig, seed: int) -> list[TurnEpisode]:
    """Whole episodes with at least `config.turns` turns together.

    Where the player strays, an episode's replies are those demonstrated, and everything else is what was really played.

    Args:
        slot: with a world that has an expert.
        config: how many turns, with how many mistakes; the thought beside a wrong action stays the expert's.
        seed: of starts and mistakes.

    Raises:
        UsageError: nobody knows how to play this world.

    Source of straying: noise injected into the supervisor, Laskey et al. 2017 (DART), arXiv:1703.09327.
    """
    if not slot.world.has_expert:
        raise UsageError(
            "this world has no scripted expert to show how it is played",
            "--sft.demonstrations DIR, --sft.start-from DIR, or --sft.turns 0 and a model that can play a little",
        )
    expert = ScriptedExpert(p_wrong_action=config.p_wrong)
    noise = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(4,)))
    episodes: list[TurnEpisode] = []
    turns = 0
    while turns < config.turns:
        start = int(noise.integers(_FIRST_DEMONSTRATION_SEED, 2 * _FIRST_DEMONSTRATION_SEED))
        slot.begin(start)
        expert.begin(start)
        episode, replies = None, []
        while episode is None:
            text = expert.reply(slot.world, slot.turn).text
            replies.append(slot.world.read(text))
            if config.p_stray and noise.random() < config.p_stray:
                others = [action for action in slot.world.legal() if action != replies[-1].action]
                text = slot.world.action_text(int(noise.choice(others)))
            episode = slot.play(text).episode
        episodes.append(dataclasses.replace(episode, replies=tuple(replies)))
        turns += len(episode)
    return episodes


def check_actions(episodes: Sequence[TurnEpisode]) -> None:
    """Passes where a policy that acts by a head would have something to learn.

    Raises:
        UsageError: no turn has an action that can be read.
    """
    if not any(reply.action is not None for episode in episodes for reply in episode.replies):
        raise UsageError(
            f"of {sum(map(len, episodes)):,} demonstrated turns to learn from none has an action that can be read, and "
            "an action head learns nothing else",
            "look at them with rlvlm data show DIR, and collect others with rlvlm collect",
        )


def split(episodes: Sequence[TurnEpisode], share: float) -> tuple[list[TurnEpisode], list[TurnEpisode]]:
    """Episodes to learn from, and episodes held out: `share` of them, spread evenly.

    Whole episodes go to one side: turns of one episode look alike. One episode at least is learned from and, where
    there are two and the share is not 0, one at least is held out.

    Args:
        episodes: in the order in which they were played.
        share: in [0, 1).
    """
    learned: list[TurnEpisode] = []
    held_out: list[TurnEpisode] = []
    for number, episode in enumerate(episodes):
        is_held_out = int((number + 1) * share) > int(number * share)
        (held_out if is_held_out else learned).append(episode)
    if share > 0 and len(episodes) > 1 and not held_out:
        held_out.append(learned.pop())
    return learned, held_out
