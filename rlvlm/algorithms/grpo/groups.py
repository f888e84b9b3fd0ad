"""Groups of scored episodes: which teach something, and what is kept for the next update."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvlm.algorithms.grpo.advantages import group_advantages, group_scores, informative_groups
from rlvlm.algorithms.grpo.config import AdvantageConfig
from rlvlm.types.chunks import ChunkEpisode
from rlvlm.types.steps import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Episodes of one initial state and instruction, with their scores."""

    episodes: tuple[ChunkEpisode, ...]
    scores: FloatArray
    """[G] by the reward source; success is no part of it."""

    def __post_init__(self) -> None:
        kinds = {(episode.task, episode.instruction, episode.state_id, episode.group) for episode in self.episodes}
        assert len(kinds) == 1, f"a group has one task, instruction and initial state, got {sorted(kinds)}"
        assert len(self.scores) == len(self.episodes), "one score for each episode"


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one update learns from: the episodes of its groups, one after the other, and what each is worth."""

    episodes: list[ChunkEpisode]
    advantages: FloatArray
    """[B] one for each episode."""


def gathered(episodes: Sequence[ChunkEpisode], scores: FloatArray) -> list[Group]:
    """Episodes and their scores `[B]` by group, whatever order they are in."""
    table, places = group_scores(scores, np.array([episode.group for episode in episodes], np.int64))
    return [
        Group(episodes=tuple(episodes[place] for place in row), scores=own)
        for row, own in zip(places.tolist(), table, strict=True)
    ]


def sifted(groups: Sequence[Group], config: AdvantageConfig) -> list[Group]:
    """Those of `groups` that teach something."""
    if not groups:
        return []
    keeps = informative_groups(np.stack([group.scores for group in groups]), config)
    return [group for group, keep in zip(groups, keeps.tolist(), strict=True) if keep]


def weighed(groups: Sequence[Group], config: AdvantageConfig) -> Update:
    """The update that `groups` make."""
    scores = np.stack([group.scores for group in groups])
    advantages = group_advantages(scores, baseline=config.baseline, divide_by_std=config.divide_by_std)
    return Update(
        episodes=[episode for group in groups for episode in group.episodes], advantages=advantages.reshape(-1)
    )
