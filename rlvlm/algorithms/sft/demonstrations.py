"""Turns played by a world's own scripted expert, as whole episodes."""

from collections.abc import Sequence

import numpy as np

from rlvlm.algorithms.seats import Seat
from rlvlm.demonstrations.players import ScriptedExpert
from rlvlm.types.turns import TurnEpisode

_FIRST_DEMONSTRATION_SEED = 2**33
"""Demonstrations start from seeds that neither training nor evaluation uses."""


def demonstrate(seat: Seat, num_turns: int, p_wrong: float, seed: int) -> list[TurnEpisode]:
    """Whole episodes with at least `num_turns` turns together.

    Args:
        seat: with a world that has an expert.
        num_turns: >= 0.
        p_wrong: probability that an action is drawn from the other legal ones instead; the thought stays the expert's.
        seed: of starts and mistakes.

    Raises:
        ValueError: nobody knows how to play this world.
    """
    if not seat.world.has_expert:
        raise ValueError("this world has no scripted expert; give a folder of demonstrations, or set --sft.turns 0")
    expert = ScriptedExpert(p_wrong_action=p_wrong)
    noise = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(4,)))
    episodes: list[TurnEpisode] = []
    turns = 0
    while turns < num_turns:
        start = int(noise.integers(_FIRST_DEMONSTRATION_SEED, 2 * _FIRST_DEMONSTRATION_SEED))
        seat.begin(start)
        expert.begin(start)
        episode = None
        while episode is None:
            episode = seat.play(expert.reply(seat.world, seat.turn).text).episode
        episodes.append(episode)
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
