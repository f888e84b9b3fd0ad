"""Where an update's groups come from: episodes are rolled out, scored, and sifted for groups that teach something."""

import time
from typing import Any

import numpy as np

from rlvlm.algorithms.base import TrainingStats
from rlvlm.algorithms.grpo.config import GRPOConfig, ScoreConfig
from rlvlm.algorithms.grpo.credit.groups import Group, filter_groups, group_episodes
from rlvlm.algorithms.grpo.reward.scoring import EpisodeScorer
from rlvlm.algorithms.grpo.rollouts import ObsProcessor
from rlvlm.algorithms.runner_group import LocalRunnerGroup, RemoteRunnerGroup
from rlvlm.core import metrics
from rlvlm.core.chunks import ChunkEpisode
from rlvlm.policies.vla.tokens import ActionScale


class GroupSource:
    """Rolls out groups, has their episodes scored, and keeps those that teach something.

    Args:
        grpo: how many groups an update wants, how often they are rolled out for it, and which teach something.
        scores: in how many parts a rollout is scored, and whether scores are waited for one update later.
        runner_group: rolls out; yields `Rollout`s.
        obs_processor: keeps their images for the update.
        scorer: says what an episode is worth.
        stats: counts steps and episodes, and takes the figures.
    """

    def __init__(
        self,
        grpo: GRPOConfig,
        scores: ScoreConfig,
        runner_group: LocalRunnerGroup[Any] | RemoteRunnerGroup[Any],
        obs_processor: ObsProcessor,
        scorer: EpisodeScorer,
        stats: TrainingStats,
    ) -> None:
        self._grpo = grpo
        self._scores = scores
        self._runner_group = runner_group
        self._obs_processor = obs_processor
        self._scorer = scorer
        self._stats = stats
        self._waiting: list[ChunkEpisode] = []
        self._waiting_step = 0
        noise = grpo.advantage.scorer_noise
        self.scorer_noise = 0.0 if noise == "measured" else noise
        """Standard deviation of an episode's score by a scorer that is asked twice."""
        self.rollout_s = 0.0
        """Seconds that the newest update's rollouts took."""

    def next(self, scale: ActionScale) -> list[Group]:
        """Groups for the next update, played by the policy as it is now.

        They are rolled out until there are as many as wanted that teach something, or `rounds` times. With
        `ScoreConfig.ahead` they are those of the call before, and what is played now is scored meanwhile.
        """
        self.rollout_s = 0.0
        if self._scores.ahead:
            waiting, step = self._waiting, self._waiting_step
            self._waiting, self._waiting_step = self._played(scale), self._stats.env_steps
            return self._sifted(self._scored(waiting, step))
        groups: list[Group] = []
        kept: list[Group] = []
        for _ in range(self._grpo.rounds):
            played = self._played(scale)
            groups += self._scored(played, self._stats.env_steps)
            kept = self._sifted(groups)
            if len(kept) >= self._grpo.groups:
                break
        return kept

    def rest(self) -> list[Group]:
        """Groups of what was played and is still being scored; afterwards nothing is on its way."""
        waiting, self._waiting = self._waiting, []
        return self._sifted(self._scored(waiting, self._waiting_step))

    def forget(self) -> None:
        """Forgets what is on its way."""
        self._waiting = []

    def _played(self, scale: ActionScale) -> list[ChunkEpisode]:
        """A rollout, counted and handed over to be scored; groups of a runner that is lost are played by the others."""
        episodes: list[ChunkEpisode] = []
        began, runners = time.monotonic(), self._runner_group
        for num_missing in self._parts():
            while num_missing > 0:
                runners.start({"num_groups": num_missing, "scale": scale, "players": runners.alive()})
                rollout = runners.collect()
                self._obs_processor.take(rollout.images)
                self._scorer.begin(rollout.episodes)
                episodes += rollout.episodes
                num_missing -= len(rollout.episodes) // self._grpo.group_size
        self.rollout_s += time.monotonic() - began
        ended = [(float(episode.env_rewards.sum()), episode.success) for episode in episodes]
        self._stats.record(sum(map(len, episodes)), ended)
        return episodes

    def _parts(self) -> list[int]:
        """Groups of each part of a rollout: all at once where nobody has to look, and some for each env runner."""
        groups = self._grpo.groups
        most = max(1, groups // max(1, self._grpo.env_runners))
        parts = min(self._scores.parts, most) if self._scores.source == "judged" else 1
        return [len(part) for part in np.array_split(np.arange(groups), parts)]

    def _scored(self, episodes: list[ChunkEpisode], env_step: int) -> list[Group]:
        """The groups of a rollout that ended at `env_step`, once it has its scores; none where nothing was played."""
        if not episodes:
            return []
        return group_episodes(episodes, self._scorer.collect(len(episodes), env_step))

    def _sifted(self, groups: list[Group]) -> list[Group]:
        """Those of an update's groups that teach something; to a critic, all whose episodes have scores. The figures
        are of all of them.
        """
        if not groups:
            return []
        kept = filter_groups(groups, self._grpo.advantage, self.scorer_noise)
        episodes = [episode for group in groups for episode in group.episodes]
        scores = np.concatenate([group.scores for group in groups])
        self._stats.note(
            {
                metrics.GRPO_KEPT: len(kept) / len(groups),
                metrics.GRPO_SCORE: float(np.nanmean(scores)) if np.isfinite(scores).any() else 0.0,
                metrics.TRAIN_EPISODE_RETURN: float(np.mean([episode.env_rewards.sum() for episode in episodes])),
                metrics.TRAIN_EPISODE_SUCCESS: float(np.mean([episode.success for episode in episodes])),
                metrics.TRAIN_SUCCESS_AT_END: float(np.mean([episode.success_at_end for episode in episodes])),
            }
        )
        return kept
