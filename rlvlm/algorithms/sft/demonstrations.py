"""Turns played by an env's own scripted expert, as whole episodes."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlvlm.algorithms.env_slots import EnvSlot
from rlvlm.algorithms.sft.config import SFTConfig
from rlvlm.core.errors import UsageError
from rlvlm.core.turns import TurnEpisode
from rlvlm.demonstrations.players import ScriptedExpert

_FIRST_DEMONSTRATION_SEED = 2**33
"""Demonstrations start from seeds that neither training nor evaluation uses."""


def demonstrate(slot: EnvSlot, config: SFTConfig, seed: int) -> list[TurnEpisode]:
    """Whole episodes with at least `config.turns` turns together.

    Where the player was perturbed, the replies are those demonstrated, and everything else is what was really played.

    Args:
        slot: with an env that has an expert.
        config: how many turns, with how many mistakes; the thought beside a wrong action stays the expert's.
        seed: of starts and mistakes.

    Raises:
        UsageError: nobody knows how to play this env.

    Source of perturbed: noise injected into the supervisor, Laskey et al. 2017 (DART), arXiv:1703.09327.
    """
    if not slot.env.has_expert:
        raise UsageError(
            "this env has no scripted expert to show how it is played",
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
            text = expert.reply(slot.env, slot.turn).text
            replies.append(slot.env.read(text))
            if config.p_perturb and noise.random() < config.p_perturb:
                others = [action for action in slot.env.legal() if action != replies[-1].action]
                text = slot.env.action_text(int(noise.choice(others)))
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
