"""Turns played by a world's own scripted expert, as whole episodes."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlvlm.algorithms.seats import Seat
from rlvlm.algorithms.sft.config import SFTConfig
from rlvlm.demonstrations.players import ScriptedExpert
from rlvlm.types.turns import TurnEpisode

_FIRST_DEMONSTRATION_SEED = 2**33
"""Demonstrations start from seeds that neither training nor evaluation uses."""


def demonstrate(seat: Seat, config: SFTConfig, seed: int) -> list[TurnEpisode]:
    """Whole episodes with at least `config.turns` turns together.

    Where the player strays, an episode's replies are those demonstrated, and everything else is what was really played.

    Args:
        seat: with a world that has an expert.
        config: how many turns, with how many mistakes; the thought beside a wrong action stays the expert's.
        seed: of starts and mistakes.

    Raises:
        ValueError: nobody knows how to play this world.

    Source of straying: noise injected into the supervisor, Laskey et al. 2017 (DART), arXiv:1703.09327.
    """
    if not seat.world.has_expert:
        raise ValueError("this world has no scripted expert; give a folder of demonstrations, or set --sft.turns 0")
    expert = ScriptedExpert(p_wrong_action=config.p_wrong)
    noise = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(4,)))
    episodes: list[TurnEpisode] = []
    turns = 0
    while turns < config.turns:
        start = int(noise.integers(_FIRST_DEMONSTRATION_SEED, 2 * _FIRST_DEMONSTRATION_SEED))
        seat.begin(start)
        expert.begin(start)
        episode, replies = None, []
        while episode is None:
            text = expert.reply(seat.world, seat.turn).text
            replies.append(seat.world.read(text))
            if config.p_stray and noise.random() < config.p_stray:
                others = [action for action in seat.world.legal() if action != replies[-1].action]
                text = seat.world.action_text(int(noise.choice(others)))
            episode = seat.play(text).episode
        episodes.append(dataclasses.replace(episode, replies=tuple(replies)))
        turns += len(episode)
    return episodes


def split(episodes: Sequence[TurnEpisode], share: float) -> tuple[list[TurnEpisode], list[TurnEpisode]]:
    """Episodes to learn from and episodes held out: every k-th, so that about `share` of them are kept apart.

    Whole episodes go to one side: turns of one episode look alike. With fewer than two episodes none is held out.
    """
    every = round(1 / share) if share > 0 else len(episodes) + 1
    held_out = list(episodes[every - 1 :: every]) if len(episodes) > 1 else []
    if share > 0 and len(episodes) > 1 and not held_out:
        held_out = [episodes[-1]]
    kept = {id(episode) for episode in held_out}
    return [episode for episode in episodes if id(episode) not in kept], held_out
