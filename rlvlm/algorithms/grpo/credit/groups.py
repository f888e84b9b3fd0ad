"""Groups of scored episodes: which of them teach something, and what an update learns from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlvlm.algorithms.grpo.config import AdvantageConfig
from rlvlm.algorithms.grpo.credit.advantages import group_advantages, group_scores, informative_groups
from rlvlm.core.chunks import ChunkEpisode
from rlvlm.core.steps import FloatArray


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
class UpdateBatch:
    """What one update learns from: the episodes of its groups, one after the other, and what each chunk is worth."""

    episodes: list[ChunkEpisode]
    advantages: FloatArray
    """[R] one for each chunk, episode after episode."""
    chosen: NDArray[np.intp] | None = None
    """[Q] the chunks that are learned from, rising; None for all."""

    def __post_init__(self) -> None:
        num_chunks = sum(len(episode.steps) for episode in self.episodes)
        assert len(self.advantages) == num_chunks, f"{num_chunks} chunks need as many advantages"

    @property
    def rows(self) -> NDArray[np.intp]:
        """[Q] the chunks that are learned from."""
        return np.arange(len(self.advantages)) if self.chosen is None else self.chosen


def group_episodes(episodes: Sequence[ChunkEpisode], scores: FloatArray) -> list[Group]:
    """Episodes and their scores `[B]` by group, whatever order they are in."""
    table, places = group_scores(scores, np.array([episode.group for episode in episodes], np.int64))
    return [
        Group(episodes=tuple(episodes[place] for place in row), scores=own)
        for row, own in zip(places.tolist(), table, strict=True)
    ]


def filter_groups(groups: Sequence[Group], config: AdvantageConfig, scorer_noise: float) -> list[Group]:
    """Those of `groups` that teach something; to a critic, all whose episodes have scores do."""
    if not groups:
        return []
    scores = np.stack([group.scores for group in groups])
    is_scored = np.isfinite(scores).all(axis=1)
    keeps = is_scored
    if config.baseline != "critic":
        keeps = is_scored & informative_groups(scores, config, scorer_noise)
    return [groups[place] for place in np.flatnonzero(keeps).tolist()]


def make_update(groups: Sequence[Group], config: AdvantageConfig) -> UpdateBatch:
    """The update that `groups` make by themselves: all chunks of an episode are worth the same.

    With `chunk_share` the chunks of each group are learned from that differ most from what the other kind of its
    episodes did; they weigh as much as among all.

    Source: arXiv:2605.16154, which learns from the fifth of the chunks whose actions differ most between successes and
    failures. Departure: how it measures that is not known here; see `differences`.
    """
    assert config.baseline != "critic", "a critic weighs chunk by chunk"
    scores = np.stack([group.scores for group in groups])
    advantages = group_advantages(scores, baseline=config.baseline, divide_by_std=config.divide_by_std)
    episodes = [episode for group in groups for episode in group.episodes]
    chosen = None
    if config.chunk_share < 1:
        kept = []
        for group, own in zip(groups, advantages, strict=True):
            apart = differences(group.episodes, own)
            is_kept = np.zeros(len(apart), bool)
            is_kept[np.argsort(-apart, kind="stable")[: math.ceil(config.chunk_share * len(apart))]] = True
            kept.append(is_kept)
        chosen = np.flatnonzero(np.concatenate(kept))
    return UpdateBatch(
        episodes=episodes,
        advantages=advantages.reshape(-1).repeat([len(episode.steps) for episode in episodes]),
        chosen=chosen,
    )


def differences(episodes: Sequence[ChunkEpisode], advantages: FloatArray) -> FloatArray:
    """How far each chunk's actions are from what the other kind of a group's episodes did at its time.

    Better episodes are held against worse ones and the other way round, chunks of one number in their episodes against
    each other: the distance of a chunk's tokens from the other kind's mean, in standard deviations of all of them (and
    one bin, so that tokens that hardly differ do not count much), mean over tokens.

    Args:
        episodes: G of one initial state.
        advantages: [G]; above 0 is better, below 0 worse.

    Returns:
        [C of all episodes], one after the other; 0 where only one of the two kinds was still acting.
    """
    apart = [np.zeros(len(episode.steps), np.float32) for episode in episodes]
    for number in range(max(len(one) for one in apart)):
        acting = [place for place, one in enumerate(apart) if len(one) > number]
        bins = np.stack([episodes[place].bins[number] for place in acting]).astype(np.float32)
        kinds = np.sign(advantages[acting])
        if not {-1.0, 1.0} <= set(kinds.tolist()):
            continue
        unit = bins.std(axis=0) + 1.0
        means = {kind: bins[kinds == kind].mean(axis=0) for kind in (-1.0, 1.0)}
        for place, own, kind in zip(acting, bins, kinds.tolist(), strict=True):
            if kind:
                apart[place][number] = (np.abs(own - means[-kind]) / unit).mean()
    return np.concatenate(apart)
